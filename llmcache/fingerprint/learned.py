"""A fingerprint that is learned from the wrapped model itself, so that similarity tells whether its answers are alike.

    token ids -> rows of token vectors -> pooled -> scaled -> one linear map -> unit vector

The map is a ridge regression from the pooled vectors of requests to what the model made of them (its final states and
its logits), so nobody has to label anything; it is solved in closed form. Before it is scaled to unit length, the
vector forecasts the model's output as well: roughly, but from the request itself, where neighbours only tell of others.
A token has two vectors: its input embedding, and a static one, which is the model's final state for a request of this
token alone (Minishlab's model2vec pools such vectors). The latter are computed for tokens of the requests that are
learned from, and estimated for others by a second ridge regression, from their input embeddings.

Sizes: N requests, n content tokens, D hidden width, P pooled width (6 D), T target width, C outputs, F dimensions.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from llmcache.arrays import Floats, Ids, product
from llmcache.fingerprint.base import Fingerprint, View
from llmcache.fingerprint.mean import normalise

Lookup = Callable[[Ids], Floats]

_EXACT = 1e-6  # price of weights where there is nothing to guard against: outputs are made of what is aimed at
_N_POOLED = 6  # mean of input embeddings, max of these and of static ones, min likewise, weighted mean of static ones


class Learned(Fingerprint):
    """Pooled token vectors through a fitted linear map. Ready once it was fitted, by a calibration. Thread-safe."""

    reads_states = False

    def __init__(self, dim: int = 128, ridge: float = 1.0) -> None:
        """Choose the size.

        Args:
            dim: F, 2 to 384; at most the hidden width and the number of logits together are used.
            ridge: How much larger weights cost, over 0. More fits less closely.
        """
        if not 2 <= dim <= 384 or not ridge > 0:
            raise ValueError(f"dim={dim}, ridge={ridge}: dim must be from 2 to 384, ridge over 0")
        self.dim = dim
        self.ridge = ridge
        self._embed: Lookup | None = None
        self._think: Lookup | None = None
        self._fitted: tuple[_Pool, dict[str, Floats]] | None = None  # replaced as a whole: others may be reading it

    def bind(self, embed: Lookup, think: Lookup) -> None:
        """Say where vectors of tokens (m, D) come from: input embeddings, and final states of each token alone."""
        self._embed, self._think = embed, think

    @property
    def n_fit(self) -> int:
        """0 once it is fitted, else 1: how many it takes, its teacher decides."""
        return 1 if self._fitted is None else 0

    def features(self, view: View) -> Tensor:
        return view.content_ids

    def fit(self, features: Sequence[Floats], targets: Floats | None = None, outputs: Floats | None = None) -> None:
        """Learn from requests (T,) what fingerprints are to resemble (N, T), and what is to be forecast (N, C)."""
        assert targets is not None and outputs is not None and self._think is not None and self._embed is not None
        requests = [_content(row) for row in features]
        tokens, counts = np.unique(np.concatenate([np.unique(ids) for ids in requests]), return_counts=True)
        embedded, static = self._embed(tokens), self._think(tokens)
        is_known = np.isfinite(static).all(axis=1)  # a token alone may be more than the dtype holds
        if not is_known.any():
            static, is_known = np.zeros_like(static), ~is_known
        guess = _Ridge(embedded[is_known], static[is_known], self.ridge / (embedded.shape[1] * len(tokens) ** 0.5))
        static[~is_known] = guess(embedded[~is_known])
        learned = {
            "tokens": tokens.astype(np.float32),
            "static": static,
            "idf": np.log((len(requests) + 1) / (counts + 1)).astype(np.float32) + 1,
            "rarest": np.array([np.log(len(requests) + 1) + 1], np.float32),
            "guess": guess.weights,
            "guess_centre": guess.centre,
            "guess_mean": guess.mean,
        }
        pool = _Pool(learned, self._embed)
        pooled = np.stack([pool(ids) for ids in requests])
        scale = _scale(pooled)
        aims = (targets - targets.mean(axis=0)) @ _axes(targets, self.dim)
        fitted = _Ridge(pooled * scale, aims, self.ridge / len(pooled))
        learned |= {"centre": pooled.mean(axis=0), "map": np.ascontiguousarray((scale[:, None] * fitted.weights).T)}
        told = _Ridge(aims, outputs, _EXACT)
        learned |= {"outputs": told.weights, "outputs_mean": told.mean.astype(np.float32)}
        self._fitted = pool, learned

    def project(self, features: Floats) -> Floats:
        """Fingerprints (B, F), L2 norm 1, from features (B, T); of a row without content, zeros."""
        return self.project_with_forecast(features)[0]

    def project_with_forecast(self, features: Floats) -> tuple[Floats, Floats]:
        if self._fitted is None:
            raise RuntimeError("fit() comes first")
        pool, learned = self._fitted
        contents = [_content(row) for row in features]
        pooled = np.stack([pool(ids) if len(ids) else learned["centre"] for ids in contents])
        projected = product(pooled - learned["centre"], learned["map"].T)
        forecasts: Floats = product(projected, learned["outputs"]) + learned["outputs_mean"]
        return normalise(projected), forecasts

    def state(self) -> dict[str, Floats]:
        return {} if self._fitted is None else dict(self._fitted[1])

    def restore(self, state: Mapping[str, Floats]) -> None:
        assert self._embed is not None
        self._fitted = (_Pool(state, self._embed), dict(state)) if state else None


class _Pool:
    """Makes one vector of a request's tokens. Vectors of tokens that were met are kept. Thread-safe."""

    def __init__(self, learned: Mapping[str, Floats], embed: Lookup) -> None:
        """Begin with no token met; `learned` is of `Learned.fit`, `embed` of `Learned.bind`."""
        self._learned = learned
        self._embed = embed
        self._lock = threading.Lock()
        self._place: dict[int, int] = {}
        self._table: Floats = np.empty((0, 0), np.float32)
        self._weights: Floats = np.empty(0, np.float32)

    def __call__(self, ids: Ids) -> Floats:
        """Pooled vector (P,) of tokens (n,), at least one."""
        rows, weights = self._look_up(ids)
        half = rows.shape[1] // 2
        shares = np.full((2, len(rows)), 1 / len(rows), np.float32)
        np.divide(weights, weights.sum(), out=shares[1])
        means = product(shares, rows)
        kinds = means[0, :half], np.maximum.reduce(rows), np.minimum.reduce(rows), means[1, half:]
        return np.concatenate(kinds)

    def _look_up(self, ids: Ids) -> tuple[Floats, Floats]:
        """Vectors of tokens (n, 2 D) and their weights (n,), those of new tokens made first."""
        names = ids.tolist()
        with self._lock:
            try:
                places = [self._place[name] for name in names]
            except KeyError:
                self._add([name for name in dict.fromkeys(names) if name not in self._place])
                places = [self._place[name] for name in names]
            return self._table.take(places, axis=0), self._weights.take(places)

    def _add(self, names: list[int]) -> None:
        rows, weights = self._make(np.array(names, np.int64))
        first, end = len(self._place), len(self._place) + len(names)
        if end > len(self._table):
            table, held = np.empty((2 * first + len(names) + 256, rows.shape[1]), np.float32), self._weights
            table[:first] = self._table[:first] if first else 0
            self._table, self._weights = table, np.empty(len(table), np.float32)
            self._weights[:first] = held[:first]
        self._table[first:end], self._weights[first:end] = rows, weights
        self._place |= {name: first + i for i, name in enumerate(names)}

    def _make(self, ids: Ids) -> tuple[Floats, Floats]:
        """Input embedding and static vector of tokens (m, 2 D), and their weights (m,)."""
        learned, embedded = self._learned, self._embed(ids)
        static = product(embedded - learned["guess_centre"], learned["guess"]) + learned["guess_mean"]
        weights = np.full(len(ids), learned["rarest"][0], np.float32)
        place = np.searchsorted(learned["tokens"], ids).clip(max=len(learned["tokens"]) - 1)
        is_known = learned["tokens"][place] == ids
        static[is_known] = learned["static"][place[is_known]]
        weights[is_known] = learned["idf"][place[is_known]]
        return np.concatenate([embedded, static], axis=1).astype(np.float32, copy=False), weights


