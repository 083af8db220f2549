"""(3) Matching: all shelves, and which of them a request stands on.

Sizes: B rows, F fingerprint width.
"""

from collections.abc import Callable, Sequence

from llmcache.arrays import Floats
from llmcache.context import Scope
from llmcache.index import Index
from llmcache.records import Request
from llmcache.shelf import Neighbour, Place, Shelf


class Shelves(dict[tuple[Scope, int, int | None], Shelf]):
    """Shelves by scope, length (0: not kept apart) and layer (None: all at once). The library holds a lock."""

    def __init__(self, make_index: Callable[[int], Index] | None) -> None:
        """Start empty.

        Args:
            make_index: `dim -> empty index`; None when nothing will be found.
        """
        super().__init__()
        self.make_index = make_index

    def search(
        self, scope: Scope, lengths: Sequence[int], vectors: Floats, k: int, layer: int | None
    ) -> list[list[Neighbour]]:
        """The k nearest requests of each row, best first.

        Args:
            scope: Only requests of this scope are found.
            lengths: Of each row, as on `Place`.
            vectors: Fingerprints (B, F).
            k: How many neighbours.
            layer: The layer to search, as on `Place`.
        """
        found: list[list[Neighbour]] = [[] for _ in lengths]
        for length in set(lengths):  # one search unless lengths are kept apart
            shelf = self.get((scope, length, layer))
            if shelf is None or len(shelf) == 0:
                continue
            members = [i for i, other in enumerate(lengths) if other == length]
            for i, near in zip(members, shelf.search(vectors[members], k), strict=True):
                found[i] = near
        return found

    def place(self, key: str, request: Request, place: Place) -> None:
        """Put a request on the shelf it belongs to; where it stands there already, its fingerprint is renewed."""
        for standing, slot in request.places:
            if standing.layer == place.layer:
                standing.replace(slot, place.vector)
                return
        assert self.make_index is not None
        name = (request.scope, place.length, place.layer)
        shelf = self.get(name)
        if shelf is None:
            shelf = self[name] = Shelf(*name, self.make_index(len(place.vector)))
        request.places = (*request.places, (shelf, shelf.add(key, place.vector)))

    def take_down(self, shelf: Shelf, slot: int) -> None:
        """Remove a request from a shelf, and an empty shelf with it: scopes come and go with weights and tenants."""
        shelf.remove(slot)
        if len(shelf) == 0:
            self.pop((shelf.scope, shelf.length, shelf.layer), None)

    def purge(self, namespace: str) -> None:
        """Drop the shelves of a namespace."""
        for name in [name for name in self if name[0].namespace == namespace]:
            del self[name]
