"""One recorded pass of the model alone over a task: the input of a replay, and the answers that follow from it.

Answers are read from the model's own outputs. A request served from another one gets that one's output, read as its
own output (or the finished answer itself, as from a response cache).

Sizes: B rows, T tokens, D hidden width; others as in `experiments.replay.replay`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from experiments.methods.doccache import DocCache
from experiments.methods.responses import Encoder
from experiments.models.loading import MINILM, Inputs, token_rows
from experiments.replay.replay import Replay, Units
from experiments.support.progress import tracked
from experiments.tasks.workload import Answer, Workload
from llmcache import FINGERPRINTS, CacheConfig, Fingerprint, View
from llmcache.lab import Floats, ShingleMinHash, Trunk, first_attention, locate, share_equal, special_ids, unpack

MOST_KEPT = 65_536  # bytes; larger outputs are recomputed when needed
N_LARGE = 64  # number of recent large outputs to keep


class Recording:
    """One pass of the model alone over a workload, and the lookup units of each method."""

    def __init__(self, workload: Workload, outputs: Sequence[Any] = ()) -> None:
        self.workload = workload
        self.trunk = locate(workload.module)
        self.outputs = _Answered(workload, outputs)
        self._read_before: dict[str, dict[tuple[Any, ...], Answer]] = {}  # by reading method, then request and sources
        with torch.inference_mode():
            numbers = tracked(range(len(workload.requests)), "Recording the model alone")
            self.answers: list[Answer] = [workload.answer(self.outputs[number], number) for number in numbers]
        rows = [token_rows(request.inputs) for request in workload.requests]
        self._request = np.repeat(np.arange(len(rows)), [len(ids) for ids, _ in rows])
        self._tokens = [row[kept].numpy() for ids, valid in rows for row, kept in zip(ids, valid, strict=True)]

    def rows(self, fingerprint: Fingerprint, fits_any_length: bool) -> Units:
        """Return llmcache's units: rows, served if equal or if their fingerprints, fitted here, are near."""
        features = self._features(fingerprint)
        keys = [tokens.tobytes() for tokens in self._tokens]
        first_searched = self._fit(fingerprint, features, keys) if fingerprint.n_fit else 0
        is_fitted = first_searched < len(features)  # with too few requests to fit on, nothing is found
        return Units(
            request=self._request,
            vectors=np.concatenate([fingerprint.project(rows) if is_fitted else rows for rows in features]),
            keys=keys,
            lengths=None if fits_any_length else np.array([len(tokens) for tokens in self._tokens]),
            first_searched=first_searched,
            compare=share_equal if isinstance(fingerprint, ShingleMinHash) else np.matmul,
        )

    def _fit(self, fingerprint: Fingerprint, features: Sequence[Floats], keys: Sequence[bytes]) -> int:
        """Fit on the first distinct rows, those a cache would store; return the number of the next request."""
        first = np.sort(np.unique(np.array(keys, dtype=object), return_index=True)[1])[: fingerprint.n_fit]
        if len(first) < fingerprint.n_fit:
            return len(features)
        fingerprint.fit(np.concatenate(features)[first])
        return int(self._request[first[-1]]) + 1

    def documents(self) -> Units:
        """Return DocCache's units: whole requests by their mean word embedding."""
        with torch.inference_mode():
            embed = DocCache(self.workload, {}).embed
            vectors = [embed(request.inputs) for request in self.workload.requests]
        return Units(np.arange(len(vectors)), np.stack(vectors))

    def texts(self, encoder: str = MINILM) -> Units:
        """Return the semantic response cache's units: whole requests by their sentence embedding."""
        encode = Encoder(encoder)
        requests = self.workload.requests
        with torch.inference_mode():
            vectors = [encode(request.text) for request in tracked(requests, "Embedding texts")]
        return Units(np.arange(len(vectors)), np.stack(vectors))

    def _features(self, fingerprint: Fingerprint) -> list[Floats]:
        """Return fingerprint features (rows, F0) for each request; F0 may depend on the request's length."""
        specials = torch.tensor(special_ids(self.trunk, self.workload.tokenizer))
        found: list[Floats] = []
        with torch.inference_mode():
            for request in self.workload.requests:
                ids, valid = token_rows(request.inputs)
                content = valid & ~torch.isin(ids, specials)
                hidden, attention = first_states(self.workload, self.trunk, request.inputs, fingerprint.reads_attention)
                found.append(fingerprint.features(View(hidden, content, ids, attention)).numpy())
        return found

    def reread(self, units: Units, replay: Replay) -> list[Answer]:
        """Return each request's answer if states are reused: the sources' outputs, read as the request's own."""
        return self._answers(units, replay, self._read)

    def handed(self, units: Units, replay: Replay) -> list[Answer]:
        """Return each request's answer if another request's whole output is read as its own."""
        return self._answers(units, replay, self._read_whole)

    def borrowed(self, units: Units, replay: Replay) -> list[Answer]:
        """Return each request's answer if the source's answer is returned unchanged."""
        return self._answers(units, replay, self._borrow)

    def _answers(
        self, units: Units, replay: Replay, read: Callable[[int, list[tuple[int, int]]], Answer]
    ) -> list[Answer]:
        known = self._read_before.setdefault(read.__name__, {})
        first = np.searchsorted(units.request, np.arange(len(self.answers)))
        ends = np.append(first[1:], len(units.request))
        told = []
        for number, (begin, end) in enumerate(zip(first, ends, strict=True)):
            sources = replay.source[begin:end]
            if (sources == np.arange(begin, end)).all():
                told.append(self.answers[number])
                continue
            owners = units.request[sources]
            rows = list(zip(owners.tolist(), (sources - first[owners]).tolist(), strict=True))
            if (number, *rows) not in known:  # the same at many thresholds
                known[number, *rows] = read(number, rows)
            told.append(known[number, *rows])
        return told

    def _borrow(self, number: int, rows: list[tuple[int, int]]) -> Answer:
        return self.workload.borrowed(self.answers[rows[0][0]])

    def _read(self, number: int, rows: list[tuple[int, int]]) -> Answer:
        with torch.inference_mode():
            return self.workload.answer(self.workload.mix([(self.outputs[owner], row) for owner, row in rows]), number)

    def _read_whole(self, number: int, rows: list[tuple[int, int]]) -> Answer:
        with torch.inference_mode():
            return self.workload.answer(self.outputs[rows[0][0]], number)


