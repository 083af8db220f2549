"""Looks are computed together where a model answers the same so, and alone where it does not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.audit.account import Audited
from llmcache.audit.recompute import Origin, Recompute, RecomputeQueue
from llmcache.errors import ConfigError
from tests import inside
from tests.audit.test_audit import known
from tests.topics import classifier, requests

PAD = 3
DRAWN = Audited(None, "", None, True)
OFF = ("cpu", torch.float32, False)
NOW = Origin("weights", "head", "sdpa")
Inputs = dict[str, Tensor]


def look(n_tokens: int, namespace: str = "default", has_mask: bool = True, origin: Origin = NOW) -> Recompute:
    ids = torch.arange(10, 10 + n_tokens)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if has_mask else {"input_ids": ids}
    return Recompute(DRAWN, f"{n_tokens}", namespace, inputs, OFF, origin)


def taken(looks: RecomputeQueue) -> list[str]:
    return [one.key for one in looks.take()]


def waiting(*given: Recompute) -> RecomputeQueue:
    looks = RecomputeQueue(PAD)
    for one in given:
        looks.add(one)
    return looks


def test_the_oldest_is_taken_with_others_of_about_its_length() -> None:
    looks = waiting(*map(look, (5, 30, 7, 16, 17)))
    assert taken(looks) == ["5", "7", "16"]
    assert taken(looks) == ["30", "17"]
    assert taken(looks) == []


def test_no_more_than_eight_are_taken_together() -> None:
    looks = waiting(*[look(5) for _ in range(10)])
    assert [len(looks.take()) for _ in range(3)] == [8, 2, 0]


def test_those_of_another_namespace_or_without_a_mask_are_left() -> None:
    looks = waiting(look(5), look(6, "other"), look(7, has_mask=False), look(8))
    assert [taken(looks) for _ in range(3)] == [["5", "8"], ["6"], ["7"]]


def test_without_a_mask_only_equal_lengths_come_together() -> None:
    looks = waiting(look(5, has_mask=False), look(6, has_mask=False), look(5, has_mask=False))
    assert [taken(looks) for _ in range(2)] == [["5", "5"], ["6"]]


def test_shorter_rows_are_padded_and_masked() -> None:
    inputs = RecomputeQueue(PAD).inputs([look(2), look(4)])
    assert inputs["input_ids"].tolist() == [[10, 11, PAD, PAD], [10, 11, 12, 13]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_all_rows_are_padded_in_a_trial() -> None:
    inputs = RecomputeQueue(PAD).inputs([look(4), look(4)], is_trial=True)
    assert inputs["input_ids"].tolist() == [[10, 11, 12, 13, PAD]] * 2
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 0]] * 2
    bare = RecomputeQueue(PAD).inputs([look(4, has_mask=False)] * 2, is_trial=True)
    assert bare["input_ids"].tolist() == [[10, 11, 12, 13]] * 2


def test_what_does_not_come_out_alike_is_tried_in_smaller_groups() -> None:
    looks = waiting(*map(look, (5, 6, 5, 6, 5)))
    looks.tried([look(5), look(6)], is_same=False)
    assert taken(looks) == ["5", "5", "5"]
    looks.tried([look(5), look(5)], is_same=False)
    assert [taken(looks) for _ in range(2)] == [["6"], ["6"]]


def test_what_came_out_alike_without_padding_says_nothing_of_padding() -> None:
    looks = RecomputeQueue(PAD)
    looks.tried([look(5, has_mask=False)] * 2, is_same=True)
    assert looks.are_tried([look(7, has_mask=False)] * 2)
    assert not looks.are_tried([look(5), look(6)])
    assert looks.are_tried([look(5)])


def test_what_a_model_does_not_take_it_is_not_passed() -> None:
    looks = RecomputeQueue(PAD, names={"input_ids"})
    assert set(looks.inputs([look(5)])) == {"input_ids"}
    for n_tokens in (5, 6, 5):
        looks.add(look(n_tokens))
    assert taken(looks) == ["5", "5"]  # it would not know what is padding


def test_parked_ones_wait_for_their_origin_and_are_dropped_once_that_is_over() -> None:
    other, third = NOW._replace(weights="other"), NOW._replace(head="third")
    looks = waiting(look(5))
    looks.park([look(6), look(7, origin=other), look(8, "tenant", origin=other), look(9, origin=third)])
    assert len(looks) == 5 and looks.has_parked
    looks.drop("tenant")
    assert [one.key for one in looks.resume(NOW, is_over=lambda origin: origin == third)] == ["6"]
    assert (taken(looks), len(looks)) == (["6", "5"], 1)
    assert [one.key for one in looks.resume(other, is_over=lambda _: True)] == ["7"]
    assert not looks.has_parked and taken(looks) == ["7"]


def test_those_of_other_origins_are_not_taken_together() -> None:
    looks = waiting(look(5), look(6, origin=NOW._replace(attention="eager")), look(7))
    assert [taken(looks) for _ in range(2)] == [["5", "7"], ["6"]]


def test_those_of_a_namespace_are_dropped() -> None:
    looks = waiting(look(5), look(6, "other"))
    looks.drop("default")
    assert taken(looks) == ["6"]
    looks.add(look(7))
    looks.drop(None)
    assert taken(looks) == []


# -- in a cache --------------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A classifier of one's own on a tiny trunk."""

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
    """Padding counts, too, and it weighs a lot."""
    return states.sum(1) / 8 + (mask == 0).sum(1, keepdim=True)


