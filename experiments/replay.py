"""What caches would have done at many thresholds, from one recorded pass of the model alone.

What a cache serves depends on tokens, vectors and the order of requests only, so one pass is enough for a whole sweep.
What misses is stored and nothing is evicted. Answers come from the model's own outputs: where a request is served from
another one, that one's output is read as the request's own (or its answer is given word for word, as a response cache
does). Speed cannot be replayed: it is measured live or left empty.

Sizes: N requests, M rows (a request with four choices has four), F vector width, K thresholds.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.methods.base import BYPASSED, COMPUTED
from experiments.methods.doccache import DocCache
from experiments.methods.responses import Encoder
from experiments.models import MINILM, Inputs
from experiments.progress import tracked
from experiments.workload import Answer, Workload
from llmcache.adapters import locate, special_ids
from llmcache.fingerprint import FINGERPRINTS, Fingerprint, ShingleMinHash, View

Floats = NDArray[np.float32]
MOST_KEPT = 65_536  # bytes; larger outputs are computed again when they are needed
N_LARGE = 64  # of those, the latest stay


@dataclass(frozen=True, slots=True)
class Units:
    """What is looked up and stored one by one: rows, or whole requests.

    Attributes:
        request: Number of the request each belongs to, ascending, (M,).
        vectors: float32 (M, F); a zero vector takes no part.
        keys: Equal for units that are the same; None where nothing is served for being the same.
        lengths: A unit serves only others of its length (M,); None where any length fits.
        n_fit: Requests at the beginning that a fingerprint had to see before anything was searched.
        compare: `(vectors (B, F), vector (F,)) -> similarity (B,)`.
    """

    request: NDArray[np.int64]
    vectors: Floats
    keys: Sequence[bytes] | None = None
    lengths: NDArray[np.int64] | None = None
    n_fit: int = 0
    compare: Callable[[Floats, Floats], Floats] = np.matmul


@dataclass(frozen=True, slots=True)
class Replay:
    """What a cache would have done at one threshold.

    Attributes:
        served: What serves each unit: `exact`, `near`, `computed` or `bypassed`, (M,).
        source: Number of the unit it is served from, itself where it is computed, (M,).
        similarity: Cosine to the nearest stored unit, (M,); NaN where nothing was stored yet.
    """

    served: NDArray[np.str_]
    source: NDArray[np.int64]
    similarity: Floats


class Recording:
    """One pass of the model alone over a workload, from which units of any method can be had."""

    def __init__(self, workload: Workload) -> None:
        """Run the model over all requests.

        Args:
            workload: Its model is not wrapped, and as before when this returns.
        """
        self.workload = workload
        self.trunk = locate(workload.module)
        self.outputs = Outputs(workload)
        with torch.inference_mode():
            numbers = tracked(range(len(workload.requests)), len(workload.requests), "Recording the model alone")
            self.answers: list[Answer] = [workload.answer(self.outputs[number], number) for number in numbers]
        rows = [_rows(request.inputs) for request in workload.requests]
        self._request = np.repeat(np.arange(len(rows)), [len(found) for found in rows])
        self._tokens = [tokens for found in rows for tokens in found]

    def rows(self, fingerprint: Fingerprint, fits_any_length: bool) -> Units:
        """Units of llmcache: rows, served when they are the same or their fingerprints are near.

        Args:
            fingerprint: Not fitted yet, if it has to be.
            fits_any_length: Whether a stored state serves rows of other lengths.
        """
        features = self._features(fingerprint)
        n_fit = fingerprint.n_fit
        if n_fit:
            fingerprint.fit(np.concatenate(features)[:n_fit])
        return Units(
            request=self._request,
            vectors=np.concatenate([fingerprint.project(rows) for rows in features]),
            keys=[tokens.tobytes() for tokens in self._tokens],
            lengths=None if fits_any_length else np.array([len(tokens) for tokens in self._tokens]),
            n_fit=n_fit,
            compare=share_equal if isinstance(fingerprint, ShingleMinHash) else np.matmul,
        )

    def documents(self) -> Units:
        """Units of DocCache: whole requests by their mean word embedding."""
        with torch.inference_mode():
            embed = DocCache(self.workload, {}).embed
            vectors = [embed(request.inputs) for request in self.workload.requests]
        return Units(np.arange(len(vectors)), np.stack(vectors))

    def texts(self, encoder: str = MINILM) -> Units:
        """Units of the semantic response cache: whole requests by their sentence embedding."""
        encode = Encoder(encoder)
        requests = self.workload.requests
        with torch.inference_mode():
            vectors = [encode(request.text) for request in tracked(requests, len(requests), "Embedding texts")]
        return Units(np.arange(len(vectors)), np.stack(vectors))

    def _features(self, fingerprint: Fingerprint) -> list[Floats]:
        """What the fingerprint reads of each request's rows, (rows, F0); F0 may follow a request's length."""
        specials = torch.tensor(special_ids(self.trunk, self.workload.tokenizer))
        found: list[Floats] = []
        with torch.inference_mode():
            for request in self.workload.requests:
                ids = request.inputs["input_ids"].flatten(end_dim=-2)
                mask = request.inputs.get("attention_mask", torch.ones_like(ids)).reshape(ids.shape)
                content = ~torch.isin(ids, specials) & mask.bool()
                hidden, attention = first_states(self.workload, self.trunk, request.inputs, fingerprint.reads_attention)
                found.append(fingerprint.features(View(hidden, content, ids, attention)).numpy())
        return found

    def reread(self, units: Units, replay: Replay) -> list[Answer]:
        """What each request is told when states are reused: outputs of the sources, read as its own."""
        return self._answers(units, replay, self._read)

    def borrowed(self, units: Units, replay: Replay) -> list[Answer]:
        """What each request is told when answers are given again word for word."""
        return self._answers(units, replay, lambda number, rows: self.workload.borrowed(self.answers[rows[0][0]]))

    def _answers(
        self, units: Units, replay: Replay, read: Callable[[int, list[tuple[int, int]]], Answer]
    ) -> list[Answer]:
        first = np.searchsorted(units.request, np.arange(len(self.answers)))
        ends = np.append(first[1:], len(units.request))
        told = []
        for number, (begin, end) in enumerate(zip(first, ends, strict=True)):
            sources = replay.source[begin:end]
            if (sources == np.arange(begin, end)).all():
                told.append(self.answers[number])
                continue
            owners = units.request[sources]
            told.append(read(number, list(zip(owners.tolist(), (sources - first[owners]).tolist(), strict=True))))
        return told

    def _read(self, number: int, rows: list[tuple[int, int]]) -> Answer:
        with torch.inference_mode():
            output = self.workload.mix([(self.outputs[owner], row) for owner, row in rows])
            return self.workload.answer(output, number)


class Outputs:
    """The model's output for each request: kept where it is small, else computed again."""

    def __init__(self, workload: Workload) -> None:
        """Keep nothing yet."""
        self._workload = workload
        self._small: dict[int, Any] = {}
        self._large: OrderedDict[int, Any] = OrderedDict()

    def __getitem__(self, number: int) -> Any:
        """Output of a request; call it in inference mode."""
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


