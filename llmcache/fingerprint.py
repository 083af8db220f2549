"""A fingerprint fitted to the wrapped model itself, so that similar requests are likely to have the same answer.

    token ids -> rows of token vectors -> pooled -> scaled -> one linear map -> unit vector

The map is a ridge regression from pooled vectors of requests to the model's final states and logits, so no labels are
needed; it is solved in closed form. A second map from the same vectors forecasts the model's output: roughly, but from
the request itself, not from its neighbours.
A token has two vectors: its input embedding, and a static one, which is the model's final state for a request of this
token alone (as in Minishlab's model2vec). Static vectors are computed for tokens of the requests that are learned from,
and estimated for other tokens by another ridge regression, from their input embeddings.

Sizes: N requests, n content tokens, D hidden width, P pooled width (6 D), T target width, C outputs, F dimensions.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from llmcache.arrays import Floats, Ids, product
from llmcache.threads import forkable

Lookup = Callable[[Ids], Floats]

_EXACT = 1e-6  # price of weights where there is nothing to guard against: outputs are made of what is aimed at
_N_POOLED = 6  # mean of input embeddings, max of these and of static ones, min likewise, weighted mean of static ones


class Learned:
    """Pooled token vectors through a fitted linear map. Ready once it was fitted, by a calibration. Thread-safe."""

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
        self._fitted: _Fitted | None = None  # replaced as a whole: others may be reading it

    def bind(self, embed: Lookup, think: Lookup) -> None:
        """Set what makes vectors (m, D) of m tokens: input embeddings, and final states of each token alone."""
        self._embed, self._think = embed, think

    def fit(self, features: Sequence[Floats], targets: Floats, outputs: Floats) -> None:
        """Fit the maps from content tokens of N requests to targets (N, T), and to outputs (N, C) to forecast."""
        assert self._think is not None and self._embed is not None
        requests = [_content(row) for row in features]
        tokens, counts = np.unique(np.concatenate([np.unique(ids) for ids in requests]), return_counts=True)
        tokens = tokens.astype(np.int64)
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
        pooled = pool(requests)[:, pool.order]
        scale = _scale(pooled)
        aims = (targets - targets.mean(axis=0)) @ _axes(targets, self.dim)
        fitted = _Ridge(pooled * scale, aims, self.ridge / len(pooled))
        learned |= {"centre": pooled.mean(axis=0), "map": np.ascontiguousarray((scale[:, None] * fitted.weights).T)}
        told = _Ridge(aims, outputs, _EXACT)
        learned |= {"outputs": told.weights, "outputs_mean": told.mean.astype(np.float32)}
        self._fitted = _Fitted(learned, pool)

    def project(self, features: Floats) -> Floats:
        """Fingerprints (B, F), L2 norm 1, from features (B, T); of a row without content, zeros."""
        return self.project_with_forecast(features)[0]

    def project_with_forecast(self, features: Floats) -> tuple[Floats, Floats]:
        """Fingerprints (B, F) as of `project`, and forecasts of the model's output (B, C)."""
        return self.project_tokens([_content(row) for row in features])

    def project_tokens(self, requests: Sequence[Sequence[float]]) -> tuple[Floats, Floats]:
        """The same, from the content tokens of B requests."""
        if self._fitted is None:
            raise RuntimeError("fit() comes first")
        return self._fitted(requests)

    def state(self) -> dict[str, Floats]:
        return {} if self._fitted is None else dict(self._fitted.learned)

    def restore(self, state: Mapping[str, Floats]) -> None:
        assert self._embed is not None
        self._fitted = _Fitted(dict(state), _Pool(state, self._embed)) if state else None


class _Fitted:
    """The fitted maps, side by side in one matrix: fingerprints first, then forecasts."""

    def __init__(self, learned: dict[str, Floats], pool: "_Pool") -> None:
        """Join the maps that `Learned.fit` made; `pool` makes pooled vectors of requests."""
        self.learned = learned
        self._pool = pool
        vectors, self._dim = learned["map"].T.astype(np.float64), len(learned["map"])
        both = np.concatenate([vectors, vectors @ learned["outputs"]], axis=1)
        offset = -learned["centre"] @ both
        offset[self._dim :] += learned["outputs_mean"]
        in_its_order = np.empty_like(both, np.float32)
        in_its_order[pool.order] = both
        self._weights, self._offset = torch.from_numpy(in_its_order), torch.from_numpy(offset.astype(np.float32))
        self._width = len(offset)

    def __call__(self, requests: Sequence[Sequence[float]]) -> tuple[Floats, Floats]:
        """Return unit vectors (B, F) and forecasts (B, C); without content tokens, zeros and the mean output."""
        pooled = self._pool(requests)
        made = np.empty((len(pooled), self._width), np.float32)
        # On the threads of torch, see `product`.
        torch.addmm(self._offset, torch.from_numpy(pooled), self._weights, out=torch.from_numpy(made))
        for number, tokens in enumerate(requests):
            if not tokens:  # exactly so: what is left by rounding would become a vector of norm 1
                made[number, : self._dim], made[number, self._dim :] = 0, self.learned["outputs_mean"]
        vectors = made[:, : self._dim]
        norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
        return vectors / np.maximum(norms, np.float32(1e-12))[:, None], made[:, self._dim :]


