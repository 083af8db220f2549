"""A scikit-learn transformer that turns texts into embeddings, and computes each text once.

Needs `sentence-transformers`.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin

from llmcache.cache import LLMCache
from llmcache.errors import ConfigError, RequestError

_loading = threading.Lock()


class Embedder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Embeds texts by a sentence-transformers model behind a cache; for the first step of a pipeline.

    Clones share the model and its cache, so a cross-validation or a grid search computes each text once. Another
    process (`n_jobs`) loads the model again, so give its name or folder there. Processes share the vectors with
    `settings={"store": {"name": "disk", "folder": ...}}`.
    """

    def __init__(
        self,
        model: Any = "sentence-transformers/all-MiniLM-L6-v2",
        *,
        normalize: bool = False,
        batch_size: int = 32,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Set the parameters; the model is loaded by the first `transform`.

        Args:
            model: A name on the hub, a folder, a `SentenceTransformer`, or an `LLMCache` around one.
            normalize: Scale each vector to length 1.
            batch_size: Texts computed at once.
            settings: Of the cache, as `LLMCache.wrap` takes them; unused if `model` is an `LLMCache`.
        """
        self.model, self.normalize, self.batch_size, self.settings = model, normalize, batch_size, settings
        self._caches: dict[tuple[object, str], LLMCache] = {}  # by model and settings; shared with clones

    @property
    def cache(self) -> LLMCache:
        """The cache around the model, which is loaded if needed."""
        if isinstance(self.model, LLMCache):
            return self.model
        named = self.model if isinstance(self.model, str | Path) else id(self.model)
        key = named, repr(self.settings)
        with _loading:
            if key not in self._caches:
                from sentence_transformers import SentenceTransformer

                model = SentenceTransformer(str(named)) if isinstance(named, str | Path) else self.model
                self._caches[key] = LLMCache.wrap(model, **dict(self.settings or {}))
            return self._caches[key]

    def fit(self, X: Sequence[str], y: object = None) -> Self:
        """Return itself: there is nothing to learn."""
        return self

    def transform(self, X: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings (N, D) of N texts.

        Raises:
            RequestError: `X` is not a list, array or series of texts.
        """
        is_list = not isinstance(X, str | Mapping) and getattr(X, "ndim", 1) == 1  # a table iterates over its columns
        if not (is_list and all(isinstance(one, str) for one in X)):
            raise RequestError("Embedder.transform: give a list, array or series of texts")
        texts = list(X)
        model: Any = self.cache.model
        if not texts:
            return np.empty((0, model.get_embedding_dimension()), np.float32)
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        made: NDArray[np.float32] = model.encode(
            [*places], batch_size=self.batch_size, normalize_embeddings=self.normalize, show_progress_bar=False
        )
        return made[[places[text] for text in texts]]

    def __sklearn_clone__(self) -> Self:
        """Return a copy that shares the caches."""
        made = type(self)(**self.get_params(deep=False))
        made._caches = self._caches
        return made

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Leave the caches out: another process makes its own."""
        if isinstance(self.model, LLMCache):
            raise ConfigError("Embedder: a cache stays in its process; give the model's name or folder instead")
        return {**super().__getstate__(), "_caches": {}}
