"""What a call on a GPU waits for and sends: counted on tensors that are taken for a GPU's (`tests/fake_gpu.py`).

Nothing is said of graphs, of flash attention, and of calls that the cost model times, one in 64, which wait for all.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests.fake_gpu import OnDevice, counted, machine, place
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, states
from tests.topics import N_CALIBRATED, batched, classifier, requests

FAMILIES = ("bert", "gpt2", "llama")
TOKENS = 40  # two blocks and a tail


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with machine(monkeypatch), torch.no_grad():
        yield


def drawn(n_rows: int, seed: int) -> Tensor:
    return torch.randint(3, 90, (n_rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def ask(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits, or states at valid tokens, of ids that are on the device; brought back."""
    mask = torch.ones_like(ids) if mask is None else mask
    output = states(model(input_ids=OnDevice(ids.clone()), attention_mask=OnDevice(mask.clone())))
    assert output.is_cuda
    return output.held if output.ndim < 3 else output.held[mask.bool()]


class Pair:
    """A wrapped model that has met a call of its kind, and the same model alone."""

    def __init__(self, make: Callable[[], nn.Module], banks: str, n_rows: int, **settings: Any) -> None:
        self.cache = LLMCache.wrap(place(build(make)), auto_bypass=False, device=banks, **settings)
        self.alone = place(build(make))
        ask(self.cache.model, drawn(n_rows, 100))

    def counts(self, ids: Tensor) -> tuple[int, int]:
        """How often the host waited and sent for the cache's sake: without what a model that runs does itself."""
        answer, of_cache = counted(ask, self.cache.model, ids)
        own, of_model = counted(ask, self.alone, ids)
        if "semantic" not in self.rungs:
            torch.testing.assert_close(answer, own, atol=1e-5, rtol=1e-5)
        assert self.cache.stats().errors == 0 and not self.cache.stats().bypassed
        n_own = 0 if self.rungs <= {"exact", "prefix"} else of_model["read"]  # which reads masks that nothing precedes
        return of_cache["read"] - n_own, of_cache["sent"] - of_model["sent"]  # where a K/V cache begins, some is sent

    @property
    def rungs(self) -> set[str | None]:
        return {outcome.rung for outcome in self.cache.last}


