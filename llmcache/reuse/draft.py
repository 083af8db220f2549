"""The rung `draft`: a cheaper answer is served where its own margin makes another answer unlikely. Approximate.

The logits of an int8 copy of the model, or of another model, are put into the model's output (`ModelForward`), which
does not run if all rows have some. Where the head is not copied, the states of an int8 copy of the trunk take the place
of the trunk's, and the model's own head reads them. How likely the model's answer differs is a logistic regression on
the margins of the draft's answer, fitted by a calibration, which also decides whether the draft pays and chooses its
limit (`calibration.py`). An embedding has no margin: all its drafts have one risk, so they serve all requests or none.
Nothing of a draft enters the bank.

Sizes: N requests, F features, C outputs, S width of a signature.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from math import inf, isfinite
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from llmcache.models.arguments import DECIDING, take_row
from llmcache.models.hooks import ModelCall
from llmcache.models.output_formats import OutputFormats
from llmcache.models.packing import Fields, Packing, parts_of
from llmcache.request.counters import Counters
from llmcache.request.rows import Row
from llmcache.reuse.answers import Answers, Reading
from llmcache.reuse.calibration.calibration import DRAFT, SEMANTIC
from llmcache.reuse.call import Bypass, Call, Hit
from llmcache.reuse.decide import Odds, Semantic
from llmcache.reuse.drafters import Drafter
from llmcache.reuse.sources import Choice
from llmcache.support.arrays import Doubles, Floats
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

_MOST_RECENT = 256  # proposals kept, since one request may be looked up several times before it is answered
_RECENT_BYTES = 8 << 20  # of proposals without states: more of these are kept, for requests that come again
_OVERHEAD = 512  # bytes of a proposal besides its output


class Proposal(NamedTuple):
    """A draft's answer to one request."""

    raw: Any  # what the drafter makes states of
    output: Floats  # (C,)
    answer: Floats  # signature (S,)
    by: str  # name of the drafter
    seconds: float


