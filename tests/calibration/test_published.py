"""How what is told of a shared calibration is joined."""

import random
from functools import reduce

from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.calibration.published import Standing

standings = st.builds(Standing, st.integers(1, 3), st.sampled_from(["a", "b"]), st.integers(0, 2), st.booleans())


@given(st.lists(standings, min_size=1, max_size=6), st.randoms())
@settings(max_examples=200, deadline=None)
def test_standings_are_joined_in_any_order_and_again(told: list[Standing], chance: random.Random) -> None:
    joined = reduce(Standing.joined, told)
    again = [*told, *told]
    chance.shuffle(again)
    assert reduce(Standing.joined, again) == joined
    assert (joined.version, joined.body) == max((one.version, one.body) for one in told)
    of_it = [one for one in told if (one.version, one.body) == (joined.version, joined.body)]
    assert joined.n_alarms == max(one.n_alarms for one in of_it)
    assert joined.has_drifted == any(one.has_drifted for one in of_it)
    assert Standing.read(joined.about()) == joined
