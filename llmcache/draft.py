"""The rung `draft`: an int8 copy of the trunk answers where its own margin makes another answer unlikely. Approximate.

The draft's states take the place of the trunk's, and the model's own head reads them. How likely the model's answer
differs is a logistic regression on the margins of the draft's answer, fitted by a calibration, which also decides
whether the draft pays and chooses its limit (`calibration.py`). Dynamic quantisation has one scale a call, so each row
runs alone and without padding: its answer does not depend on its batch. Nothing of a draft enters the bank.

Sizes: N requests, F features, C outputs, S width of a signature.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from llmcache.answers import Answers, Reading
from llmcache.arrays import Doubles, Floats
from llmcache.calibration.calibration import DRAFT, SEMANTIC
from llmcache.decide import Choice, chance, fit_odds, rounded
from llmcache.engines.onnx import OnnxTrunk
from llmcache.models.arguments import DECIDING
from llmcache.models.kinds import Kinds
from llmcache.models.packing import Packing
from llmcache.models.twin import make_replicas
from llmcache.request.call import Call, Hit
from llmcache.request.rows import Row
from llmcache.threads import forkable

if TYPE_CHECKING:
    from llmcache.calibration.calibration import Calibration

logger = logging.getLogger("llmcache")

_MOST_RECENT = 256  # proposals kept, since one request may be looked up several times before it is answered


class Proposal(NamedTuple):
    """A draft's answer to one request."""

    made: Sequence[Tensor]  # the graph's tensors, for one row
    output: Floats  # (C,)
    answer: Floats  # signature (S,)


