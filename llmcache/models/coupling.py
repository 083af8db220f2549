"""Whether rows of a call affect each other in a trunk, so that the states of a row depend on the whole call.

They do in layers that quantise activations by the largest of a call, normalise by statistics of a batch, or amplify the
last bits, in which kernels differ by a call's shape. Such layers are known by class, or found by trial.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.models.adapters import Trunk, device_of, special_ids, vocabulary_size
from llmcache.models.arguments import Arguments
from llmcache.models.callables import CallableTrunk
from llmcache.models.twin import make_trial, untouched
from llmcache.models.weights import Snapshot, Weights
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

_PACKAGES = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic")
_CLASSES = {
    "Linear8bitLt": "does not quantise columns in which any row of a call has an outlier",
    "NystromformerSelfAttention": "inverts matrices, which amplifies rounding",
}
_SO = "only whole calls are cached (calibrated reuse needs calls of one row, or the model in float precision)"
_N_TOKENS = 8  # of a trial row
#: By dtype: see `rounding_of`. TF32 has float16's.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_MAX_STATES = 16  # digests whose result is kept


class Coupling:
    """Finds whether rows affect each other in a trunk; again after edits beyond weight values. Thread-safe."""

    def __init__(self, trunk: Trunk, weights: Weights) -> None:
        self._trunk, self._weights = trunk, weights
        self._known: OrderedDict[str, str] = OrderedDict()  # by digest
        self._latest: tuple[str, Snapshot | None, str] = ("", None, "")
        self._lock = forkable(threading.Lock(), is_waited_for=False)

    def reason(self, digest: str) -> str:
        """Return why rows of a call affect each other with the present weights, whose digest this is; "" if not."""
        known, _, reason = self._latest
        return reason if digest == known else self._find(digest)

    def _find(self, digest: str) -> str:
        with self._lock:
            _, before, reason = self._latest
            if digest in self._known:
                reason = self._known[digest]
            elif before is None or not self._weights.differs_in_values(before):
                reason = find_coupling(self._trunk)
            if reason and reason not in self._known.values():
                logger.warning("rows of a call affect each other, so %s: %s", _SO, reason)
            self._known[digest] = reason
            if len(self._known) > _MAX_STATES:
                self._known.popitem(last=False)
            self._latest = digest, self._weights.snapshot_of(digest), reason
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


def trial_rows(trunk: Trunk, n_rows: int, n_tokens: int) -> Tensor:
    """Return rows of content tokens (B, T), the same each time."""
    special, size = special_ids(trunk), vocabulary_size(trunk)
    content = torch.tensor(sorted(set(range(min(size, 4096))) - set(special)) or [0], device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)
    places = torch.randint(len(content), (n_rows, n_tokens), generator=generator, device="cpu")
    return content[places].to(device_of(trunk.module))


def _run(trial: nn.Module, arguments: Mapping[str, Any], *rows: Tensor, n_padded: int = 0) -> Tensor:
    """Return the states of rows, the last with `n_padded` tokens of padding at its end; pass `arguments` as well."""
    ids = torch.stack(rows)
    mask = torch.ones(ids.shape, dtype=torch.int64, device="cpu")
    mask[-1, ids.shape[1] - n_padded :] = 0
    output = trial(input_ids=ids, attention_mask=mask.to(ids.device), **arguments)
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states


def rounding_of(trial: nn.Module, states: Tensor) -> float:
    """Return how far a state of a row beside others may be off, as a share of the largest state."""
    may_be_tf32 = torch.get_float32_matmul_precision() != "highest"
    may_be_tf32 |= any(isinstance(part, nn.modules.conv._ConvNd) for part in trial.modules())  # cuDNN's default
    is_tf32 = may_be_tf32 and states.dtype == torch.float32 and not states.is_cpu
    return _ROUNDING[torch.float16 if is_tf32 else states.dtype]


def _is_alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether states of a row differ by at most this share of the largest."""
    one, other = one.nan_to_num(), other.nan_to_num()
    return bool((one - other).abs().max() <= tolerance * one.abs().max())
