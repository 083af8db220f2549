"""PCA of payload rows: the directions in which they vary most."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from llmcache.banks.compression.fitted import FittedCodec


class PCA(FittedCodec):
    """`pca`: float16 coefficients on the first `dim` principal axes of centred rows.

    No linear map to as few numbers has a smaller squared error on the rows it was fitted on.
    """

    SHAPES: ClassVar[Mapping[str, str]] = {"centre": "D", "axes": "DK"}

    def _learn(self, rows: Tensor) -> dict[str, Tensor]:
        centre = rows.mean(dim=0)
        axes = torch.linalg.svd(rows - centre, full_matrices=False).Vh[: self.dim].T
        return {"centre": centre, "axes": axes.contiguous()}

    def _compress(self, rows: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        return (rows - learned["centre"]) @ learned["axes"]

    def _expand(self, code: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        return learned["centre"] + code @ learned["axes"].T
