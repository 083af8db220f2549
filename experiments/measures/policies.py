"""Measure `policies`: hits of each policy on a stream of keys by cache size, beside the most that any policy can get.

Banks and blocks are the library's own; no model runs, and nothing is timed. Hits count from an empty cache on.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from experiments.data.streams.traffic import Asked, KeyStream, asked
from experiments.measures.base import Experiment, Outcome
from experiments.replay.eviction import Found, WTinyLFU, most_hits, replay_blocks, replay_entries
from experiments.support.files import Folders
from experiments.support.progress import tracked
from llmcache import POLICIES, Policy
from llmcache.lab import Component, Registry

Share = Annotated[float, Field(gt=0.0, le=1.0)]
BEST = "best possible"


class Policies(Experiment):
    makers: ClassVar[Any] = {"policies": lambda given, key: _named(given) if isinstance(given, list) else given}
    stream: KeyStream
    shares: tuple[Share, ...] = Field(
        default=(0.02, 0.1, 0.3), min_length=1
    )  # cache sizes, as shares of the popular keys
    policies: tuple[Component, ...] = Field(min_length=1)

    def check(self) -> None:
        for policy in self.policies:
            policy.build(_known())


def run(experiment: Policies, folders: Folders) -> Outcome:
    stream = experiment.stream
    requests = asked(stream, folders.data, experiment.seed)
    size_of = {one.key: one.nbytes for request in requests for one in request}
    # Keys of a scan are not worth holding, so sizes are shares of the other keys.
    sizes = (
        list(size_of.values()) if stream.name == "mooncake" else [size_of.get(str(i), 0) for i in range(stream.keys)]
    )
    rows = [row for share in experiment.shares for row in _rows(experiment, requests, share, int(share * sum(sizes)))]
    about = {"task": stream.title, "n": sum(map(len, requests)), "n_keys": len(size_of)}
    return Outcome(rows, {**about, "summary": rows})


def _rows(
    experiment: Policies, requests: Sequence[Sequence[Asked]], share: float, max_bytes: int
) -> Iterator[dict[str, Any]]:
    replay = replay_blocks if experiment.stream.name == "mooncake" else replay_entries
    for policy in tracked(experiment.policies, f"Replaying at {share:g}"):
        found = replay(requests, partial(policy.build, _known()), max_bytes)
        yield {"share": share, "bytes": max_bytes, "policy": policy.name, **_figures(found)}
    if experiment.stream.is_uniform:
        found = most_hits(requests, max_bytes // requests[0][0].nbytes)
        yield {"share": share, "bytes": max_bytes, "policy": BEST, **_figures(found)}


def _figures(found: Found) -> dict[str, float]:
    return {
        "hit_rate": found.hits / found.n,
        "byte_hit_rate": found.hit_nbytes / found.nbytes,
        "tokens_saved": found.hit_tokens / found.tokens,
    }


def _named(given: Sequence[Any]) -> list[Any]:
    return [{"name": one} if isinstance(one, str) else one for one in given]


def _known() -> Registry[Policy]:
    """Return the library's policies, including registered ones, and the reference policies."""
    return Registry("policy", Policy, {**POLICIES, "w_tinylfu": WTinyLFU})
