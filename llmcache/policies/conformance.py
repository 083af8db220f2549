"""What every policy has to do, as a check for classes from outside the library and for its own."""

import random
from collections.abc import Callable

from llmcache.policies.base import Policy
from llmcache.registry import refuses, rule


def check_policy(make: Callable[[], Policy], seed: int = 0) -> None:
    """Put, use and remove keys in any order, some of which are not held, and ask after each step who leaves."""
    chance, policy, held = random.Random(seed), make(), set[str]()
    for _ in range(400):
        _check_leaving(policy, held)
        key, step = f"key {chance.randrange(9)}", chance.choice(("put", "put", "hit", "told", "remove", "evict"))
        if step == "put":
            policy.on_put(key, chance.randint(1, 100))
            held.add(key)
        elif step == "hit":
            policy.on_hit(key)
        elif step == "told":
            policy.on_cost(key, chance.uniform(0.1, 10))
            is_checked = policy.should_check(key)
            rule(policy.checks_reuse or not is_checked, "should_check: only where checks_reuse is set")
            policy.on_check(key, chance.uniform(0, 2))
        else:
            leaving = {key} if step == "remove" or not held else {policy.victim(), *policy.expired()}
            for one in leaving:
                policy.on_remove(one)
            held -= leaving
    while held:
        _check_leaving(policy, held)
        held.remove(key := policy.victim())
        policy.on_remove(key)
    _check_leaving(policy, held)


def _check_leaving(policy: Policy, held: set[str]) -> None:
    expired = policy.expired()
    rule(held.issuperset(expired) and len({*expired}) == len(expired), "expired: keys that are held, each once")
    rule(not expired or policy.lets_entries_leave_early, "expired: only where lets_entries_leave_early is set")
    rule({*expired} <= {*policy.expired()}, "expired: asking changes nothing")
    if not held:
        with refuses(KeyError, "victim: KeyError while no key is held"):
            policy.victim()
        return
    first, second = _victim(policy), _victim(policy)
    rule(first in held, f"victim: a key that was put and not removed since, not {first!r}")
    rule(first == second, "victim: asking changes nothing")


def _victim(policy: Policy) -> str | None:
    try:
        return policy.victim()
    except KeyError:
        return None
