"""Phrases of the support desk: what customers ask (TEMPLATES), and what stands in the gaps (FILLERS).

Template syntax: ``{slot}`` is filled anew each time, ``[a|b|c]`` is one of the alternatives and belongs to the
paraphrase. In a filler ``#`` is one random digit. Intents go from the most to the least popular. Neighbours such as
refund_request and refund_status share their words on purpose.
"""

from __future__ import annotations

from typing import Final

TEMPLATES: Final[dict[str, tuple[str, ...]]] = {
    "order_status": (
        "where is my [order|parcel|package] {order}?",
        "when will [the|my] {product} [arrive|be delivered|get here]?",
        "I ordered a {product} on {date} and it has not [shipped|arrived|left the warehouse] yet.",
        "{want} [track|follow] order {order}.",
        "the tracking page [has not changed|still says processing] since {date}.",
        "has my order {order} been [sent|dispatched|shipped] to {city}?",
        "is there any news on the delivery of my {product}?",
        "still waiting for {order}, it was promised for {date}.",
        "{courier} has no record of parcel {order}, did you send it already?",
    ),
    "refund_request": (
        "{want} [get a refund|get my money back] for order {order}.",
        "I am not happy with the {product} and want my money back.",
        "please refund the {amount} I paid for the {product}.",
        "{want} [claim|request|ask for] a refund of {amount}.",
        "the {product} is not what I expected, I would rather have the money.",
        "I demand a full refund for {order}.",
        "I did not use the {plan} plan at all in this period, am I entitled to a refund?",
        "who do I ask to have the payment of {amount} [returned|reversed|given back]?",
    ),
    "refund_status": (
        "where is my refund for order {order}?",
        "I sent the {product} back on {date}, when [do I get|will I see] my money?",
        "my refund of {amount} has not [arrived|shown up|reached my account] yet.",
        "how long does a refund [take|need] to reach my card?",
        "you promised a refund on {date} and I am still waiting.",
        "has the {amount} for the {product} been paid back?",
        "{want} [check|know] the status of my refund for {order}.",
        "I cancelled order {order}, when is the money returned?",
    ),
    "cancel_order": (
        "{want} cancel [my order|order {order}|the order from {date}].",
        "please stop order {order} before it ships.",
        "I ordered the {product} by mistake, please [cancel it|call it off].",
        "I do not want the {product} any more, [cancel the order|do not send it].",
        "is it too late to cancel {order}?",
        "I bought two {product} orders by accident, cancel one of them.",
        "the cancel button for order {order} does nothing.",
        "the {product} takes too long to arrive, so I want to cancel.",
    ),
    "login_fails": (
        "I cannot [log in|sign in] to my account [on|from] my {device}.",
        "[login|sign in] fails with {error}.",
        "it says my password is wrong but it is [right|correct].",
        "the [app|site] keeps sending me back to the login page.",
        "my account is locked after too many attempts.",
        "since {date} the [app|website] does not let me in any more.",
        "I am getting {error} when I [enter my password|sign in|log on].",
        "the login screen on the {device} just loads forever.",
    ),
    "reset_password": (
        "I forgot my password, [how do I get back in|can you send a new one]?",
        "{want} reset my password.",
        "the password reset [email|link|mail] never arrived.",
        "the reset link [has expired|is not valid|shows {error}].",
        "I do not remember my password and cannot [log in|sign in].",
        "please send me a [link|mail] to reset the password.",
        "I lost my password when I got a new {device}.",
        "which address does the reset email go to?",
    ),
    "payment_declined": (
        "my payment [was declined|was rejected|did not go through] for the {product}.",
        "my {card} is [refused|rejected] at checkout.",
        "I cannot pay for order {order}, it shows {error}.",
        "checkout says card declined although [there is enough money|the card works elsewhere].",
        "why was my payment of {amount} [refused|declined|rejected]?",
        "the payment for my {plan} plan failed on {date}.",
        "I tried to pay [twice|three times] with my {card} and it failed each time.",
        "the bank approved it but your shop [refuses|declines] my {card}.",
    ),
    "change_delivery_address": (
        "{want} [change|update|correct] the delivery address of order {order}.",
        "I [moved|have moved] to {city}, please send the {product} there.",
        "I typed the wrong [street|house number] for the delivery of {order}.",
        "can {courier} deliver to [my office|a neighbour|another address] instead?",
        "please ship order {order} to {street} in {city}.",
        "the parcel is going to my old address in {city}, can you redirect it?",
        "{want} [change|update] my shipping address to {street}.",
        "wrong address on my order, it should be {street}.",
    ),
    "cancel_subscription": (
        "{want} cancel my [subscription|{plan} plan|membership].",
        "please stop my {plan} subscription before it renews on {date}.",
        "I do not want the subscription to renew.",
        "how do I turn off automatic renewal?",
        "I do not use the app any more, [end my plan|cancel it].",
        "the {plan} plan is too expensive, I want to [cancel|quit].",
        "stop [charging|billing] me {amount} every month.",
        "is it too late to cancel my {plan} plan for this month?",
    ),
    "app_crash": (
        "the app [crashes|closes|quits] on my {device} [as soon as I open it|every time].",
        "since the update on {date} the app keeps crashing.",
        "the app [freezes|hangs] with {error}.",
        "the app closes right after I [log in|sign in|enter my password].",
        "your app stops working when I open my orders on the {device}.",
        "I cannot open the app on my {device}, it shows a blank screen.",
        "{error} appears and then the app shuts down.",
        "the app crashes at checkout when I pay with my {card}.",
    ),
    "charged_twice": (
        "I was [charged|billed] twice for order {order}.",
        "my {card} shows two payments of {amount} for one {product}.",
        "there is a [second|duplicate|double] charge of {amount} from {date}.",
        "you took {amount} two times for my {plan} plan.",
        "why did I pay {amount} twice?",
        "I paid once but the bank shows the payment [twice|two times].",
        "the first payment failed, I tried again and now both were charged.",
        "please [refund|pay back|remove] the double payment for {order}.",
    ),
    "return_item": (
        "{want} [return|send back] the {product}.",
        "how do I send the {product} from order {order} back?",
        "I need a return label for [order {order}|the {product}].",
        "where do I [drop off|take] a return in {city}?",
        "the {product} does not fit, I am sending it back.",
        "how many days do I have to return a {product}?",
        "is the return of a {product} free or do I pay {courier}?",
        "can {courier} pick up my return at {street}?",
    ),
    "damaged_item": (
        "my {product} arrived [broken|damaged|in pieces].",
        "the box was crushed and the {product} is [scratched|broken|bent].",
        "the {product} from order {order} does not [turn on|work|charge].",
        "I received a faulty {product}, {want} get a new one.",
        "the {product} stopped working after [two days|one week].",
        "{courier} dropped the parcel and the {product} is damaged.",
        "there is a [crack|dent|scratch] in the {product} that came on {date}.",
        "a part is missing from my {product}.",
    ),
    "keep_order": (
        "please do not cancel [my order|order {order}], I still want it.",
        "I cancelled {order} by mistake, [can you undo it|please restore it].",
        "{want} take back the cancellation of order {order}.",
        "I changed my mind, keep the order for the {product}.",
        "why was my order {order} cancelled? I still want the {product}.",
        "forget my last message, do not stop order {order}.",
        "I pressed cancel on the {product} order by accident, please send it anyway.",
        "is it too late to undo the cancellation of {order}?",
    ),
    "change_password": (
        "{want} change my password.",
        "where in the [settings|app] can I set a new password?",
        "I know my password but want a [stronger|different] one.",
        "I think someone knows my password, how do I change it?",
        "changing my password [fails with|shows] {error}.",
        "the new password is not accepted in the settings on my {device}.",
        "what are the rules for a new password?",
        "can I change the password while signed in on my {device}?",
    ),
    "missing_parcel": (
        "tracking says {order} was delivered but I have [nothing|no parcel].",
        "my {product} is marked as delivered on {date}, but it never arrived.",
        "{courier} says the parcel was left at the door, it is not [there|here].",
        "my parcel {order} was [stolen|lost].",
        "I never received the {product} although the status is delivered.",
        "the neighbours do not have my package {order} either.",
        "someone else signed for my {product} in {city}.",
        "order {order} is lost, {courier} cannot find it.",
    ),
    "change_billing_address": (
        "{want} [change|update|correct] the billing address of [order {order}|my account].",
        "I [moved|have moved] to {city}, please put the new address on my invoices.",
        "my card is registered at {street}, how do I change the address for payments?",
        "the address on the bill for {order} is wrong.",
        "please use {street} in {city} for billing.",
        "the invoice still shows my old address in {city}.",
        "{want} [change|update] my invoice address to {street}.",
        "wrong billing address in my account, it should be {street}.",
    ),
    "invoice_copy": (
        "{want} get [an invoice|a receipt|the bill] for order {order}.",
        "please send me the invoice of {date}.",
        "I need a receipt for the {product} for my tax return.",
        "where do I [download|find] the bills for my {plan} plan?",
        "the invoice for {order} was not in the parcel.",
        "can I have a receipt for the {amount} I paid on {date}?",
        "my company needs an invoice with a tax number for {order}.",
        "the invoice download shows {error}.",
    ),
    "update_card": (
        "{want} [change|update|replace] the card for my {plan} plan.",
        "my {card} expires soon, how do I add a new one?",
        "please remove my {card} from the account.",
        "I got a new {card}, where do I enter the number?",
        "{want} pay with my {card} instead of the old card.",
        "my old card was stolen, how do I change the payment method?",
        "I cannot save a new card in the app, it shows {error}.",
        "switch my payments to [the other card|my {card}].",
    ),
    "keep_subscription": (
        "please do not cancel my [subscription|{plan} plan], I want to keep it.",
        "I cancelled my {plan} plan by mistake, [can you undo it|please turn it back on].",
        "{want} take back the cancellation of my subscription.",
        "I changed my mind and want to stay on the {plan} plan.",
        "my subscription ends on {date} but I want it to renew.",
        "why was my {plan} plan cancelled? I still use it.",
        "turn automatic renewal back on.",
        "{want} renew my {plan} membership that I had stopped.",
    ),
    "discount_code_fails": (
        "the discount code {coupon} [does not work|is not accepted].",
        "{coupon} is [rejected|refused] at checkout with {error}.",
        "I forgot to enter my code {coupon} for order {order}, can I still use it?",
        "the price did not go down by {amount} after I entered {coupon}.",
        "it says my voucher has expired, but it is valid until {date}.",
        "can I use {coupon} for the {plan} plan?",
        "I paid {amount} too much because the coupon was ignored.",
        "how do I [redeem|use] a voucher on my {device}?",
    ),
    "two_factor_code": (
        "I do not get the [security|login|six digit] code on my {device}.",
        "the code you send me to sign in is [not accepted|wrong|expired].",
        "I lost the phone that receives my login codes.",
        "I cannot log in because the code never arrives.",
        "{want} turn off the security code for sign in.",
        "the text message with the code arrives too late.",
        "I have a new {device}, how do I move the authenticator?",
        "{want} get the login code by email instead of text message.",
    ),
    "upgrade_plan": (
        "{want} upgrade to the {plan} plan.",
        "how much more does it cost to upgrade to {plan}?",
        "I need more storage than my {plan} plan has.",
        "{want} add [two|three|five] users to my {plan} plan.",
        "can I switch from monthly to the bigger {plan} plan today?",
        "upgrading to {plan} fails with {error}.",
        "I paid {amount} for the upgrade, but I still have the old plan.",
        "which plan do I need for [ten|twenty] people?",
    ),
    "downgrade_plan": (
        "{want} downgrade to the {plan} plan.",
        "how much less do I pay if I move down to {plan}?",
        "I do not need so much storage, is there something smaller than {plan}?",
        "{want} remove [two|three|five] users from my {plan} plan.",
        "can I switch to the cheaper {plan} plan without cancelling?",
        "my {plan} plan is too expensive, I want a smaller one.",
        "put me back on the [free|basic|smallest] plan from {date}.",
        "I do not want the upgrade, move me back to {plan}.",
    ),
    "delete_account": (
        "{want} [delete|close|remove] my account.",
        "please erase all my data and close the account.",
        "I do not want to be a customer any more, delete everything.",
        "how do I delete my account from the {device} app?",
        "deleting my account [fails with|shows] {error}.",
        "I cancelled my {plan} plan, now delete my profile too.",
        "what happens to my orders when I close my account?",
        "I have two accounts, please remove [one|the old one].",
    ),
}