def replay(units: Units, thresholds: Sequence[float]) -> list[Replay]:
    """Decide every unit at every threshold.

    Args:
        units: In the order in which they are asked.
        thresholds: Least cosine at which another unit's state is reused; above 1: never.

    Returns:
        One replay a threshold, in the same order.
    """
    vectors, m, k = units.vectors, len(units.vectors), len(thresholds)
    limits = np.array(thresholds, dtype=np.float32)
    stored = np.zeros((k, m), dtype=bool)
    source = np.tile(np.arange(m), (k, 1))
    nearest = np.full((k, m), np.nan, dtype=np.float32)
    served = np.full((k, m), COMPUTED, dtype="<U8")
    seen: dict[bytes, list[int]] = {}
    for begin, end in _groups(units.request):
        for i in range(begin, end):
            if not vectors[i].any():
                served[:, i] = BYPASSED
            elif begin and units.request[i] >= units.n_fit:
                _find_near(units, i, begin, stored, limits, source, nearest, served)
            if units.keys is not None:
                for earlier in seen.get(units.keys[i], []):  # of equal units, at most one is stored
                    source[stored[:, earlier], i], served[stored[:, earlier], i] = earlier, "exact"
        for i in range(begin, end):  # rows of one request do not see each other
            stored[:, i] = (source[:, i] == i) & (served[:, i] != BYPASSED)
            if units.keys is not None:
                seen.setdefault(units.keys[i], []).append(i)
    return [Replay(served[row], source[row], nearest[row]) for row in range(k)]


