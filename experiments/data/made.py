"""Small records in place of the official data sets, made from the support desk's phrases: no download, no folder.

They let the whole chain run anywhere. They say nothing about a model: answers are easy and records are few.
"""

from random import Random

from experiments.data.published import Choice, Question
from experiments.data.streams.support_desk import INTENTS, PHRASES, support_desk

#: Enough for any trial run; the tasks' `limit` takes fewer.
N_PASSAGES, N_CHOICES, N_LINES = 40, 200, 400

#: By slot of the phrases: the sentence in a passage, and the question about it.
FACTS = {
    "order": ("The number on the label was {}.", "What number was on the label?"),
    "product": ("In the box was one {}.", "What was in the box?"),
    "city": ("It went to a customer in {}.", "In which city does the customer live?"),
    "amount": ("The price came to {}.", "How much did it cost?"),
    "date": ("It left the warehouse on {}.", "When did it leave the warehouse?"),
}


def make_questions(seed: int) -> list[Question]:
    """Return passages with a question per fact; one fact of each is left out, and the first question comes twice."""
    rng = Random(seed)
    return [question for number in range(N_PASSAGES) for question in _ask_about(number, rng)]


def _ask_about(number: int, rng: Random) -> list[Question]:
    values = {slot: _fill(slot, rng) for slot in FACTS}
    absent = rng.choice(list(FACTS))
    context = " ".join(fact.format(values[slot]) for slot, (fact, _) in FACTS.items() if slot != absent)
    questions = []
    for turn, slot in enumerate([*FACTS, next(iter(FACTS))]):
        answers = () if slot == absent else ((values[slot], context.index(values[slot])),)
        questions.append(Question(f"{number}-{turn}", f"Parcel {number}", FACTS[slot][1], context, answers))
    return questions


def _fill(slot: str, rng: Random) -> str:
    chosen = rng.choice(PHRASES["fillers"][slot])
    return "".join(str(rng.randrange(10)) if sign == "#" else sign for sign in chosen)


def make_choices(seed: int) -> list[Choice]:
    """Return requests with four intents to choose from; equal requests have the same four."""
    questions = []
    for number, request in enumerate(support_desk(N_CHOICES, seed)):
        rng = Random(request.text)
        intents = [request.label, *rng.sample([intent for intent in INTENTS if intent != request.label], 3)]
        rng.shuffle(intents)
        choices = tuple(intent.replace("_", " ") for intent in intents)
        questions.append(Choice(str(number), request.text, choices, intents.index(request.label)))
    return questions


def make_lines(seed: int) -> list[str]:
    return [request.text for request in support_desk(N_LINES, seed)]
