"""Checks of the rules that the base classes state, for classes from outside the library and for its own.

    check_policy(RandomReplacement)
    check_store(lambda: Files(folder))         opens the same place each time, which it clears
    check_index(lambda dim: Scan(dim, 2))      called with a width; a function sets options. IndexTwin tells the recall
    check_fingerprint, check_decision, check_codec
    check_rung(SameTokens, model, requests)    beside the model itself
    check_adapter(model, inputs)

Each returns None, or raises `AssertionError` with the rule that is broken; what a class itself raises comes through.
What is drawn depends on `seed` alone. Nothing is left behind.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.banks.compression.conformance import check_codec
from llmcache.banks.stores.conformance import check_store
from llmcache.cache import LLMCache
from llmcache.fingerprint.conformance import check_fingerprint
from llmcache.matching.conformance import check_decision
from llmcache.matching.index.conformance import IndexTwin, check_index
from llmcache.models.adapters import locate
from llmcache.policies.conformance import check_policy
from llmcache.registry import rule
from llmcache.reuse import RUNGS, Rung

__all__ = [
    "IndexTwin",
    "check_adapter",
    "check_codec",
    "check_decision",
    "check_fingerprint",
    "check_index",
    "check_policy",
    "check_rung",
    "check_store",
]


def check_rung(made: type[Rung], model: nn.Module, requests: Sequence[Mapping[str, Tensor]], **options: Any) -> None:
    """Serve requests one after another, each twice, with this rung alone, beside the model itself.

    Args:
        made: The class; `options` go to its constructor.
        model: A model that is not wrapped, in eval mode.
        requests: Arguments of its calls without padding, among them some that the rung serves.
        **options: The rung's settings.
    """
    RUNGS.register("checked", made)
    try:
        rungs = [{"name": "checked", **options}]
        with LLMCache.wrap(model, rungs=rungs, exact=False, prefix=False, auto_bypass=False) as cache:
            for request in [one for one in requests for _ in range(2)]:
                plain, served = _plain(cache, request), cache(**request)
                said = "a row that no rung serves, or a lossless one, gets what the model computes"
                for row, outcome in enumerate(cache.last):
                    if made.is_lossless or outcome.rung is None:
                        _check_close(plain, served, said, slice(row, row + 1))
                is_alike = [x.shape for x in _tensors(served)] == [x.shape for x in _tensors(plain)]
                rule(is_alike, "the output has the shapes that the model's has")
            stats = cache.stats()
    finally:
        del RUNGS["checked"]
    rule(stats.errors == 0, f"nothing fails: {stats.health.failures}")
    rule(stats.hits.get(made.name, 0) > 0, f"some request is served by {made.name!r}, as stats call it")


def check_adapter(model: nn.Module, inputs: Mapping[str, Tensor], adapter: str = "auto") -> None:
    """Reuse each layer in turn, and of a causal model a prefix, beside the model itself.

    Args:
        model: A model that is not wrapped, in eval mode, of the family that the adapter describes.
        inputs: Arguments of a call without padding, `input_ids` (B, T) among them, T at least 4.
        adapter: The family, where the model's classes do not tell it.
    """
    trunk, n_rows = locate(model, adapter), len(inputs["input_ids"])
    for layer in range(trunk.depth):
        with LLMCache.wrap(model, layers=[layer], payload="sequence", adapter=adapter, auto_bypass=False) as cache:
            plain = _plain(cache, inputs)
            _check_close(plain, cache(**inputs), "a call that is computed gives what the plain model does")
            _check_close(plain, cache(**inputs), f"layer {layer}: reused, and all above computed, it gives the same")
            hits = cache.stats().hits_by_layer
        rule(hits == {layer: n_rows}, f"layer {layer}: every row is served at it")
    if not trunk.adapter.is_causal:
        return
    ids = inputs["input_ids"]
    half = ids.shape[1] // 2
    other = {**inputs, "input_ids": torch.cat([ids[:, :half], ids[:, half:].flip(1)], dim=1)}
    with LLMCache.wrap(model, adapter=adapter, prefix_block=1, auto_bypass=False) as cache:
        cache(**inputs)
        _check_close(_plain(cache, other), cache(**other), "is_causal: a prefix that is reused gives the plain output")
        rule(cache.stats().hits.get("prefix", 0) == n_rows, "is_causal: prefixes are served")


def _plain(cache: LLMCache, inputs: Mapping[str, Tensor]) -> Any:
    with cache.disabled():
        return cache(**inputs)


def _tensors(output: Any) -> list[Tensor]:
    """Of what a model put out, without K/V."""
    if isinstance(output, Tensor):
        return [output]
    return [x for x in (output.values() if isinstance(output, Mapping) else output) if isinstance(x, Tensor)]


def _check_close(plain: Any, served: Any, said: str, rows: slice = slice(None)) -> None:
    pairs = zip(_tensors(plain), _tensors(served), strict=True)
    rule(all(torch.allclose(a[rows], b[rows], rtol=1e-4, atol=1e-5) for a, b in pairs), said)
