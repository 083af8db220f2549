"""`cache.last`: the outcome of each row of a thread's last call."""

import torch

from llmcache import Outcome
from tests.calls.helpers import wrapped
from tests.tiny_models import CLASSIFIERS, tokens

ONE, TWO = tokens(1, 6, seed=1), tokens(1, 6, seed=2)


def test_exact_hits_and_misses_by_row() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    assert cache.last == ()
    cache(input_ids=ONE)
    (stored,) = cache.last
    assert stored == Outcome(key=stored.key)
    assert len(stored.key) == 43
    cache(input_ids=torch.cat([TWO, ONE]))
    miss, hit = cache.last
    assert hit == Outcome(stored.key, "exact", 3, stored.key, 1.0)
    assert miss == Outcome(miss.key)
    assert miss.key != stored.key