class Draft:
    """The draft of one wrapped model. Thread-safe."""

    name = DRAFT
    is_lossless = False

    def __init__(
        self,
        model: nn.Module,
        trunk: nn.Module,
        names: set[str] | None,
        answers: Answers,
        read: Reading,
        packings: Kinds[Packing],
        serving: "Callable[[str], Calibration | None]",
        make_engine: Callable[[], OnnxTrunk],
        device: torch.device,
    ) -> None:
        """Begin without an engine: call `refresh`.

        Args:
            model: The wrapped model.
            trunk: Its trunk.
            names: Arguments of the model's forward; None: any.
            answers: The kind of its answers.
            read: Reads the logits from its output.
            packings: How to store the trunk's output, by kind of call.
            serving: `digest of the trunk's weights -> calibration that serves them`, or None.
            make_engine: Makes the int8 engine for the present weights.
            device: Where entries are kept.
        """
        self._model, self._trunk, self._names = model, trunk, names
        self._answers, self._read, self._packings = answers, read, packings
        self._serving, self._make_engine, self._device = serving, make_engine, device
        self._weights: Sequence[float] = ()  # of the features (F,), then the intercept
        self._lock = forkable(threading.Lock(), is_waited_for=False)
        self._given = threading.local()  # the trunk's output that the head reads
        self._recent: OrderedDict[str, Proposal] = OrderedDict()  # by key of the row
        self._head: nn.Module = nn.Identity()
        self.engine: OnnxTrunk | None = None

    def refresh(self, weights: str) -> None:
        """Make engine and head for the present weights, whose digest is given; a warning says why if that fails."""
        with self._lock:
            before, self.engine = self.engine, None
            self._recent = OrderedDict()
            try:
                replicas = make_replicas(self._model)  # of the head's present tensors
                replicas[self._trunk].forward = self._give_states
                self._head = replicas[self._model]
                engine = before
                if before is None or not (before.n_graphs and before.is_of(weights)):
                    engine = self._make_engine()
                assert engine is not None
                ids = engine.twin.tokens(1, 4)
                self._compute(engine, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            except Exception as error:  # an exporter, or a head that takes more than tokens, may raise anything
                logger.warning("llmcache: there is no draft, since none could be made: %s", error)
                return
            self.engine = engine

    @property
    def engine_name(self) -> str:
        """Name of the engine, which tells its weights and numbers; "" without one."""
        return "" if self.engine is None else self.engine.name

    def forget(self) -> None:
        """Drop the latest proposals."""
        self._recent = OrderedDict()

    def close(self) -> None:
        """Free the engine; nothing is drafted any more."""
        if self.engine is not None:
            self.engine.close()
        self.forget()

    # -- in a calibration ----------------------------------------------------------------------------------------------

    def observe(self, call: Call, rows: Sequence[Row]) -> list[tuple[Floats | None, float]]:
        """Return the draft's output (C,) for rows of a finished call, None where it does not apply, and its seconds."""
        seen: list[tuple[Floats | None, float]] = []
        for row in rows:
            started = perf_counter()
            proposal = self._propose(call, row)
            seen.append((None if proposal is None else proposal.output, perf_counter() - started))
        return seen

    def fit(self, outputs: Sequence[Floats | None], answers: Sequence[Floats]) -> None:
        """Learn from the draft's outputs for N requests and the model's own answers how likely they differ."""
        known = [(output, answer) for output, answer in zip(outputs, answers, strict=True) if output is not None]
        if known:
            drafts, own = (np.stack(part) for part in zip(*known, strict=True))
            changed = ~self._answers.agree(self.sign(drafts), own)
            self._weights = fit_odds(self._answers.margins(drafts).tolist(), changed.tolist())

    def risks(self, outputs: Sequence[Floats | None]) -> Doubles:
        """Return how likely each answer differs from the model's (N,); infinite where the draft does not apply."""
        return np.array([inf if one is None else self._risk(one) for one in outputs], np.float64)

    def choice(self, output: Floats) -> Choice:
        """Return a draft's output (C,) as what is chosen for a request."""
        risk = self._risk(output)
        return Choice(None, None, risk, risk)

    def sign(self, outputs: Floats) -> Floats:
        """Return the signatures (N, S) of outputs (N, C)."""
        signed: Floats = self._answers.sign(torch.from_numpy(outputs)).numpy()
        return signed

    def state(self) -> dict[str, Floats]:
        """Return the fitted weights."""
        return {"weights": np.array(self._weights, np.float32)}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Restore the weights that `state` returned."""
        self._weights = rounded(state["weights"])

    # -- serving -------------------------------------------------------------------------------------------------------

    def look_up(self, call: Call, rows: Sequence[Row]) -> None:
        """Run the draft on rows, and add a hit for each whose risk is within the limit."""
        assert call.scope is not None
        made, packing, engine = self._serving(call.scope.weights), self._packings.get(call.kind), self.engine
        limit = None if made is None else made.limits.get(self.name)
        if made is None or limit is None or packing is None or engine is None or made.draft != engine.name:
            return
        if call.made is not None and call.made is not made:  # sources of another calibration were searched
            return
        found = {}
        for row in rows:
            if (choice := call.choices.get(row.number)) is None:
                if SEMANTIC in made.shares:  # not searched: what would serve it is unknown
                    continue
            elif choice.risk_unquarantined <= made.limits[SEMANTIC]:  # a source that was withdrawn: not as calibrated
                continue
            if (proposal := self._propose(call, row)) is not None:
                found[row.number] = proposal, self.choice(proposal.output)
        if self._serving(call.scope.weights) is not made:
            return
        call.made = made
        for number, (proposal, choice) in found.items():
            call.choices.setdefault(number, choice)
            call.forecasts.setdefault(number, proposal.output)
            states = engine.twin.pack(proposal.made, call.arguments)
            row = call.rows[number]
            if choice.risk <= limit and packing.fits(states, 1, row.n_valid):
                fields, _ = packing.take(states, 0, row, self._device)
                share = min(1.0, choice.risk / limit) if limit > 0 else 1.0
                call.hits[number] = Hit(self.name, "", fields, (), None, proposal.answer, share, choice.risk)

    def _propose(self, call: Call, row: Row) -> Proposal | None:
        """Return the draft's answer to a row; None if it does not apply to it, or fails."""
        engine = self.engine
        if engine is None or row.is_misread or row.bypass_reason or not row.starts_first:
            return None
        assert call.scope is not None and call.requests is not None
        if call.requests.may_be_refused():
            return None
        if engine.choose(call.args, call.kwargs, call.scope.weights, call.prefill is not None) is not engine:
            return None
        if (known := self._recent.get(row.key)) is not None:
            return known
        inputs = {name: _unpadded(value, row) for name in DECIDING if (value := call.arguments.get(name)) is not None}
        try:
            made, output = self._compute(engine, inputs)
        except Exception as error:  # whatever a provider or a head raises
            engine.close()
            logger.warning("llmcache: the draft failed and is not used again", exc_info=error)
            return None
        if not np.isfinite(output).all():
            return None
        proposal = Proposal(made, output, self.sign(output[None])[0])
        recent = self._recent
        recent[row.key] = proposal
        if len(recent) > _MOST_RECENT:
            with self._lock:
                recent.popitem(last=False)
        return proposal

    def _compute(self, engine: OnnxTrunk, inputs: Mapping[str, Tensor]) -> tuple[Sequence[Tensor], Floats]:
        """Return the graph's tensors for one row, and the head's output (C,)."""
        takes = {name: one for name, one in inputs.items() if self._names is None or name in self._names}
        with torch.inference_mode():
            made = engine.compute(inputs)
            self._given.states = engine.twin.pack(made, {})
            output: Floats = self._read(self._head(**takes)).float()[0].cpu().numpy()
        return made, output

    def _give_states(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the trunk's forward in the head's twin."""
        return self._given.states

    def _risk(self, output: Floats) -> float:
        if not self._weights:
            return inf
        return chance(self._weights, self._answers.margins(output[None])[0].tolist())


def _unpadded(value: Tensor, row: Row) -> Tensor:
    """Return a row's part (1, n) of an argument (B, T) or (1, T)."""
    return value[row.number if len(value) > 1 else 0][None, : row.n_valid]