class _Pool:
    """Pools the token vectors of a request. Vectors of tokens that were seen are kept. Thread-safe."""

    def __init__(self, learned: Mapping[str, Floats], embed: Lookup) -> None:
        """Begin with an empty table; `learned` is made by `Learned.fit`, `embed` is as of `Learned.bind`."""
        self._learned = learned
        self._embed = embed
        self._lock = forkable(threading.Lock())
        self._place: dict[float, int] = {}
        self._width = width = learned["static"].shape[1]
        self._table: Floats = np.empty((0, 3 * width + 1), np.float32)
        #: Where each pooled number is in what is made here: maxima of static vectors come before those of embeddings.
        kinds = np.arange(_N_POOLED * width).reshape(_N_POOLED, width)
        self.order = kinds[[4, 1, 0, 3, 2, 5]].ravel()

    def __call__(self, requests: Sequence[Sequence[float]]) -> Floats:
        """Return pooled vectors (B, P) of requests, zeros where there are no tokens; columns as `order` says."""
        width = self._width
        pooled = np.zeros((len(requests), _N_POOLED * width), np.float32)
        for into, tokens in zip(pooled, requests, strict=True):
            if not tokens:
                continue
            with self._lock:
                try:
                    places = list(map(self._place.__getitem__, tokens))
                except KeyError:
                    self._add([token for token in dict.fromkeys(tokens) if token not in self._place])
                    places = list(map(self._place.__getitem__, tokens))
                # Of each token (n, 3 D + 1): static vector, embedding, static vector by weight, weight.
                rows = self._table.take(places, axis=0)
            sums = np.add.reduce(rows[:, width:])
            np.maximum.reduce(rows[:, : 2 * width], out=into[: 2 * width])
            np.minimum.reduce(rows[:, : 2 * width], out=into[2 * width : 4 * width])
            np.divide(sums[:width], len(tokens), out=into[4 * width : 5 * width])
            np.divide(sums[width:-1], sums[-1], out=into[5 * width :])
        return pooled

    def _add(self, tokens: list[float]) -> None:
        rows = self._make(np.array(tokens, np.int64))
        first, end = len(self._place), len(self._place) + len(tokens)
        if end > len(self._table):
            table = np.empty((2 * first + len(tokens) + 256, self._table.shape[1]), np.float32)
            table[:first] = self._table[:first]
            self._table = table
        self._table[first:end] = rows
        self._place |= {token: first + i for i, token in enumerate(tokens)}

    def _make(self, ids: Ids) -> Floats:
        """Make rows of the table for tokens (m, 3 D + 1)."""
        learned, embedded = self._learned, self._embed(ids)
        static = product(embedded - learned["guess_centre"], learned["guess"]) + learned["guess_mean"]
        weights = np.full((len(ids), 1), learned["rarest"][0], np.float32)
        place = np.searchsorted(learned["tokens"], ids).clip(max=len(learned["tokens"]) - 1)
        is_known = learned["tokens"][place] == ids
        static[is_known] = learned["static"][place[is_known]]
        weights[is_known, 0] = learned["idf"][place[is_known]]
        return np.concatenate([static, embedded, weights * static, weights], axis=1).astype(np.float32, copy=False)


class _Ridge:
    """Ridge regression, solved in the primal or the dual form, whichever is smaller."""

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
        """Return predictions (m, P) for rows (m, T)."""
        expected: Floats = product(x - self.centre, self.weights) + self.mean
        return expected


def _content(features: Floats) -> list[float]:
    # Requests are short: to mask and to convert an array takes longer. Whole floats are found as the numbers they are.
    return [one for one in features.tolist() if one >= 0]


def _scale(pooled: Floats) -> Floats:
    """Return factors (P,) for pooled numbers: each gets a spread of 1, and each kind of pooling the same weight."""
    spread = pooled.std(axis=0)
    kinds = np.split(spread, _N_POOLED)
    steady = np.concatenate([kind + 0.01 * kind.mean() + 1e-6 for kind in kinds])
    scale: Floats = (1 / steady / np.sqrt(len(spread))).astype(np.float32)
    return scale


def _axes(targets: Floats, dim: int) -> Floats:
    """Return the directions (T, F) in which targets vary most."""
    _, _, axes = np.linalg.svd((targets - targets.mean(axis=0)).astype(np.float32), full_matrices=False)
    chosen: Floats = np.ascontiguousarray(axes[:dim].T)
    return chosen
