"""Autoencoder of payload rows: a bottleneck that is trained on the first ones."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from llmcache.banks.compression.fitted import FittedCodec

LEARNING_RATE = 1e-2  # 200 steps at Adam's usual 1e-3 end long before the loss does
LEAST_SCALE = 0.01  # of the mean deviation: a dimension that hardly varied in the sample must not swamp the rest later


class Autoencoder(FittedCodec):
    """`autoencoder`: one hidden layer of `dim` tanh units between standardised rows, trained to give its input back.

    Adam on all rows at once, `epochs` steps: some 2 s for 512 rows of 768 on one core. Seeded: the same rows give the
    same codec. PCA of the same `dim` may well lose less: compare `Stats.reconstruction_error` before choosing.
    """

    SHAPES: ClassVar[Mapping[str, str]] = {
        "mean": "D",
        "scale": "D",
        "into": "DK",
        "into_bias": "K",
        "out": "KD",
        "out_bias": "D",
    }

    def __init__(self, dim: int = 64, fit_on: int = 512, epochs: int = 200, seed: int = 0) -> None:
        super().__init__(dim, fit_on)
        if epochs < 1:
            raise ValueError(f"epochs={epochs}: give at least 1")
        self._epochs = epochs
        self._seed = seed

    def _learn(self, rows: Tensor) -> dict[str, Tensor]:
        mean, deviation = rows.mean(dim=0), rows.std(dim=0)
        scale = deviation.clamp(min=LEAST_SCALE * float(deviation.mean()))
        scale = torch.where(scale > 0, scale, 1.0)  # rows that are all the same
        weights = self._first_weights(rows.shape[1], rows.device)
        standard = (rows - mean) / scale
        with torch.enable_grad():
            optimizer = torch.optim.Adam(weights.values(), lr=LEARNING_RATE)
            for _ in range(self._epochs):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(_decoded(_encoded(standard, weights), weights), standard)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return {"mean": mean, "scale": scale, **{name: x.detach() for name, x in weights.items()}}

    def _first_weights(self, width: int, device: torch.device) -> dict[str, Tensor]:
        """Random, and scaled so that codes and output begin with a variance of about 1."""
        generator = torch.Generator().manual_seed(self._seed)
        dim = min(self.dim, width)
        weights = {
            "into": torch.randn(width, dim, generator=generator, dtype=torch.float32, device="cpu") / width**0.5,
            "into_bias": torch.zeros(dim, dtype=torch.float32, device="cpu"),
            "out": torch.randn(dim, width, generator=generator, dtype=torch.float32, device="cpu") / dim**0.5,
            "out_bias": torch.zeros(width, dtype=torch.float32, device="cpu"),
        }
        return {name: x.to(device).requires_grad_() for name, x in weights.items()}

    def _compress(self, rows: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        return _encoded((rows - learned["mean"]) / learned["scale"], learned)

    def _expand(self, code: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        return _decoded(code, learned) * learned["scale"] + learned["mean"]


def _encoded(standard: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    return torch.tanh(standard @ weights["into"] + weights["into_bias"])


def _decoded(code: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    return code @ weights["out"] + weights["out_bias"]
