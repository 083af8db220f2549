"""The codecs at work: one for each layer and each state of the weights.

Other weights make other states, of which a codec that was fitted earlier knows nothing: packed by it they would be
lost. PEFT adapters that take turns are such weights, too.
"""

from collections.abc import Callable, Collection, Iterable

from llmcache.paper.codecs import Codec
from llmcache.banks.compression.packer import Packer


class Packers(dict[str, dict[int, Packer]]):
    """Packers by weights digest, made when first asked for, then by layer. The caller holds a lock."""

    def __init__(self, make_codec: Callable[[], Codec], layers: Iterable[int]) -> None:
        super().__init__()
        self._make_codec = make_codec
        self._layers = tuple(layers)
        self.latest = self._make()  # those that stored last; their loss is what is shown

    def __missing__(self, weights: str) -> dict[int, Packer]:
        self[weights] = self._make()
        return self[weights]

    def keep(self, weights: Collection[str]) -> None:
        """Drop the packers of all other weights."""
        for gone in self.keys() - weights:
            del self[gone]

    def forget(self, namespace: str | None = None) -> None:
        """Have no codec fitted on what was stored so far, in a namespace or at all; what is fitted stays."""
        for packers in self.values():
            for packer in packers.values():
                packer.forget(namespace)

    def _make(self) -> dict[int, Packer]:
        return {layer: Packer(self._make_codec()) for layer in self._layers}
