"""Sentence embeddings: a workload whose answers are vectors, and how well these find what belongs together.

Sizes: N requests, D width, M texts of the corpus.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.models.heads import PooledClassifier
from experiments.models.loading import Loaded, encode
from experiments.support.nearest import unit
from experiments.tasks.plain import Plain
from experiments.tasks.workload import Request
from llmcache.lab import Floats

ALIKE = 0.98  # cosine under which the library calls an embedding another answer
DEPTH = 10  # texts that are looked at
_GAINS = 1 / np.log2(np.arange(2, DEPTH + 2))  # of a relevant text by its rank (Jaervelin and Kekaelaeinen 2002)


class Embedding(Plain):
    """Texts, and a model that answers each with the mean of its last states.

    So does sentence-transformers with all-MiniLM; that it scales the vector to length 1 as well, no cosine shows.
    """

    payload = "mean"

    def __init__(self, loaded: Loaded, texts: Sequence[str], references: Sequence[Any], max_length: int) -> None:
        """Tokenise texts, N, in the order in which they are asked; references are what scores look at."""
        self.module = PooledClassifier(loaded.model, "mean").eval()
        self.tokenizer = loaded.tokenizer
        self.requests = [
            Request(str(i), encode(loaded.tokenizer, text, max_length), text, reference)
            for i, (text, reference) in enumerate(zip(texts, references, strict=True))
        ]
        self.facts: dict[str, Any] = {"n_distinct": len(set(texts))}

    def answer(self, output: Tensor, number: int) -> Floats:
        """The embedding, float32 (D,), of length 1."""
        return unit(output[0].float().numpy())

    def is_changed(self, one: Floats, other: Floats) -> bool:
        """Whether their cosine is under 0.98."""
        return bool(one @ other < ALIKE)

    def show(self, answer: Floats) -> str:
        return " ".join(f"{value:.4f}" for value in answer[:4])


class Retrieval(Embedding):
    """Embeddings that search a corpus for texts with the same label as the request."""

    metric = "ndcg_at_10"

    def __init__(
        self,
        loaded: Loaded,
        texts: Sequence[str],
        labels: Sequence[str],
        corpus: Floats,
        corpus_labels: Sequence[str],
        max_length: int,
    ) -> None:
        """Tokenise queries, N, and take what they search: embeddings of any norm (M, D), and their labels."""
        super().__init__(loaded, texts, labels, max_length)
        self._corpus = corpus / np.linalg.norm(corpus, axis=1, keepdims=True)
        self._labels = np.array(corpus_labels)
        self.facts |= {"n_corpus": len(corpus), "n_labels": len(set(labels))}

    def scores(self, answers: Sequence[Floats]) -> NDArray[np.float64]:
        """The nDCG at 10 of each request's search (N,), the best order of the corpus being 1."""
        found = self._found(answers)
        wanted = np.array([(self._labels == request.reference).sum() for request in self.requests])
        best = np.array([_GAINS[:n].sum() for n in wanted])
        scores: NDArray[np.float64] = (found * _GAINS).sum(axis=1) / np.maximum(best, _GAINS[0])
        return scores

    def extras(self, answers: Sequence[Floats]) -> dict[str, float | None]:
        """`recall_at_1` and `recall_at_5`: shares of requests that find one of their label among the first."""
        found = self._found(answers)
        return {f"recall_at_{k}": float(found[:, :k].any(axis=1).mean()) for k in (1, 5)}

    def _found(self, answers: Sequence[Floats]) -> NDArray[np.bool_]:
        """Which of the nearest texts have the request's label (N, 10), nearest first."""
        with torch.inference_mode():
            near = torch.from_numpy(np.stack(answers)) @ torch.from_numpy(self._corpus).T
            best = near.topk(min(DEPTH, len(self._corpus)), dim=1).indices.numpy()
        wanted = np.array([request.reference for request in self.requests])
        same: NDArray[np.bool_] = np.zeros((len(wanted), DEPTH), dtype=bool)
        same[:, : best.shape[1]] = self._labels[best] == wanted[:, None]
        return same
