"""Whether rows of a call affect each other in a trunk, so that the states of a row depend on the whole call.

They do in layers that quantise activations by the largest of a call, normalise by statistics of a batch, or amplify the
last bits, in which kernels differ by a call's shape. Such layers are known by class, or found by trial.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.models.adapters import Trunk, device_of
from llmcache.models.arguments import Arguments
from llmcache.models.callables import CallableTrunk
from llmcache.models.trials import Tried, rounding_of, trial_rows
from llmcache.models.twin import make_trial, untouched
from llmcache.models.weights import Weights

logger = logging.getLogger("llmcache")

_PACKAGES = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic")
_CLASSES = {
    "Linear8bitLt": "does not quantise columns in which any row of a call has an outlier",
    "NystromformerSelfAttention": "inverts matrices, which amplifies rounding",
}
_SO = "only whole calls are cached (calibrated reuse needs calls of one row, or the model in float precision)"
_N_TOKENS = 8  # of a trial row


class Coupling:
    """Finds whether rows affect each other in a trunk; again after edits beyond weight values. Thread-safe."""

    def __init__(self, trunk: Trunk, weights: Weights) -> None:
        self._tried = Tried(weights, partial(find_coupling, trunk))
        self._told = {""}

    def reason(self, digest: str) -> str:
        """Return why rows of a call affect each other with the present weights, whose digest this is; "" if not."""
        reason = self._tried.of(digest)
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("rows of a call affect each other, so %s: %s", _SO, reason)
        return reason


def find_coupling(trunk: Trunk) -> str:
    """Return why rows of a call affect each other, in words; "" if a trial shows that they do not."""
    if isinstance(trunk.module, CallableTrunk):
        return trunk.module.function.coupling
    for part in trunk.module.modules():
        for kind in type(part).__mro__:
            if kind.__module__.startswith(_PACKAGES):
                return f"its {kind.__name__} layers quantise all activations of a call by the largest"
            if kind.__name__ in _CLASSES:
                return f"its {kind.__name__} {_CLASSES[kind.__name__]}"
    try:
        with untouched(device_of(trunk.module)):
            return "" if _are_independent(trunk) else "in a trial, a row came out differently beside another row"
    except Exception as error:  # whatever an odd model raises
        return f"whether rows affect each other could not be tried ({type(error).__name__}: {error})"


def _are_independent(trunk: Trunk) -> bool:
    """Whether rows come out alike beside different rows, and within ten times the tolerance alone or beside padding.

    In the latter cases kernels may differ. Some trunks (Aimv2's) attend differently if anything is padded.
    """
    trial = make_trial(trunk.module, runs_functions=True)
    keeps_no_kv = {"use_cache": False} if "use_cache" in Arguments(trial.forward).names else {}
    run = partial(_run, trial, keeps_no_kv)
    first, second, *others = trial_rows(trunk, 4, _N_TOKENS)
    together = run(first, second)
    rounding = rounding_of(trial, together)
    return (
        _is_alike(together[1], run(others[0], second)[1], rounding)
        and _is_alike(together[0], run(first, others[1], n_padded=2)[0], 10 * rounding)
        and _is_alike(together[0], run(first)[0], 10 * rounding)
    )


def _run(trial: nn.Module, arguments: Mapping[str, Any], *rows: Tensor, n_padded: int = 0) -> Tensor:
    """Return the states of rows, the last with `n_padded` tokens of padding at its end; pass `arguments` as well."""
    ids = torch.stack(rows)
    mask = torch.ones(ids.shape, dtype=torch.int64, device="cpu")
    mask[-1, ids.shape[1] - n_padded :] = 0
    output = trial(input_ids=ids, attention_mask=mask.to(ids.device), **arguments)
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states


def _is_alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether states of a row differ by at most this share of the largest."""
    one, other = one.nan_to_num(), other.nan_to_num()
    return bool((one - other).abs().max() <= tolerance * one.abs().max())
