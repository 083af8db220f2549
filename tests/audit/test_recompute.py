"""The audit recomputes hits in batches if the model answers alike then, else one by one."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.errors import ConfigError
from llmcache.reuse.audit.account import Audited
from llmcache.reuse.audit.recompute import Origin, Recompute, RecomputeQueue
from tests import inside
from tests.contract.streams import classifier
from tests.topics import Inputs, batched, known, requests

PAD = 3
DRAWN = Audited(None, "", None, True)
OFF = ("cpu", torch.float32, False)
NOW = Origin("weights", "head", "sdpa")
OTHER = NOW._replace(attention="eager")
SETTINGS: dict[str, Any] = {
    "max_drop": 0.2,
    "audit": {"rate": 1.0, "in_background": False},
    "payload": "sequence",
    "answer": "class",
}


def look(n_tokens: int, namespace: str = "default", has_mask: bool = True, origin: Origin = NOW) -> Recompute:
    ids = torch.arange(10, 10 + n_tokens)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if has_mask else {"input_ids": ids}
    return Recompute(DRAWN, f"{n_tokens}", namespace, inputs, OFF, "", origin, 0)


def taken(looks: RecomputeQueue) -> list[str]:
    return [one.key for one in looks.take()]


def waiting(*given: Recompute, names: set[str] | None = None) -> RecomputeQueue:
    looks = RecomputeQueue(PAD, names)
    for one in given:
        looks.add(one)
    return looks


@pytest.mark.parametrize(
    ("looks", "groups"),
    [
        pytest.param(
            [*map(look, (5, 30, 7, 16, 17))], ["5 7 16", "30 17", ""], id="the oldest, and others of its length"
        ),
        pytest.param([*map(look, [5] * 10)], ["5 5 5 5 5 5 5 5", "5 5", ""], id="eight at most"),
        pytest.param([look(5), look(6, "other"), look(7)], ["5 7", "6"], id="of one namespace"),
        pytest.param([look(5), look(6, has_mask=False), look(7)], ["5 7", "6"], id="with a mask or without"),
        pytest.param([look(n, has_mask=False) for n in (5, 6, 5)], ["5 5", "6"], id="of equal length without a mask"),
        pytest.param([look(5), look(6, origin=OTHER), look(7)], ["5 7", "6"], id="of one origin"),
    ],
)
def test_those_that_can_be_computed_together_are_taken_together(looks: list[Recompute], groups: list[str]) -> None:
    queue = waiting(*looks)
    assert [" ".join(taken(queue)) for _ in groups] == groups


def test_shorter_rows_are_padded_and_masked_if_that_was_tried_and_the_model_takes_a_mask() -> None:
    looks, bare = RecomputeQueue(PAD), look(5, has_mask=False)
    inputs = looks.inputs([look(2), look(4)])
    assert inputs["input_ids"].tolist() == [[10, 11, PAD, PAD], [10, 11, 12, 13]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    looks.note_trial([bare, bare], is_same=True)  # which says nothing of padding
    assert looks.may_batch([bare, bare]) and looks.may_batch([look(5)])
    assert not looks.may_batch([look(5), look(6)])
    own_mask = waiting(*map(look, (5, 6, 5)), names={"input_ids"})
    assert set(own_mask.inputs([look(5)])) == {"input_ids"} and taken(own_mask) == ["5", "5"]


def test_parked_ones_wait_for_their_origin_and_are_dropped_once_that_is_over() -> None:
    other, third = NOW._replace(weights="other"), NOW._replace(head="third")
    looks = waiting(look(5))
    looks.park([look(6), look(7, origin=other), look(8, "tenant", origin=other), look(9, origin=third)])
    assert len(looks) == 5 and looks.parked
    looks.add(look(5, "tenant"))
    looks.drop("tenant")
    assert [one.key for one in looks.resume(NOW, has_ended=lambda origin: origin == third)] == ["6"]
    assert (taken(looks), len(looks)) == (["6", "5"], 1)
    assert [one.key for one in looks.resume(other, has_ended=lambda _: True)] == ["7"]
    assert not looks.parked and taken(looks) == ["7"]
    looks.add(look(7))
    looks.drop(None)
    assert taken(looks) == []


# -- in a cache --------------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A user's classifier on a tiny trunk."""

    def __init__(self, pool: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        model = classifier()
        self.bert, self.classifier, self.config, self.pool = model.bert, model.classifier, model.config, pool
        self.sizes: list[int] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.sizes.append(len(input_ids))
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.classifier(self.pool(states, attention_mask))


def masked(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def careless(states: Tensor, mask: Tensor) -> Tensor:
    """Padding counts too, and weighs a lot."""
    return states.sum(1) / 8 + (mask == 0).sum(1, keepdim=True)


def single(states: Tensor, mask: Tensor) -> Tensor:
    if len(states) > 1:
        raise ValueError("one row at a time")
    return states.mean(1)


def varied(n: int, seed: int) -> list[Inputs]:
    """Requests of alternating lengths."""
    by_length = [requests(n // 3 + 1, seed=seed + i, n_words=words)[0] for i, words in enumerate((5, 6, 8))]
    return [one | {"attention_mask": torch.ones_like(one["input_ids"])} for one in chain(*zip(*by_length, strict=True))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "width", "is_sorted"),
    [(masked, 1, False), (careless, 1, True), (single, 0, False)],
)
def test_looks_find_what_is_so_and_are_padded_where_they_come_out_alike(
    pool: Callable[[Tensor, Tensor], Tensor], width: int, is_sorted: bool
) -> None:
    model, inputs = Own(pool).eval(), varied(60, 50)
    if is_sorted:  # the first groups are of one length
        inputs.sort(key=lambda one: one["input_ids"].shape[1])
    with LLMCache.wrap(model, **SETTINGS) as cache:
        learned = sorted(varied(150, 0), key=lambda one: one["input_ids"].shape[1])
        cache.calibrate(learned if pool is single else batched(learned, size=17))  # batches of one length each
        given = [(int(cache(**one).argmax()), cache.last[0].rung == "semantic") for one in inputs]
        with cache.disabled():
            own = [int(cache(**one).argmax()) for one in inputs]
        n_hits = sum(is_hit for _, is_hit in given)
        n_changed = sum(is_hit and answer != plain for (answer, is_hit), plain in zip(given, own, strict=True))
        model.sizes.clear()
        assert cache.drain() == n_hits > 10
        stats = known(cache)
        assert (stats.n_recomputed, stats.n_changed, cache.stats().errors) == (n_hits, n_changed, 0)
        assert (len(model.sizes) < n_hits) == (pool is not single)
        assert inside.audit(cache)._recomputer.queue._width == width


def test_a_model_that_takes_no_token_ids_by_name_cannot_be_audited() -> None:
    class Odd(Own):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens, torch.ones_like(tokens))

    model = Odd(masked).eval()
    told = r"audit=0.01: .* Odd.forward\(\) does not take \(tokens\)"
    with LLMCache.wrap(model, payload="sequence", answer="class") as cache, pytest.raises(ConfigError, match=told):
        cache.calibrate([{"tokens": one["input_ids"]} for one in varied(60, 0)])