class _Ridge:
    """Least squares with a price on large weights, in whichever of two forms is smaller."""

    def __init__(self, x: Floats, y: Floats, price: float) -> None:
        """Fit rows (N, T) to rows (N, P); inputs are taken to their mean, and to a mean square of 1 a row."""
        self.centre, self.mean = x.mean(axis=0), y.mean(axis=0)
        a = (x - self.centre).astype(np.float64)
        b = (y - self.mean).astype(np.float64)
        least = price * max(float((a**2).sum()), 1e-12)
        if a.shape[1] <= len(a):
            weights = np.linalg.solve(a.T @ a + least * np.eye(a.shape[1]), a.T @ b)
        else:
            weights = a.T @ np.linalg.solve(a @ a.T + least * np.eye(len(a)), b)
        self.weights: Floats = weights.astype(np.float32)

    def __call__(self, x: Floats) -> Floats:
        """What rows (m, T) are expected to come to (m, P)."""
        expected: Floats = product(x - self.centre, self.weights) + self.mean
        return expected


def _content(features: Floats) -> Ids:
    ids: Ids = features[features >= 0].astype(np.int64)
    return ids


def _scale(pooled: Floats) -> Floats:
    """By what each pooled number is multiplied (P,): each to spread 1, and each kind of pooling to the same share."""
    spread = pooled.std(axis=0)
    kinds = np.split(spread, _N_POOLED)
    steady = np.concatenate([kind + 0.01 * kind.mean() + 1e-6 for kind in kinds])
    scale: Floats = (1 / steady / np.sqrt(len(spread))).astype(np.float32)
    return scale


def _axes(targets: Floats, dim: int) -> Floats:
    """Directions (T, F) in which targets differ most."""
    _, _, axes = np.linalg.svd((targets - targets.mean(axis=0)).astype(np.float32), full_matrices=False)
    chosen: Floats = np.ascontiguousarray(axes[:dim].T)
    return chosen
