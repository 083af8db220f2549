"""Approximate reuse of one wrapped model as one object: what calls, upkeep and figures of its cache ask for."""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from llmcache.request.rows import Scope
from llmcache.reuse.audit.audit import Audit
from llmcache.reuse.calibration.calibrated_reuse import CalibratedReuse
from llmcache.reuse.calibration.sharing import SharedCalibration
from llmcache.reuse.call import Call, Rung
from llmcache.reuse.search_cost import SearchCost

logger = logging.getLogger("llmcache")


class Approximate:
    """The rungs, audit and observer of a model that can be calibrated. Without a calibration nothing is served."""

    def __init__(
        self,
        calibrated: CalibratedReuse,
        audit: Audit,
        sharing: SharedCalibration | None,
        search_cost: SearchCost | None,
    ) -> None:
        """Join the parts. `search_cost`: None: search in every call."""
        semantic, draft = calibrated.semantic, calibrated.fitter.draft
        self.calibrated, self.semantic, self.draft, self.audit = calibrated, semantic, draft, audit
        self.sharing, self.search_cost, self.collected = sharing, search_cost, audit.observer.collected
        self.rungs: Sequence[Rung] = (semantic,) if draft is None else (semantic, draft)
        self.worker: AbstractContextManager[object] = audit.worker if audit.is_on else nullcontext()
        # Bound here, so that a call enters no function in between.
        self.draw, self.served, self.withdraw, self.observe = audit.draw, audit.served, audit.withdraw, audit.observe
        self.is_current = semantic.is_current
        self.held, self.recheck = calibrated.held, calibrated.head.recheck
        self.audit_stats, self.close = audit.stats, audit.worker.close
        self.step: Callable[[Scope, int], None] = (lambda scope, number: None) if sharing is None else sharing.step
        self.join: Callable[[Sequence[Any], Any], bool] = (lambda calls, output: True) if draft is None else draft.join
        self.has_part_in: Callable[[Sequence[Any]], bool] = (
            (lambda calls: False) if draft is None else draft.has_part_in
        )

    def fail(self, error: Exception) -> None:
        if self.draft is not None:
            self.draft.fail(error)

    # -- upkeep --------------------------------------------------------------------------------------------------------

    def forget(self, namespace: str | None) -> None:
        """Drop sources and collected requests of a namespace (None: all), and end a calibration with such sources."""
        self.calibrated.forget(namespace)
        self.semantic.sources.forget(namespace)

    def forget_waiting(self, namespace: str | None) -> None:
        """Drop what waits to be audited, and proposals. Not within `held`: the audit takes that lock, too."""
        self.audit.forget(namespace)
        if self.draft is not None:
            self.draft.forget()

    def bury(self, namespace: str, keys: Collection[str]) -> None:
        """Bury the sources among forgotten requests. Queued hits are audited all the same, as the rate needs it."""
        for key in keys:
            if key in self.semantic.sources:
                self.semantic.sources.bury(key, namespace)
        if self.draft is not None:
            self.draft.forget()

    def sources_of(self, call: Call) -> list[str]:
        """Return the keys of the sources that would serve a call's rows."""
        call.hits.clear()
        self.semantic.look_up(call, [row for row in call.rows if not row.bypass_reason])
        return [hit.source for hit in call.hits.values()]

    @property
    def index_nbytes(self) -> int:
        return self.semantic.sources.index_nbytes

    def settle(self) -> int:
        """Do all background work now; return how many jobs this thread did."""
        self.calibrated.settle()
        n_done = self.audit.drain()
        if self.sharing is not None:
            self.sharing.settle()
        return n_done

    def close_draft(self) -> None:
        if self.draft is not None:
            self.draft.close()

    def check_engine(self, engine: str) -> None:
        """End a calibration whose sources another engine computed: none of them would be found."""
        calibration = self.calibrated.calibration
        if calibration is not None and calibration.engine != engine:
            self.calibrated.end()
            logger.warning(
                "llmcache: a calibration with the engine %r is left out, since it is %r now: calibrate again, "
                "or go back to that engine",
                calibration.engine or "eager",
                engine or "eager",
            )
