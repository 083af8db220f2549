"""(3) Matching: all shelves, and which of them a request stands on.

Sizes: B rows, F0 features, F fingerprint width.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

from llmcache.arrays import Floats
from llmcache.banks.records import Request
from llmcache.fingerprint import Fingerprint
from llmcache.matching.index import Index
from llmcache.matching.partition import Neighbour, Place, Shelf
from llmcache.request.rows import Row, Scope


class Shelves(dict[tuple[Scope, int, int | None], Shelf]):
    """Shelves by scope, length (0: not kept apart) and layer (None: all at once). The library holds a lock."""

    def __init__(
        self,
        fingerprint: Fingerprint | None,
        make_index: Callable[[int], Index] | None,
        held: Callable[[str], Collection[int]],
        by_length: bool,
        by_layer: bool,
    ) -> None:
        """Start empty.

        Args:
            fingerprint: Projects features to search vectors; None when nothing is searched.
            make_index: `dim -> empty index`; needed with a fingerprint.
            held: Layers whose bank holds a state of a request.
            by_length: Requests of different lengths never find each other.
            by_layer: Each layer is searched by itself, as the paper does.
        """
        super().__init__()
        self.fingerprint = fingerprint
        self.make_index = make_index
        self.by_layer = by_layer
        self._held = held
        self._by_length = by_length
        self._waiting: dict[str, tuple[Request, Row, Floats]] = {}  # until the fingerprint is fitted

    @property
    def fits_any_length(self) -> bool:
        """Whether requests of different lengths find each other."""
        return not self._by_length

    def search(
        self, scope: Scope, rows: Sequence[Row], vectors: Floats, k: int, layer: int | None
    ) -> list[list[Neighbour]]:
        """The k nearest requests of each row, best first.

        Args:
            scope: Only requests of this scope are found.
            rows: The requests; decide the length where lengths are kept apart.
            vectors: Fingerprints (B, F).
            k: How many neighbours.
            layer: The layer to search, as on `Place`.
        """
        lengths = [self._length(row) for row in rows]
        found: list[list[Neighbour]] = [[] for _ in rows]
        for length in set(lengths):  # one search unless lengths are kept apart
            shelf = self.get((scope, length, layer))
            if shelf is None or len(shelf) == 0:
                continue
            members = [i for i, other in enumerate(lengths) if other == length]
            for i, near in zip(members, shelf.search(vectors[members], k), strict=True):
                found[i] = near
        return found

    def put(
        self,
        request: Request,
        row: Row,
        features: Floats | None,
        vectors: Mapping[int, Floats] | None,
        layers: Collection[int],
    ) -> None:
        """Make a request findable, at once or when the fingerprint has seen enough to be fitted.

        Args:
            request: What is known of it.
            row: The same as a row of its call.
            features: What its fingerprint is projected from (F0,), or None.
            vectors: Its fingerprint (F,) by layer, where known already. With neither it is not found.
            layers: At which it was stored.
        """
        if not vectors:
            if features is None:
                return
            assert self.fingerprint is not None
            if needed := self.fingerprint.n_fit:
                self._waiting[row.key] = (request, row, features)
                if len(self._waiting) >= needed:
                    self._fit()
                return
            vectors = dict.fromkeys(layers, self.fingerprint.project(features[None])[0])
        length = self._length(row)
        places = [Place(layer, length, vectors[layer]) for layer in layers if layer in vectors]
        for place in places if self.by_layer else [Place(None, length, next(iter(vectors.values())))]:
            self.place(row.key, request, place)

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

    def leave(self, request: Request, layer: int) -> None:
        """Take a request down where this layer is searched by itself."""
        gone = [(shelf, slot) for shelf, slot in request.places if shelf.layer == layer]
        request.places = tuple(place for place in request.places if place not in gone)
        for shelf, slot in gone:
            self._take_down(shelf, slot)

    def forget(self, key: str, request: Request) -> None:
        """Take a request down everywhere. If one shelf fails, the others let go all the same."""
        self._waiting.pop(key, None)
        with ExitStack() as stack:
            for shelf, slot in request.places:
                stack.callback(self._take_down, shelf, slot)

    def use(self, fingerprint: Fingerprint | None) -> None:
        """Begin again, empty, with another fingerprint."""
        self.clear()
        self._waiting.clear()
        self.fingerprint = fingerprint

    def purge(self, namespace: str) -> None:
        """Drop the shelves of a namespace."""
        for name in [name for name in self if name[0].namespace == namespace]:
            del self[name]

    def _fit(self) -> None:
        assert self.fingerprint is not None
        waiting, self._waiting = self._waiting, {}
        self.fingerprint.fit([features for _, _, features in waiting.values()])
        for request, row, features in waiting.values():
            self.put(request, row, features, None, self._held(row.key))

    def _length(self, row: Row) -> int:
        return row.n_valid if self._by_length else 0

    def _take_down(self, shelf: Shelf, slot: int) -> None:
        """Remove a request from a shelf, and an empty shelf with it: scopes come and go with weights and tenants."""
        shelf.remove(slot)
        if len(shelf) == 0:
            self.pop((shelf.scope, shelf.length, shelf.layer), None)