X = torch.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda x: x[0, 0].item(), {"read": 1}),
        (lambda x: bool((x > 2).any()), {"read": 1}),
        (lambda x: x.tolist(), {"read": 1, "fetched": 1}),
        (lambda x: x.cpu(), {"read": 1, "fetched": 1}),
        (lambda x: x.to("cpu", non_blocking=True), {"fetched": 1}),
        (lambda x: torch.empty(2, 3).copy_(x), {"read": 1, "fetched": 1}),
        (lambda x: x[x > 2], {"read": 1}),
        (lambda x: x.nonzero(), {"read": 1}),
        (lambda x: torch.equal(x, x), {"read": 1}),
        (lambda x: x[[1, 0]], {"sent": 1}),
        (lambda x: x[:, np.array([1, 0])], {"sent": 1}),
        (lambda x: torch.tensor([1, 2], device=x.device), {"sent": 1}),
        (lambda x: torch.ones(3).to(x.device), {"sent": 1}),
        (lambda x: x.copy_(torch.zeros(2, 3)), {"sent": 1}),
        (lambda x: x.to(x.device).float() @ torch.zeros(3, 2, device=x.device), {}),
    ],
)
def test_the_counter_sees(what: Callable[[Any], Any], expected: dict[str, int]) -> None:
    assert +counted(what, OnDevice(X.clone()))[1] == expected


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("banks", ["model", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_read_in_one_transfer(family: str, banks: str, n_rows: int) -> None:
    pair, ids = Pair(CLASSIFIERS[family], banks, n_rows), drawn(n_rows, 1)
    stored, sent = pair.counts(ids)
    assert pair.rungs == {None}
    assert 1 <= stored <= 1 + n_rows * (banks == "cpu")  # and each row's state fetched
    assert sent <= 0
    waited, sent = pair.counts(ids)
    assert pair.rungs == {"exact"}
    assert waited == 1 and sent <= n_rows * (banks == "cpu")


@pytest.mark.parametrize("banks", ["model", "cpu"])
def test_fingerprints_of_states_come_with_it(banks: str) -> None:
    pair, ids = Pair(CLASSIFIERS["bert"], banks, 2, tau=0.98), drawn(2, 1)
    assert pair.counts(ids)[0] <= (1 if banks == "model" else 3)
    assert pair.rungs == {None}
    near = ids.clone()
    near[:, 3] = 7
    waited, sent = pair.counts(near)
    assert waited == 1 and sent <= (0 if banks == "model" else 2)
    assert pair.rungs == {"semantic"}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_blocks_on_the_device_are_found_and_laid_out_there(family: str) -> None:
    pair, ids = Pair(GENERATORS[family], "model", 2), drawn(2, 1)
    longer = torch.cat([ids[:, :32], drawn(2, 2)[:, 32:]], dim=1)
    for asked, rung in ((ids, None), (ids, "exact"), (longer, "prefix")):
        waited, sent = pair.counts(asked)
        assert (waited, pair.rungs) == (1, {rung})
        assert sent <= 0


@pytest.mark.slow
def test_a_calibrated_call_is_read_in_one_transfer() -> None:
    alone = place(classifier())
    sample = [{"input_ids": OnDevice(one["input_ids"])} for one in batched(requests(N_CALIBRATED)[0])]
    with LLMCache.wrap(place(classifier()), auto_bypass=False, audit=0.0, device="model") as cache:
        assert cache.calibrate(sample, max_drop=0.05).is_certified
        waited: dict[str | None, set[int]] = {}
        for number, one in enumerate(batched(requests(200, seed=7)[0], size=1)):
            _, of_cache = counted(ask, cache.model, one["input_ids"])
            rung = cache.last[0].rung
            n_own = 0 if rung else counted(ask, alone, one["input_ids"])[1]["read"]
            if number:  # the first also looks how the output is packed
                waited.setdefault(rung, set()).add(of_cache["read"] - n_own)
        assert waited["semantic"] == waited[None] == {1}
        assert cache.stats().errors == 0


CODECS = ("fp16", "int8", {"name": "pca", "dim": 4, "fit_on": 8})
WAYS = [
    *((CLASSIFIERS[family], {}) for family in ("bert", "distilbert", "gpt2", "llama")),
    (BARE["mpnet"], {}),
    *((GENERATORS[family], more) for family in ("gpt2", "llama") for more in ({}, {"prefix": False, "layers": "all"})),
    *((CLASSIFIERS["bert"], {"tau": 0.9999, "compression": codec}) for codec in CODECS),
    (BARE["bert"], {"tau": 0.9999, "mode": "paper"}),
    *((CLASSIFIERS["bert"], {"tau": 0.999, "fingerprint": name}) for name in ("minhash", "simhash", "attention")),
]


@pytest.mark.slow
@pytest.mark.parametrize("banks", ["model", "cpu"])
@pytest.mark.parametrize(("make", "settings"), WAYS)
def test_nothing_of_the_host_is_computed_with_on_the_device(
    make: Callable[[], nn.Module], settings: dict[str, Any], banks: str
) -> None:
    """Hits, misses, both in one call, padding, and masks with holes."""
    pair = Pair(make, banks, 2, **settings)
    several, holes = padded([6, 9]), padded([8, 8], seed=3)
    holes["attention_mask"][:, 4] = 0
    mixed = {name: torch.cat([x, y]) for (name, x), y in zip(padded([8], seed=5).items(), holes.values(), strict=True)}
    long, begins_alike = padded([40, 36], seed=9), padded([40, 40], seed=20)
    begins_alike["input_ids"][:, :32] = long["input_ids"][:, :32]
    for inputs in (several, several, holes, holes, mixed, mixed, long, begins_alike):
        found, own = (
            ask(model, inputs["input_ids"], inputs["attention_mask"]) for model in (pair.cache.model, pair.alone)
        )
        if "compression" not in settings:
            torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
    stats = pair.cache.stats()
    keeps_blocks = make in GENERATORS.values() and "prefix" not in settings
    assert stats.n_hits == (11 if keeps_blocks else 9)
    assert stats.errors == 0 and not stats.bypassed
