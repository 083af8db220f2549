"""Asks the cost model about each call, and tells it what the call took."""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from llmcache.context import Call
from llmcache.cost import Times
from llmcache.parts import Parts


class Meter:
    """Between the calls of one wrapped model and its cost model. Thread-safe.

    On an accelerator, kernels run after the host has gone on, so that the host's clock means something only once they
    are waited for. That is done for one call in 64; tokens are not read, which would wait as well.
    """

    def __init__(
        self,
        parts: Parts,
        clock: Callable[[], float] = perf_counter,
        wait: Callable[[torch.device], None] = torch.accelerator.synchronize,
    ) -> None:
        """Prepare for calls.

        Args:
            parts: What calls are served with.
            clock: Seconds.
            wait: Returns once an accelerator has done what it was given. Not called where all is on the host.
        """
        self._parts = parts
        self._clock = clock
        self._wait = wait

    def ask(self, call: Call) -> str | None:
        """Why a call is to go by the cache, or None; starts the clock of one that is not."""
        cost, ids = self._parts.cost, call.arguments["input_ids"]
        if cost is None or ids.numel() == 0 or self._parts.is_collecting:
            return None
        if self._is_learning:
            cost.restart()  # what was seen before does not hold of what can be served afterwards
            return None
        started = self._clock()
        verdict = cost.pays(ids.numel(), len(ids), _hashes(call) if ids.is_cpu else ())
        if not verdict.pays:
            return "does_not_pay"
        call.is_metered = True
        if ids.is_cpu:
            call.started = started
            call.lookup_s += self._clock() - started
        elif verdict.is_probe:
            call.started = self._done(ids)
        return None

    def now(self, call: Call) -> float:
        """The time at which the call's work so far is done, if the call is timed."""
        return self._clock() if call.started is None else self._done(call.arguments["input_ids"])

    def took(self, call: Call, ended: float) -> None:
        """Tell what became of a call that took the whole way, until that time."""
        cost, ids = self._parts.cost, call.arguments["input_ids"]
        if cost is None or not call.is_metered:
            return
        times = None if call.started is None else Times(ended - call.started, call.lookup_s, call.storing_s)
        cost.took(ids.numel(), call.n_rows, len(call.reused), times)

    def _done(self, ids: Tensor) -> float:
        """The time at which the device of these ids has done what it was given."""
        if not ids.is_cpu:
            self._wait(ids.device)
        return self._clock()

    @property
    def _is_learning(self) -> bool:
        """Whether calls are computed so that something is learned of them: what they cost now says nothing of later."""
        parts = self._parts
        if parts.trust is not None:
            return parts.trust.is_learning
        return parts.fingerprint is not None and parts.fingerprint.n_fit > 0


def _hashes(call: Call) -> list[int]:
    """What tells the requests of a call apart, by row; its tokens are on the host."""
    ids, mask = call.arguments["input_ids"].numpy(), call.arguments.get("attention_mask")
    if mask is None or len(ids) == 1:
        return [hash((call.namespace, row.tobytes())) for row in ids]
    valid = (mask != 0).numpy()  # the padding of a row in a batch hangs on the others
    return [hash((call.namespace, row[is_valid].tobytes())) for row, is_valid in zip(ids, valid, strict=True)]