class _Answered:
    """The model's output for each request: kept if small, else recomputed."""

    def __init__(self, workload: Workload, known: Sequence[Any] = ()) -> None:
        self._workload = workload
        self._small: dict[int, Any] = dict(enumerate(known))
        self._large: OrderedDict[int, Any] = OrderedDict()

    def __getitem__(self, number: int) -> Any:
        """Return the output of a request; call it in inference mode."""
        if number in self._small:
            return self._small[number]
        if number not in self._large:
            output = self._workload.module(**self._workload.requests[number].inputs)
            if _nbytes(output) <= MOST_KEPT:
                return self._small.setdefault(number, output)
            self._large[number] = output
            if len(self._large) > N_LARGE:
                self._large.popitem(last=False)
        self._large.move_to_end(number)
        return self._large[number]


def make_fingerprint(options: Mapping[str, Any] | str) -> Fingerprint:
    """Build a fingerprint from its name, or from its name and settings."""
    return CacheConfig.make(None, fingerprint=options, tau=1.0).fingerprint.build(FINGERPRINTS)


def first_states(workload: Workload, trunk: Trunk, inputs: Inputs, wants_attention: bool) -> tuple[Any, Any]:
    """Return the states (rows, T, D) that enter layer 0, and its attention's output if wanted. Runs no later layer."""
    captured: dict[str, Any] = {}

    def enter(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured["hidden"] = args[0] if args else kwargs["hidden_states"]
        if not wants_attention:
            raise _Captured

    def leave(attention: Any, args: tuple[Any, ...], output: Any) -> None:
        captured["attention"] = unpack(output)
        raise _Captured

    handles = [trunk.layers[0].register_forward_pre_hook(enter, with_kwargs=True)]
    if wants_attention:
        handles.append(first_attention(trunk).register_forward_hook(leave))
    try:
        workload.module(**inputs)
    except _Captured:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return captured["hidden"], captured.get("attention")


class _Captured(Exception):
    """Ends a forward after its first layer was captured."""


def _nbytes(output: Any) -> int:
    tensors = [output] if isinstance(output, torch.Tensor) else output.values()
    return sum(int(tensor.nbytes) for tensor in tensors if isinstance(tensor, torch.Tensor))