class Draft:
    """The draft of one wrapped model. Thread-safe."""

    name = DRAFT
    is_lossless = False

    def __init__(
        self,
        answers: Answers,
        read: Reading,
        packings: OutputFormats[Packing],
        semantic: Semantic,
        make: Callable[[Drafter | None], Drafter],
        device: torch.device,
        model_call: ContextVar[ModelCall | None],
        counters: Counters,
    ) -> None:
        """Begin without a drafter: call `refresh`.

        Args:
            read: Reads the logits from the model's output.
            packings: How to store the trunk's output, by kind of call.
            semantic: Knows the calibration in force.
            make: Makes the drafter for the present weights; takes the previous one.
            device: Where entries are kept.
            model_call: Set within the whole model's forward, whose output takes logits, see `join`.
        """
        self._answers, self._read, self._packings = answers, read, packings
        self._semantic, self._make, self._device = semantic, make, device
        self._model_call, self._counters = model_call, counters
        self.odds = Odds()  # that its answer is another than the model's
        self._lock = forkable(threading.Lock(), is_waited_for=False)
        self._recent: OrderedDict[str, Proposal] = OrderedDict()  # by key of the row
        self.drafter: Drafter | None = None

    def refresh(self) -> None:
        """Make the drafter for the present weights; a warning says why if that fails."""
        with self._lock:
            before, self.drafter = self.drafter, None
            self._recent = OrderedDict()
            try:
                with torch.inference_mode():
                    self.drafter = self._make(before)
            except Exception as error:  # an exporter, or a head that takes more than tokens, may raise anything
                logger.warning("llmcache: there is no draft, since none could be made: %s", error)

    @property
    def drafter_name(self) -> str:
        """Name of the drafter, which tells its weights and numbers; "" without one."""
        return "" if self.drafter is None else self.drafter.name

    def forget(self) -> None:
        self._recent = OrderedDict()

    def close(self) -> None:
        """Free the drafter; nothing is drafted any more."""
        if self.drafter is not None:
            self.drafter.close()
        self.forget()

    # -- in a calibration ----------------------------------------------------------------------------------------------

    def observe(self, call: Call, rows: Sequence[Row], head: str) -> list[tuple[Floats | None, float]]:
        """Return the draft's output (C,) for rows of a finished call, None where it does not apply, and its seconds.

        `head`: digest of the head that made the rows' answers.
        """
        if self.drafter is not None and self.drafter.head not in ("", head):  # it was edited or replaced
            self.refresh()
        proposals = [self._propose(call, row) for row in rows]
        return [(None, 0.0) if proposal is None else (proposal.output, proposal.seconds) for proposal in proposals]

    def fit(self, outputs: Sequence[Floats | None], answers: Sequence[Floats]) -> None:
        """Learn from the draft's outputs for N requests and the model's own answers how likely they differ."""
        known = [(output, answer) for output, answer in zip(outputs, answers, strict=True) if output is not None]
        if known:
            drafts, own = (np.stack(part) for part in zip(*known, strict=True))
            changed = ~self._answers.agree(self._answers.sign(drafts), own)
            self.odds.fit(list(map(self._answers.margins, drafts)), changed.tolist())

    def risks(self, outputs: Sequence[Floats | None]) -> Doubles:
        """Return how likely each answer differs from the model's (N,); infinite where the draft does not apply."""
        return np.array([inf if output is None else self._risk(output) for output in outputs], np.float64)

    def choice(self, output: Floats) -> Choice:
        """Return a draft's output (C,) as what is chosen for a request."""
        risk = self._risk(output)
        return Choice(None, None, risk, risk)

    # -- serving -------------------------------------------------------------------------------------------------------

    def look_up(self, call: Call, rows: Sequence[Row]) -> None:
        """Run the draft on rows, and add a hit for each whose risk is within the limit.

        The bound was not calibrated for some rows, which are left to the model: rows that were not searched, and rows
        whose source would serve if it were not quarantined.
        """
        calibration = call.calibration or self._semantic.serving(call.scope.weights)
        packing, drafter = self._packings.get(call.kind), self.drafter
        limit = None if calibration is None else calibration.limits.get(self.name)
        if (
            calibration is None
            or limit is None
            or packing is None
            or drafter is None
            or calibration.draft != drafter.name
        ):
            return
        within = self._model_call.get()  # None: the trunk is called alone
        if not drafter.makes_states and (within is None or not within.has_rows_of(call)):
            return
        if drafter.head not in ("", calibration.head):
            return
        if self._answers.reads_payload and self.odds.chance([0.0]) > limit:  # the risk of all requests
            return
        found = {}
        for row in rows:
            if (choice := call.choices.get(row.number)) is None:
                if SEMANTIC in calibration.shares:  # it was not searched
                    continue
            elif choice.risk_unquarantined <= calibration.limits[SEMANTIC]:  # its source is quarantined
                continue
            if (proposal := self._propose(call, row)) is not None and proposal.by == calibration.draft:
                found[row.number] = proposal
        if self._semantic.calibration is not calibration:
            return
        call.calibration = calibration
        for number, proposal in found.items():
            choice = self.choice(proposal.output)
            call.choices.setdefault(number, choice)
            call.forecasts.setdefault(number, proposal.output)
            if (risk := choice.risk) > limit:
                continue
            fields: Fields = ()
            if drafter.makes_states:
                row, states = call.rows[number], drafter.states(proposal.raw, call.arguments)
                if not packing.fits(states, 1, row.n_valid):
                    continue
                fields = packing.take(states, 0, row.valid, False, self._device)[0]
            call.hits[number] = Hit(
                self.name,
                "",
                fields,
                similarity=None,
                answer=proposal.answer,
                share=min(1.0, risk / limit) if limit > 0 else 1.0,
                risk=risk,
                logits=None if fields else proposal.output,
                has_states=bool(fields),
            )

    def has_part_in(self, calls: Sequence[Call | Bypass]) -> bool:
        """Whether logits of the draft belong into the output of a forward with these trunk calls."""
        return any(not hit.has_states for call in calls for hit in call.hits.values())

    def join(self, calls: Sequence[Call | Bypass], output: Any) -> bool:
        """Put the draft's logits into the output of the model's forward; return False if that is impossible.

        Args:
            calls: The trunk calls of the forward.
            output: The model's: a `ModelOutput` with logits alone, a tuple of them, or the tensor.
        """
        if not self.has_part_in(calls):
            return True
        with self._counters.guard("put a draft's logits into the model's output") as tried:
            (call,) = (call for call in calls if isinstance(call, Call))
            logits = self._read(output)
            if len(parts_of(output)) > 1 or len(logits) != len(call.rows):
                raise TypeError(f"the model returns more than a row of logits for each request: {type(output)}")
            for number, hit in call.hits.items():
                if not hit.has_states:
                    logits[number] = torch.from_numpy(hit.logits).to(logits)
        if tried.has_failed:
            self.close()  # else each such call runs twice
        return not tried.has_failed

    def fail(self, error: Exception) -> None:
        """Count that the model's head raised on a call with drafted rows, and draft nothing any more."""
        self._counters.error("run the model's head on a draft, which is not used again before a calibration", error)
        self.close()

    def _propose(self, call: Call, row: Row) -> Proposal | None:
        """Return the draft's answer to a row; None if it does not apply to it, or fails."""
        drafter = self.drafter
        if drafter is None or row.is_misread or row.bypass_reason or not row.starts_first:
            return None
        if call.requests.may_be_refused() or not (by := drafter.name) or not drafter.covers(call, row):
            return None
        recent = self._recent  # taken before the draft runs: `forget` meanwhile puts another one in its place
        if (known := recent.get(row.key)) is not None and known.by == by:
            return known
        given = {name: value for name in DECIDING if (value := call.arguments.get(name)) is not None}
        inputs = {name: take_row(value, row.number, row.n_valid) for name, value in given.items()}
        started = perf_counter()
        try:
            with torch.inference_mode():
                raw, output = drafter.run(inputs)
        except Exception as error:  # whatever a provider or a model raises
            drafter.close()
            self._counters.error("run the draft, which is not used again before a calibration", error)
            return None
        if not isfinite(np.add.reduce(output)):
            return None
        proposal = Proposal(raw, output, self._answers.sign(output[None])[0], by, perf_counter() - started)
        recent[row.key] = proposal
        n_most = 0 if raw is not None else _RECENT_BYTES // (output.nbytes + _OVERHEAD)
        if len(recent) > max(_MOST_RECENT, n_most):
            with self._lock:
                recent.popitem(last=False)
        return proposal

    def _risk(self, output: Floats) -> float:
        return self.odds.chance(self._answers.margins(output))