def single(states: Tensor, mask: Tensor) -> Tensor:
    if len(states) > 1:
        raise ValueError("one row at a time")
    return states.mean(1)


def varied(n: int, seed: int) -> list[Inputs]:
    """Requests of several lengths, in turns."""
    by_length = [requests(n // 3 + 1, seed=seed + i, n_words=words)[0] for i, words in enumerate((5, 6, 8))]
    return [one | {"attention_mask": torch.ones_like(one["input_ids"])} for one in chain(*zip(*by_length, strict=True))]


@contextmanager
def served(model: Any, is_sorted: bool = False) -> Iterator[tuple[LLMCache, int, int]]:
    """A cache with looks that wait, and how many there are, and how many of them are to find a changed answer."""
    settings = {"max_drop": 0.2, "audit": 1.0, "auto_bypass": False, "payload": "sequence", "answer": "class"}
    with LLMCache.wrap(model, audit_in_background=False, **settings) as cache:
        cache.calibrate(varied(450, 0))
        inputs = varied(90, 50)
        if is_sorted:  # the first groups are of one length
            inputs.sort(key=lambda one: one["input_ids"].shape[1])
        given = [(int(cache(**one).argmax()), cache.last[0].rung == "semantic") for one in inputs]
        with cache.disabled():
            own = [int(cache(**one).argmax()) for one in inputs]
        n_changed = sum(is_hit and answer != plain for (answer, is_hit), plain in zip(given, own, strict=True))
        model.sizes.clear()
        yield cache, sum(is_hit for _, is_hit in given), n_changed


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "width"), [(masked, 1), (careless, 1), (single, 0)])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_looks_find_what_is_so_and_are_padded_where_they_come_out_alike(
    pool: Callable[[Tensor, Tensor], Tensor], width: int, is_sorted: bool
) -> None:
    model = Own(pool).eval()
    with served(model, is_sorted) as (cache, n_hits, n_changed):
        assert cache.drain() == n_hits > 20
        stats = known(cache)
        assert (stats.n_recomputed, stats.n_changed, cache.stats().errors) == (n_hits, n_changed, 0)
        assert (len(model.sizes) < n_hits) == (pool is not single)
        assert inside.audit(cache)._recomputer.queue._width == width


@pytest.mark.slow
def test_a_model_that_makes_its_own_mask_is_looked_into() -> None:
    class Maskless(Own):
        def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids, torch.ones_like(input_ids))

    model = Maskless(masked).eval()
    settings = {"max_drop": 0.2, "audit": 1.0, "auto_bypass": False, "payload": "sequence", "answer": "class"}
    with LLMCache.wrap(model, audit_in_background=False, **settings) as cache:
        inputs = [{"input_ids": one["input_ids"]} for one in varied(450, 0)]
        cache.calibrate(inputs)
        for one in varied(60, 50):
            cache(input_ids=one["input_ids"])
        n_hits = cache.drain()
        assert (known(cache).n_recomputed, cache.stats().errors) == (n_hits, 0)
        assert n_hits > 10


def test_a_model_that_takes_no_token_ids_by_name_cannot_be_audited() -> None:
    class Odd(Own):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens, torch.ones_like(tokens))

    model = Odd(masked).eval()
    told = r"audit=0.05: .* Odd.forward\(\) does not take \(tokens\)"
    with LLMCache.wrap(model, payload="sequence", answer="class") as cache, pytest.raises(ConfigError, match=told):
        cache.calibrate([{"tokens": one["input_ids"]} for one in varied(60, 0)])