FILLERS: Final[dict[str, str]] = {
    "want": "I want to|I would like to|I need to|can you help me|how do I|is it possible to|how can I|I am trying to",
    "product": "desk lamp|coffee grinder|rain jacket|keyboard|phone case|backpack|pair of running shoes|toaster|kettle|"
    "game console|tablet cover|smart watch|water filter|swivel chair|camping tent|blue sofa|garden hose|monitor",
    "device": "iPhone|iPad|Android phone|Windows laptop|MacBook|Pixel|Galaxy S2#|old tablet|work computer|smart TV",
    "order": "#######|SO-#####|no. #####|A##-####|#### ####",
    "date": "Monday|Friday|1# March|2# June|the 1#th of May|Tuesday evening|January 2#|Wednesday|September 1#|Sunday",
    "amount": "$1#.99|$2#|$3##.50|1# euros|1#9.90 EUR|£4#|2## dollars|€5#.00",
    "city": "Leeds|Porto|Denver|Graz|Utrecht|Lyon|Austin|Malmo|Bilbao|Toronto|Krakow|Dublin",
    "street": "1# Mill Lane|2## Station Road|3# Orchard Court|4# Harbour Street|flat 2, 7# Elm Avenue|5# King Square",
    "error": "error 4##|error code E-##|an unknown error|code 0x8##|error 50#|the message try again later|a timeout",
    "courier": "the courier|your driver|the post office|the delivery company|the carrier",
    "card": "credit card|debit card|Visa card|Mastercard|card ending in ####|bank card|gift card",
    "plan": "Basic|Plus|Family|Team|Pro|Business|student",
    "coupon": "SPRING##|WELCOME#0|SAVE2#|HELLO-##|BDAY##",
}

OPENERS: Final = "hi,|hello,|hi team,|good morning,|hey there,|dear support,|hi again,|hello everyone,|quick question:"
CLOSERS: Final = (
    "thanks!|please help.|thank you.|any idea?|it is urgent.|best regards|cheers|what can I do?|please advise."
)
FILLER_WORDS: Final = "just|actually|really|um|basically|like|well|so|honestly|somehow"

# True of any customer, so they say nothing about the intent; the last ones even name another intent's topic.
CONTEXTS: Final = (
    "I have been a customer since 201#.|I bought a {product} on {date}.|I paid {amount} with my {card}.|"
    "nobody picks up the phone.|my order is {order}.|I am using the app on my {device}.|I live in {city}.|"
    "I am on the {plan} plan.|I wrote to you on {date}.|this is about order {order}.|{courier} could not help me.|"
    "I got {error} on the contact page.|my last refund took three days, great.|my password works fine, that is not it.|"
    "I do not want to cancel anything, just asking."
)
CONTRACTIONS: Final = (
    "I am=I'm|I have=I've|I would=I'd|cannot=can't|do not=don't|does not=doesn't|did not=didn't|is not=isn't|"
    "it is=it's|has not=hasn't|where is=where's"
)
