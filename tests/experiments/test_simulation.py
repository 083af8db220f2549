"""The simulation, on streams whose right answer is known by hand."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from experiments.data.streams.keys import Asked
from experiments.replay.eviction import replay_blocks
from experiments.simulation.banks import Held, Plan
from experiments.simulation.chains import Chains
from experiments.simulation.cluster import DESIGNS, ROUTED, SEPARATE, SHARED, Cluster, Site
from experiments.simulation.redis import Redis
from experiments.simulation.scaling import Limits, stops, with_ratios
from experiments.simulation.times import Ladder, Times, Use
from llmcache import POLICIES

SITE = Site(worker_bytes=1e9, store_bytes=1e9, link_bytes_s=1e12, timeout_s=10.0, load=0.5, bound=1.25)
NEVER = Use()


def flat(**changes: Any) -> Times:
    """A block takes 1 s to compute, and nothing else takes time."""
    none = Ladder({1: [0.0]})
    times: dict[str, Any] = {
        **dict.fromkeys(("hit", "fetch", "look", "delay", "hear"), none),
        "compute": Ladder({1: [1.0]}),
        **dict.fromkeys(("follow_s", "follow_more_s"), 0.0),
        **dict.fromkeys(("asked", "read", "written", "written_more", "told", "told_more"), NEVER),
        "nbytes": 1,
    }
    return Times(**times | changes)


class Heard:
    """Requests that are served by others of their number, which workers hear of."""

    announces = True

    def __init__(self, values: Sequence[int]) -> None:
        self.n, self._values = len(values), values

    def begin(self, n_workers: int, worker_values: int, store_values: int) -> None:
        self._known: list[set[Hashable]] = [set() for _ in range(n_workers)]
        self._told: list[Hashable] = []
        self._n_heard = [0] * n_workers

    def route(self, number: int) -> str:
        return str(self._values[number])

    def plan(self, worker: int, number: int) -> Plan:
        is_known = self._values[number] in self._known[worker]
        return Plan(int(is_known), 0, int(not is_known))

    def fetched(self, worker: int, values: Iterable[Hashable]) -> None:
        self._known[worker].update(values)

    def computed(self, worker: int, number: int, plan: Plan) -> Sequence[Hashable]:
        self._known[worker].add(self._values[number])
        return (self._values[number],) * plan.n_computed

    def is_stored(self, value: Hashable) -> bool:
        return value in self._told

    def stored(self, value: Hashable) -> None:
        """Nobody reads it."""

    def told(self, values: Iterable[Hashable]) -> None:
        self._told += values

    def hear(self, worker: int) -> int:
        new = self._told[self._n_heard[worker] :]
        self._n_heard[worker] = len(self._told)
        self._known[worker].update(new)
        return len(new)


def spaced(n: int, distance: float = 1.0) -> np.ndarray[Any, np.dtype[np.float64]]:
    return distance * np.arange(n, dtype=np.float64)


def served(design: str, n_workers: int, stream: Any, times: Times | None = None, **site: Any) -> dict[str, Any]:
    """Figures; requests come far enough apart to meet no other."""
    there = Site(**{**{name: getattr(SITE, name) for name in SITE.__slots__}, **site})
    cluster = Cluster(design, n_workers, stream, times or flat(), there, np.random.default_rng(0))
    return cluster.serve_open(spaced(stream.n, 100.0), 1.0)


def repeats(n: int, kinds: int = 1) -> Chains:
    """The same prompts of two blocks, again and again in turn."""
    return Chains([(("a", i % kinds), ("b", i % kinds)) for i in range(n)], [f"route {i % kinds}" for i in range(n)])


def test_separate_banks_each_compute_what_comes_again_and_a_shared_one_computes_it_once() -> None:
    for n_workers in (1, 2, 4):
        assert served(SEPARATE, n_workers, repeats(40))["hit_rate"] == (40 - n_workers) / 40
        assert served(SHARED, n_workers, repeats(40))["hit_rate"] == 39 / 40
    assert served(ROUTED, 4, repeats(40))["hit_rate"] == 39 / 40
    assert served(SEPARATE, 4, repeats(42, kinds=3))["hit_rate"] == (42 - 12) / 42  # 3 and 4 have no common divisor
    assert served(ROUTED, 4, repeats(42, kinds=3))["hit_rate"] == (42 - 3) / 42


def test_what_is_announced_is_heard_and_served_by_all() -> None:
    values = [1, 2, 1, 2, 1, 2, 1, 1]
    assert served(SEPARATE, 2, Heard(values))["hit_rate"] == 5 / 8
    assert served(SEPARATE, 4, Heard(values))["hit_rate"] == 3 / 8
    assert served(SHARED, 4, Heard(values))["hit_rate"] == 6 / 8


def test_an_announcement_that_is_late_is_computed_again() -> None:
    stream, times = Heard([1] * 6), flat(delay=Ladder({1: [250.0]}))  # requests come 50 s apart
    assert served(SHARED, 4, stream, times, load=2.0 / 4)["whole_hits"] == 2 / 6
    assert served(SHARED, 4, stream, flat(), load=2.0 / 4)["whole_hits"] == 5 / 6


@pytest.mark.parametrize("design", DESIGNS)
def test_one_worker_is_the_same_in_every_design(design: str) -> None:
    rng = np.random.default_rng(1)
    chains = [tuple(rng.integers(0, 6, size=3).tolist()) for _ in range(200)]
    stream = Chains(chains, [str(chain[0]) for chain in chains])
    times = flat(compute=Ladder({1: [1.0, 2.0]}), hit=Ladder({1: [0.1]}))
    assert served(design, 1, stream, times)["hit_rate"] == served(SEPARATE, 1, stream, times)["hit_rate"]


def test_blocks_that_are_held_are_those_of_the_library() -> None:
    rng = np.random.default_rng(2)
    prompts = [tuple(f"{kind}.{i}" for i in range(int(rng.integers(1, 9)))) for kind in rng.integers(0, 30, size=400)]
    stream = Chains(prompts, ["one"] * len(prompts))
    asked = [[Asked(block, nbytes=1024) for block in prompt] for prompt in prompts]
    for most in (16, 64, 1000):
        found = replay_blocks(asked, POLICIES["lru"](), most * 1024)
        simulated = served(SEPARATE, 1, stream, flat(nbytes=1024), worker_bytes=most * 1024)["hit_rate"]
        assert simulated == pytest.approx(found.hits / found.n, abs=0.03)


def test_a_worker_queues_as_the_formulas_say() -> None:
    n, load, rng = 40_000, 0.6, np.random.default_rng(3)
    arrivals = np.concatenate([[0.0], rng.exponential(size=n - 1).cumsum()])
    stream = Chains([((i,),) for i in range(n)], ["one"] * n)  # nothing comes again

    def mean(compute: Sequence[float]) -> float:
        site = Site(1e9, 1e9, 1e12, 10.0, load, 1.25)
        cluster = Cluster(SEPARATE, 1, stream, flat(compute=Ladder({1: compute})), site, np.random.default_rng(4))
        return float(cluster.serve_open(arrivals, 1.0)["mean_ms"] / 1e3)

    assert mean([1.0]) == pytest.approx(1 + load / (2 * (1 - load)), rel=0.05)  # M/D/1
    exponential = rng.exponential(size=200_000)
    assert mean((exponential / exponential.mean()).tolist()) == pytest.approx(1 / (1 - load), rel=0.15)  # M/M/1


def test_a_redis_serves_one_after_the_other_and_answers_leave_by_its_link() -> None:
    redis = Redis(link_bytes_s=100.0)
    assert redis.ask(0.0, Use(1.0, 1, 0)) == (0.0, 1.0)
    assert redis.ask(0.5, Use(1.0, 1, 0)) == (0.5, 2.0)
    assert redis.ask(3.0, Use(1.0, 1, 400)) == (0.0, 8.0)
    assert redis.ask(4.0, Use(1.0, 1, 100)) == (0.0, 9.0)
    figures = redis.figures(10.0)
    assert figures == {"redis_busy": 0.4, "link_busy": 0.5, "redis_ops_s": 0.4, "redis_mb_s": 500 / 1e7}


def test_a_redis_that_is_late_costs_its_timeout_and_the_request_is_computed() -> None:
    pairs = Chains([(f"prompt {i // 2}",) for i in range(80)], ["one"] * 80)  # each worker is asked each once
    slow = served(SHARED, 2, pairs, flat(written=Use(cpu_s=1e4), written_more=Use(cpu_s=1e4)), timeout_s=0.5)
    assert slow["n_late"] > 70 and slow["redis_busy"] == pytest.approx(1.0, abs=0.05)
    assert slow["hit_rate"] == served(SEPARATE, 2, pairs)["hit_rate"] == 0
    quick = served(SHARED, 2, pairs, timeout_s=0.5)
    assert quick["n_late"] == 0 and quick["hit_rate"] == 0.5


def test_telling_takes_more_of_the_redis_and_hearing_of_workers_the_more_there_are() -> None:
    times = flat(told=Use(cpu_s=0.01), hear=Ladder({1: [0.01]}), follow_s=0.001)
    stream = Heard([*range(400)])
    two, eight = (served(SHARED, n, stream, times, load=50.0) for n in (2, 8))
    assert eight["redis_busy"] / two["redis_busy"] == pytest.approx(16, rel=0.2)  # 4 times the requests, as many told
    assert eight["hear_share"] / two["hear_share"] == pytest.approx(4, rel=0.2)
    assert served(SEPARATE, 8, stream, times, load=50.0)["hear_share"] == 0


def test_who_is_told_late_is_told_of_all_at_once() -> None:
    stream, times = Heard([*range(400)]), flat(told=Use(cpu_s=1.0, ops=1.0), follow_more_s=0.001)
    figures = served(SHARED, 4, stream, times, load=100.0)  # a request comes each quarter of a second
    assert figures["redis_busy"] == pytest.approx(1.0, abs=0.05)
    assert figures["redis_ops_s"] == pytest.approx(1.0, abs=0.1)  # 4 workers are told in 4 s, of some 16 values
    told_more = figures["hear_share"] * figures["seconds_simulated"] / 0.001  # values beside the first ones
    assert 200 < told_more < 400  # the last ones are not told before the end


def test_what_two_computed_is_written_once_and_read_by_a_third() -> None:
    stream = Chains([("a",)] * 3, ["one"] * 3)
    times = flat(written=Use(ops=1.0), read=Use(ops=100.0))
    cluster = Cluster(SHARED, 3, stream, times, Site(1e9, 1e9, 1e12, 10.0, 1 / 3, 1.25), np.random.default_rng(0))
    figures = cluster.serve_open(np.array([0.0, 0.5, 3.0]), 1.0)  # the second begins before the first ends
    assert figures["n_fetched"] == 1 and figures["hit_rate"] == 1 / 3
    assert figures["redis_ops_s"] * figures["seconds_simulated"] == pytest.approx(101)


def test_the_same_seed_gives_the_same_figures() -> None:
    times = flat(compute=Ladder({1: [0.5, 1.0, 3.0]}), delay=Ladder({1: [0.1, 7.0]}))

    def once(seed: int) -> dict[str, Any]:
        cluster = Cluster(SHARED, 3, repeats(60, kinds=7), times, SITE, np.random.default_rng(seed))
        return cluster.serve_open(spaced(60), 1.0)

    assert once(5) == once(5)
    assert once(5) != once(6)


def test_shares_that_are_asked_in_a_closed_loop_are_served_one_after_the_other() -> None:
    cluster = Cluster(SEPARATE, 2, repeats(10), flat(), SITE, np.random.default_rng(0))
    figures = cluster.serve_closed([[0, 1, 2, 3, 4, 5, 6], [7, 8, 9]])
    assert figures["hit_rate"] == 8 / 10 and figures["seconds_simulated"] == pytest.approx(2.0)


def test_times_are_drawn_by_size() -> None:
    ladder = Ladder({1: [1.0, 3.0], 3: [5.0, 7.0]})
    assert [ladder.draw(0, 0.5), ladder.draw(1, 0.0), ladder.draw(1, 0.999)] == pytest.approx([0, 1, 3], abs=0.02)
    assert ladder.mean(2) == 4.0 and ladder.mean(6) == 12.0
    assert ladder.draw(2, 0.0) == pytest.approx(3, abs=0.02)


def test_what_was_used_longest_ago_leaves() -> None:
    held = Held(2)
    assert [held.add("a"), held.add("b"), held.add("a"), held.add("c")] == [None, None, None, "b"]
    assert "a" in held and "b" not in held


def test_a_design_stops_where_a_figure_passes_its_limit() -> None:
    def point(workers: int, hit_rate: float, p99_ms: float, busy: float) -> dict[str, Any]:
        about = {"stream": "s", "design": "shared", "workers": workers, "hear_share": 0.0, "link_busy": 0.0}
        return {**about, "hit_rate": hit_rate, "p99_ms": p99_ms, "redis_busy": busy}

    points = with_ratios([point(1, 0.8, 10, 0.1), point(2, 0.795, 21, 0.6), point(4, 0.78, 30, 0.9)])
    found = {row["figure"]: row["workers"] for row in stops(points, Limits())}
    assert found == {"points_lost": 4, "redis_busy": 4, "link_busy": None, "hear_share": None, "p99_ratio": 2}
