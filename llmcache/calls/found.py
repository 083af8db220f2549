"""Looks a batch up before it is run, and splits it into the part that the cache serves and the part to compute.

Hits are kept by the identity of the token ids: the tensors of `Part.inputs` are made here, and recognised when the
model is run on them.

Sizes: B rows, T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.calls.call import CachedForward
from llmcache.calls.prepared import Prepared
from llmcache.errors import ConfigError
from llmcache.models.arguments import DECIDING, count_rows, takes_dict
from llmcache.request.bypass import CURES, MISSES
from llmcache.request.outcome import Outcome
from llmcache.reuse.calibration.calibration import DRAFT, SEMANTIC
from llmcache.reuse.call import Bypass, Call


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a batch, to be run once: `model(**part.inputs)`.

    Attributes:
        rows: Their indices in the batch, in order.
        inputs: The sub-batch, by name: tensors with one row per request hold copies of these rows, other values are
            unchanged. If a tensor is edited, the part is looked up again when it is run.
    """

    rows: tuple[int, ...]
    inputs: dict[str, Any]
    _prepared: Prepared | None = field(default=None, repr=False)  # keeps the hits alive


@dataclass(frozen=True, slots=True)
class Found:
    """The result of `LLMCache.look_up` for a batch.

    Attributes:
        served: Rows that the cache serves: no layer runs for them, unless the audit takes a hit back as the part is run
            (after a drift, or while too many hits wait to be recomputed). None if there are none.
        missing: The other rows. None if there are none.
    """

    served: Part | None
    missing: Part | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would happen to a row of a call that is not made, and why.

    Attributes:
        outcome: As `cache.last` would hold it, unless the audit withdrew the hit.
        limit: The calibration's limit for the risk in `outcome`; None without a risk.
        cure: Why the call bypasses the cache or is computed (`Outcome.missed`), and what to change; None: no reason.
    """

    outcome: Outcome
    limit: float | None = None
    cure: str | None = None

    def __str__(self) -> str:
        """Return one sentence."""
        outcome, risk = self.outcome, ""
        if outcome.bypassed:
            return f"bypassed ({outcome.bypassed}): {self.cure}"
        if outcome.risk is not None and self.limit is not None:
            near = "" if outcome.similarity is None else f"similarity {outcome.similarity:.3f} to the chosen source, "
            risk = f"{near}risk {outcome.risk:.3g}, limit {self.limit:.3g}"
        if outcome.rung == "prefix":
            return f"served by prefix: the first {outcome.n_prefix:,} tokens; {self.cure}"
        if outcome.rung is not None:
            return f"served by {outcome.rung}" + (f": {risk}" if risk else "")
        known = f"its beginning is known to token {outcome.n_known:,}; " if outcome.n_known else ""
        return f"computed: {known}{self.cure or 'nothing stored serves it'}" + (f"; {risk}" if risk else "")


def explain(forward: CachedForward, run: Callable[[], object]) -> tuple[Explanation, ...]:
    """Return what would happen to each row of the call that `run` makes; see `LLMCache.explain`."""
    call = forward.prepared.look_up(run)
    if call is None:
        raise ConfigError("explain: the model's trunk was not called with these arguments")
    if isinstance(call, Bypass):
        n_rows = count_rows(call.parameters.bind(call.args, call.kwargs))
        return (Explanation(Outcome(bypassed=call.reason), cure=CURES[call.reason]),) * n_rows
    limits = {} if call.calibration is None else call.calibration.limits
    found = []
    for outcome in _outcomes(forward, call):
        rung = outcome.rung or (
            DRAFT if outcome.similarity is None else SEMANTIC
        )  # a source's risk comes with a similarity
        found.append(
            Explanation(outcome, limits.get(rung), CURES.get(outcome.bypassed or "", MISSES.get(outcome.missed or "")))
        )
    return tuple(found)


def _outcomes(forward: CachedForward, call: Call) -> list[Outcome]:
    """Return the outcome of each row; without K/V, beginnings are otherwise looked up as the rows are computed."""
    outcomes, prefix = [call.path.outcome(call, row) for row in call.rows], forward.prefix
    rest = [n for n, one in enumerate(outcomes) if not (one.rung or one.bypassed or one.missed)]
    if prefix is None or not rest:
        return outcomes
    prefix.share(call, rest, is_made=False)
    for number in rest:
        row, outcome = call.rows[number], outcomes[number]
        if call.plan is not None:
            found = prefix.outcome(call, row)
            is_hit = found.rung is not None
            outcomes[number] = found if is_hit else replace(outcome, n_known=found.n_known, missed=found.missed)
        elif n_held := prefix.n_held(row, call.blocks_scope):
            outcomes[number] = replace(outcome, n_known=n_held, missed="no_kv")
    return outcomes


def look_up(model: nn.Module, forward: CachedForward | None, batch: Mapping[str, Any]) -> Found:
    """Return the hits of a batch; see `LLMCache.look_up`. Without `forward`, all rows are missing."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim < 2:
        raise ConfigError("look_up: give tokenised inputs by name, with input_ids (rows, tokens)")
    every = range(len(ids))
    if forward is None:
        return Found(None, Part(tuple(every), dict(batch)))
    run = partial(model, dict(batch)) if takes_dict(model) else partial(model, **batch)
    with torch.inference_mode():
        call = forward.prepared.look_up(run)
    known = call if isinstance(call, Call) and _can_resume(call, batch) else None
    hits = () if known is None else sorted(known.hits)

    def part(numbers: Sequence[int]) -> Part | None:
        if not numbers:
            return None
        inputs = _take(batch, numbers, len(ids))
        return Part(tuple(numbers), inputs, None if known is None else forward.prepared.keep(known, numbers, inputs))

    return Found(part(hits), part([number for number in every if number not in set(hits)]))


def _can_resume(call: Call, batch: Mapping[str, Any]) -> bool:
    """Whether the trunk gets the batch's own tensors, so that the call is recognised when it is made."""
    is_plain = not call.path.keeps_kv and call.mask_4d is None
    return is_plain and all(call.arguments.get(name) is batch.get(name) for name in DECIDING)


def _take(batch: Mapping[str, Any], numbers: Sequence[int], n_rows: int) -> dict[str, Any]:
    """Return copies of rows of a batch, as tensors whose version counters show edits."""
    index = torch.tensor(numbers)
    with torch.inference_mode(False), torch.no_grad():
        return {
            name: value.index_select(0, index.to(value.device))
            if isinstance(value, Tensor) and value.ndim and len(value) == n_rows
            else value
            for name, value in batch.items()
        }