def _find_near(
    units: Units,
    i: int,
    begin: int,
    stored: NDArray[np.bool_],
    limits: Floats,
    source: NDArray[np.int64],
    nearest: Floats,
    served: NDArray[np.str_],
) -> None:
    """Fill in the nearest stored unit of unit `i` among those before `begin`, at each threshold."""
    usable = stored[:, :begin]
    if units.lengths is not None:
        usable = usable & (units.lengths[:begin] == units.lengths[i])
    similarity = np.where(usable, units.compare(units.vectors[:begin], units.vectors[i]), -np.inf)
    best = similarity.argmax(axis=1)
    found = similarity[np.arange(len(limits)), best]
    nearest[:, i] = np.where(np.isfinite(found), found, np.nan)
    is_near = found >= limits
    source[is_near, i], served[is_near, i] = best[is_near], "near"


def _groups(request: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Begin and end of each request's rows."""
    begins = np.flatnonzero(np.diff(request, prepend=-1)).tolist()
    return list(zip(begins, [*begins[1:], len(request)], strict=True))


def by_request(units: Units, replay: Replay) -> NDArray[np.str_]:
    """What served each request (N,): of its rows, the least exact."""
    rank = {BYPASSED: 0, COMPUTED: 1, "exact": 2, "near": 3}
    names = np.array(list(rank))
    values = np.array([rank[str(served)] for served in replay.served])
    begins = [begin for begin, _ in _groups(units.request)]
    found: NDArray[np.str_] = names[np.maximum.reduceat(values, begins)]
    return found


def make_fingerprint(options: Mapping[str, Any] | str) -> Fingerprint:
    """A fingerprint by name, or by name and settings."""
    settings = {"name": options} if isinstance(options, str) else dict(options)
    return FINGERPRINTS[settings.pop("name")](**settings)


def first_states(workload: Workload, trunk: Any, inputs: Inputs, wants_attention: bool) -> tuple[Any, Any]:
    """Hidden states (rows, T, D) that enter layer 0, and the output of its self-attention (rows, T, D) if wanted.

    Nothing above is computed.
    """
    captured: dict[str, Any] = {}

    def enter(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured["hidden"] = args[0] if args else kwargs["hidden_states"]
        if not wants_attention:
            raise _Captured

    def leave(attention: Any, args: tuple[Any, ...], output: Any) -> None:
        captured["attention"] = output[0] if isinstance(output, tuple) else output
        raise _Captured

    first = trunk.layers[0]
    handles = [first.register_forward_pre_hook(enter, with_kwargs=True)]
    if wants_attention:
        handles.append(first.get_submodule(trunk.adapter.attention).register_forward_hook(leave))
    try:
        workload.module(**inputs)
    except _Captured:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return captured["hidden"], captured.get("attention")


def share_equal(signatures: Floats, signature: Floats) -> Floats:
    """Share of places at which signatures (B, F) equal one (F,): the Jaccard similarity that MinHash estimates."""
    shares: Floats = (signatures == signature).mean(axis=1, dtype=np.float32)
    return shares


class _Captured(Exception):
    """Ends a forward once its first layer was reached."""


def _rows(inputs: Inputs) -> list[NDArray[np.int64]]:
    """Valid token ids of each row of a request."""
    ids = inputs["input_ids"].flatten(end_dim=-2)
    mask = inputs.get("attention_mask", torch.ones_like(ids)).reshape(ids.shape).bool()
    return [row[valid].numpy() for row, valid in zip(ids, mask, strict=True)]


def _nbytes(output: Any) -> int:
    tensors = [output] if isinstance(output, torch.Tensor) else output.values()
    return sum(int(tensor.nbytes) for tensor in tensors if isinstance(tensor, torch.Tensor))
