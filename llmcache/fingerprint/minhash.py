"""MinHash of token shingles: how many word pairs two requests share (Broder 1997, sections 2 and 3).

Sizes: B rows, T tokens, F hashes.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from llmcache.arrays import Floats
from llmcache.fingerprint.base import Fingerprint, View

# The lowest 24 bits of a hash are a float32 exactly, and equal for different shingles once in 16 million.
_KEPT_BITS = np.uint32(2**24 - 1)


class ShingleMinHash(Fingerprint):
    """Signatures whose share of equal entries estimates the Jaccard similarity of two sets of shingles.

    A shingle is `width` content tokens in a row; a request shorter than that has one, of all its tokens. Order beyond a
    shingle, repetition, meaning and what the model makes of the words play no part. Choose tau accordingly: one word
    replaced in a request of ten tokens leaves 7 of 11 pairs in common, a similarity of 0.64.
    """

    reads_states = False

    def __init__(self, width: int = 2, n_hashes: int = 128, seed: int = 1) -> None:
        """Choose the shingles and the signature.

        Args:
            width: Tokens of a shingle, at least 1. More make order count and similarities lower.
            n_hashes: F, at least 2. The estimate's standard error is at most 0.5 / sqrt(F): 0.044 for 128.
            seed: Of the hash functions, 0 to 2**32 - 1; signatures made with another one are not comparable.
        """
        if width < 1 or n_hashes < 2 or not 0 <= seed < 2**32:
            raise ValueError(
                f"width={width}, n_hashes={n_hashes}, seed={seed}: width must be at least 1, n_hashes at least 2, "
                "seed 0 to 2**32 - 1"
            )
        self.width = width
        self.n_hashes = n_hashes
        self._seed = seed

    def features(self, view: View) -> Tensor:
        return view.content_ids

    def project(self, features: Floats) -> Floats:
        """Signatures (B, F) of whole numbers from 0 to 2**24 - 1."""
        from datasketch import MinHash

        rows = [self._shingles(row[row >= 0].astype(np.int32)) for row in features]
        sketches = MinHash.generator(rows, num_perm=self.n_hashes, seed=self._seed)
        signatures: Floats = np.stack([sketch.hashvalues & _KEPT_BITS for sketch in sketches]).astype(np.float32)
        return signatures

    def _shingles(self, ids: NDArray[np.int32]) -> list[bytes]:
        """Runs of `width` tokens of ids (n,), packed."""
        width = min(self.width, len(ids))
        return [ids[i : i + width].tobytes() for i in range(len(ids) - width + 1)]
