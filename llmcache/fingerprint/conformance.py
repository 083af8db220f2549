"""What every fingerprint has to do, as a check for classes from outside the library and for its own.

Sizes: B rows, T tokens, F0 features, F fingerprint width, C outputs.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from llmcache.fingerprint.base import Fingerprint, View
from llmcache.registry import rule


def check_fingerprint(make: Callable[[], Fingerprint], has_unit_norm: bool = True, seed: int = 0) -> None:
    """Fit it if it learns, project random calls of 16 dimensions, and take up its state in a second one.

    Args:
        make: Makes one, ready but for `fit`.
        has_unit_norm: Vectors are of L2 norm 1, as every index but `lsh` expects; a row may also be zero.
        seed: Of what is drawn.
    """
    fingerprint, generator = make(), torch.Generator().manual_seed(seed)
    if fingerprint.n_fit:
        n = max(64, fingerprint.n_fit)
        states = torch.randn(n, 12, 16, generator=generator)
        shown = fingerprint.features(_view(fingerprint, states, generator)).numpy()
        fingerprint.fit([*shown], states.mean(dim=1).numpy(), states[:, 0, :3].numpy())
        rule(fingerprint.n_fit == 0, "n_fit: 0 once it was fitted")
    view = _view(fingerprint, torch.randn(6, 12, 16, generator=generator), generator)
    features = fingerprint.features(view)
    rule(features.dtype == torch.float32 and features.shape[:1] == (6,), "features: float32 (B, F0)")
    rule(features.ndim == 2 and features.device == view.ids.device, "features: (B, F0) on the view's device")
    alone = torch.cat([fingerprint.features(_rows(view, slice(i, i + 1))) for i in range(6)])
    rule(torch.allclose(features, alone, atol=1e-5), "features: of each row by itself, whatever is beside it")
    given = features.numpy().copy()
    vectors = fingerprint.project(given)
    rule(np.array_equal(given, features.numpy()), "project: the features are not modified")
    rule(vectors.dtype == np.float32 and vectors.ndim == 2 and len(vectors) == 6, "project: float32 (B, F)")
    rule(bool(np.isfinite(vectors).all()), "project: finite")
    single = np.concatenate([fingerprint.project(given[i : i + 1]) for i in range(6)])
    rule(np.allclose(vectors, single, atol=1e-5), "project: of each row by itself, the same each time")
    norms = np.linalg.norm(vectors, axis=1)
    rule(not has_unit_norm or bool(np.isclose(norms, 1, atol=1e-4)[norms > 0].all()), "project: L2 norm 1")
    same, forecast = fingerprint.project_with_forecast(given)
    rule(np.allclose(same, vectors, atol=1e-6), "project_with_forecast: the vectors of project")
    rule(forecast is None or (forecast.ndim == 2 and len(forecast) == 6), "project_with_forecast: (B, C), or None")
    other = make()
    other.restore(fingerprint.state())
    is_same = other.n_fit == 0 and np.allclose(other.project(given), vectors, atol=1e-6)
    rule(is_same, "restore: projects as the one whose state it takes up")


def _view(fingerprint: Fingerprint, states: Tensor, generator: torch.Generator) -> View:
    """What it may read of a call with these states (B, T, D), of 2 to T content tokens a row."""
    n_rows, n_tokens, _ = states.shape
    lengths = torch.randint(2, n_tokens + 1, (n_rows, 1), generator=generator)
    content, ids = torch.arange(n_tokens) < lengths, torch.randint(5, 96, (n_rows, n_tokens), generator=generator)
    attention = states.flip(-1) if fingerprint.reads_attention else None
    return View(states if fingerprint.reads_states else None, content, ids, attention)


def _rows(view: View, rows: slice) -> View:
    parts = {name: getattr(view, name) for name in ("states", "content", "ids", "attention")}
    return replace(view, **{name: x[rows] for name, x in parts.items() if x is not None})
