"""A fingerprint fitted to the wrapped model, so that similar requests are likely to have the same answer.

    token ids -> rows of token vectors -> pooled (means, and extremes along principal axes) -> linear map -> unit vector

The map is a ridge regression from pooled vectors of requests to the model's final states and logits, solved in closed
form; it needs no labels. A second map from the same vectors forecasts the model's output: roughly, but from the request
itself, not from its neighbours.
A token has two vectors: its input embedding, and a static vector, which is the model's final state for a request of
this token alone (as in Minishlab's model2vec). Static vectors are computed for the tokens of the fitted requests. For
other tokens a third ridge regression estimates them from input embeddings.
Extremes are taken along R principal axes of each kind of vector. Along all D, a request would read five times as many
weights, and find no more hits.

Sizes: N requests, n content tokens, D hidden width, R axes, P pooled width (2 D + 4 R), T target width, C outputs, F
dimensions.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from llmcache.support.arrays import Doubles, Floats, Ids, product
from llmcache.support.threads import forkable, limit_products

Lookup = Callable[[Ids], Floats]

_EXACT = 1e-6  # ridge penalty of the map to outputs: nearly none, since outputs are a function of the targets
_N_AXES = 64  # R at most


class LearnedFingerprint:
    """Pooled token vectors through a fitted linear map. Usable once a calibration has fitted it. Thread-safe."""

    def __init__(self, embed: Lookup, compute_static: Lookup, dim: int = 128, ridge: float = 1.0) -> None:
        """Set the size, and functions from m token ids to vectors (m, D).

        Args:
            embed: Input embeddings.
            compute_static: Final states of each token alone.
            dim: F, 2 to 384; at most the sum of hidden width and number of logits is used.
            ridge: Penalty on weights, over 0. A larger value fits less closely.
        """
        if not 2 <= dim <= 384 or not ridge > 0:
            raise ValueError(f"dim={dim}, ridge={ridge}: dim must be from 2 to 384, ridge over 0")
        self.dim, self.ridge = dim, ridge
        self._embed, self._compute_static = embed, compute_static
        self._fitted: _Fitted | None = None  # replaced as a whole: other threads may be reading it

    def fit(self, requests: Sequence[Sequence[int]], targets: Floats, outputs: Floats) -> None:
        """Fit the maps from content tokens of N requests to targets (N, T) and to the outputs (N, C) to forecast."""
        different = [np.unique(np.array(ids, np.int64)) for ids in requests]
        tokens, counts = np.unique(np.concatenate(different), return_counts=True)
        embedded, static = self._embed(tokens), self._compute_static(tokens)
        is_known = np.isfinite(static).all(axis=1)  # a token alone may overflow the dtype
        if not is_known.any():
            static, is_known = np.zeros_like(static), ~is_known
        known, aim = embedded[is_known], static[is_known]
        guess = _ridge(known, aim, self.ridge / (embedded.shape[1] * len(tokens) ** 0.5))
        static[~is_known] = product(embedded[~is_known] - known.mean(axis=0), guess) + aim.mean(axis=0)
        learned = {
            "tokens": tokens.astype(np.float32),
            "static": static,
            "idf": np.log((len(requests) + 1) / (counts + 1)).astype(np.float32) + 1,
            "rarest": np.array([np.log(len(requests) + 1) + 1], np.float32),
            "guess": guess,
            "guess_centre": known.mean(axis=0),
            "guess_mean": aim.mean(axis=0),
            "embedded_axes": _principal_axes(embedded, counts, _N_AXES),
            "static_axes": _principal_axes(static, counts, _N_AXES),
        }
        extremes, means = _Pool(learned, self._embed)(requests)
        kinds = [means[:, 0], *np.split(extremes, 4, axis=1), means[:, 1]]
        pooled, scale = np.concatenate(kinds, axis=1), _scale(kinds)
        aims = (targets - targets.mean(axis=0)) @ _principal_axes(targets, np.ones(len(targets)), self.dim)
        weights = _ridge(pooled * scale, aims, self.ridge / len(pooled))
        learned |= {"centre": pooled.mean(axis=0), "map": np.ascontiguousarray((scale[:, None] * weights).T)}
        learned |= {"outputs": _ridge(aims, outputs, _EXACT), "outputs_mean": outputs.mean(axis=0).astype(np.float32)}
        self._fitted = _Fitted(learned, self._embed)

    def project(self, requests: Sequence[Sequence[int]]) -> tuple[Floats, Floats]:
        """Return fingerprints (B, F) and forecasts of the model's output (B, C), from the content tokens of B requests.

        A fingerprint has L2 norm 1, or is zero for a request without content.
        """
        if self._fitted is None:
            raise RuntimeError("call fit() first")
        before = limit_products(1)  # they are small
        try:
            return self._fitted(requests)
        finally:
            limit_products(before)

    def state(self) -> dict[str, Floats]:
        return {} if self._fitted is None else dict(self._fitted.learned)

    def restore(self, state: Mapping[str, Floats]) -> None:
        self._fitted = _Fitted(dict(state), self._embed) if state else None


class _Fitted:
    """The fitted maps. The map of a mean of token vectors is the mean of mapped vectors, which are kept per token."""

    def __init__(self, learned: dict[str, Floats], embed: Lookup) -> None:
        """Prepare the arrays that `LearnedFingerprint.fit` made."""
        self.learned = learned
        weights = np.ascontiguousarray(learned["map"].T)
        width = len(learned["guess"])
        mean, extremes, weighted = np.split(weights, [width, len(weights) - width])
        self._pool = _Pool(learned, embed, (mean, weighted))
        # Stored with one dimension per row: one request then takes two thirds of the time.
        self._weights = torch.from_numpy(np.ascontiguousarray(extremes.T)).T
        self._offset = -(learned["centre"].astype(np.float64) @ weights).astype(np.float32)
        self._outputs = torch.from_numpy(learned["outputs"])
        self._outputs_mean = torch.from_numpy(learned["outputs_mean"])

    def __call__(self, requests: Sequence[Sequence[int]]) -> tuple[Floats, Floats]:
        """Return unit vectors (B, F) and forecasts (B, C); for a request without content, zeros and the mean output."""
        extremes, means = self._pool(requests)
        vectors = means[:, 0] + means[:, 1]
        vectors += self._offset
        forecasts = np.empty((len(vectors), len(self._outputs_mean)), np.float32)
        made = torch.from_numpy(vectors)
        # On torch's threads, see `product`; autocast does not lower the precision of operations with `out`.
        torch.addmm(made, torch.from_numpy(extremes), self._weights, out=made)
        for vector, tokens in zip(vectors, requests, strict=True):
            if not tokens:  # exact zeros: a rounding residue would be scaled to norm 1
                vector[:] = 0
        torch.addmm(self._outputs_mean, made, self._outputs, out=torch.from_numpy(forecasts))
        # As `normalise`, whose file a hit would not touch otherwise.
        norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
        return vectors / np.maximum(norms, np.float32(1e-12))[:, None], forecasts


class _Pool:
    """Pools the token vectors of a request. The table row of a token is computed at its first use. Thread-safe."""

    def __init__(self, learned: Mapping[str, Floats], embed: Lookup, maps: tuple[Floats, Floats] | None = None) -> None:
        """Start with an empty table.

        Args:
            learned: The arrays that `LearnedFingerprint.fit` made.
            embed: As for `LearnedFingerprint`.
            maps: Linear maps of the mean of embeddings and the weighted mean of static vectors, (D, A) each; None:
                identity, A = D.
        """
        self._learned, self._embed, self._maps = learned, embed, maps
        self._lock = forkable(threading.Lock())
        self._place: dict[int, int] = {}
        self._n_extremes = 2 * learned["static_axes"].shape[1]
        self._width = learned["static"].shape[1] if maps is None else maps[0].shape[1]
        self._table: Floats = np.empty((0, self._n_extremes + 2 * self._width + 1), np.float32)

    def __call__(self, requests: Sequence[Sequence[int]]) -> tuple[Floats, Floats]:
        """Pool the content tokens of B requests; zeros for a request without any.

        Returns:
            Maxima of embeddings and of static vectors, then minima of both (B, 4 R); and both mapped means (B, 2, A).
        """
        n, width = self._n_extremes, self._width
        extremes = np.zeros((len(requests), 2 * n), np.float32)
        means = np.zeros((len(requests), 2, width), np.float32)
        for extreme, mean, tokens in zip(extremes, means, requests, strict=True):
            if not tokens:
                continue
            with self._lock:
                try:
                    places = list(map(self._place.__getitem__, tokens))
                except KeyError:
                    self._add([token for token in dict.fromkeys(tokens) if token not in self._place])
                    places = list(map(self._place.__getitem__, tokens))
                # Per token: both vectors along their axes, mapped embedding, mapped weighted static vector, weight.
                rows = self._table.take(places, axis=0)
            np.maximum.reduce(rows[:, :n], out=extreme[:n])
            np.minimum.reduce(rows[:, :n], out=extreme[n:])
            sums = np.add.reduce(rows[:, n:])
            np.divide(sums[:width], len(tokens), out=mean[0])
            np.divide(sums[width:-1], sums[-1], out=mean[1])
        return extremes, means

    def _add(self, tokens: list[int]) -> None:
        rows = self._make(np.array(tokens, np.int64))
        first, end = len(self._place), len(self._place) + len(tokens)
        if end > len(self._table):
            table = np.empty((2 * first + len(tokens) + 256, self._table.shape[1]), np.float32)
            table[:first] = self._table[:first]
            self._table = table
        self._table[first:end] = rows
        self._place |= {token: first + i for i, token in enumerate(tokens)}

    def _make(self, ids: Ids) -> Floats:
        """Return table rows (m, 2 R + 2 A + 1) for m tokens."""
        learned, embedded = self._learned, self._embed(ids)
        static = _by_row(embedded - learned["guess_centre"], learned["guess"]) + learned["guess_mean"]
        weights = np.full((len(ids), 1), learned["rarest"][0], np.float32)
        place = np.searchsorted(learned["tokens"], ids).clip(max=len(learned["tokens"]) - 1)
        is_known = learned["tokens"][place] == ids
        static[is_known] = learned["static"][place[is_known]]
        weights[is_known, 0] = learned["idf"][place[is_known]]
        axes = [_by_row(embedded, learned["embedded_axes"]), _by_row(static, learned["static_axes"])]
        means = [embedded, weights * static]
        if self._maps is not None:
            means = list(map(_by_row, means, self._maps))
        return np.concatenate([*axes, *means, weights], axis=1).astype(np.float32, copy=False)


def _ridge(x: Floats, y: Floats, price: float) -> Floats:
    """Return weights (T, P) of a ridge regression of y (N, P) on x (N, T), both centred.

    `price` is the penalty relative to the total square of centred x.
    """
    from sklearn.linear_model import Ridge

    centred = (x - x.mean(axis=0)).astype(np.float64)
    fitted = Ridge(price * max(float((centred**2).sum()), 1e-12)).fit(centred, y.astype(np.float64))
    weights: Floats = np.atleast_2d(fitted.coef_).T.astype(np.float32)  # of one target, the coefficients are 1-D
    return weights


def _by_row(x: Floats, weights: Floats) -> Floats:
    """Return rows (m, D) times weights, row by row: bit-identical whatever the other rows are."""
    return np.concatenate([product(row[None], weights) for row in x])


def _scale(kinds: Sequence[Floats]) -> Floats:
    """Return factors (P,) that scale each pooled number to a spread of about 1 / sqrt(P)."""
    spreads = [kind.std(axis=0) for kind in kinds]
    steady = np.concatenate([spread + 0.01 * spread.mean() + 1e-6 for spread in spreads])
    scale: Floats = (1 / steady / np.sqrt(len(steady))).astype(np.float32)
    return scale


def _principal_axes(vectors: Floats, counts: Ids | Doubles, n: int) -> Floats:
    """Return the first principal axes (D, n) of vectors (m, D), of which each counts as many times as `counts` says."""
    shares = (counts / counts.sum())[:, None]
    centred = np.sqrt(shares) * (vectors - (shares * vectors).sum(axis=0))
    _, _, axes = np.linalg.svd(centred.astype(np.float32), full_matrices=False)
    return np.ascontiguousarray(axes[:n].T)
