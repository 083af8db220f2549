"""Prompts as chains of prefix blocks: a block is of use with all before it, wherever it was computed."""

from collections.abc import Hashable, Iterable, Sequence

from experiments.simulation.banks import Held, Plan

Blocks = tuple[Hashable, ...]


class Chains:
    """Prompts, found by the names of their blocks."""

    announces = False

    def __init__(self, chains: Sequence[Blocks], routes: Sequence[str]) -> None:
        """Take the blocks of each prompt, and what it is routed by."""
        self.n = len(chains)
        self.chains = chains
        self._routes = routes

    def begin(self, n_workers: int, worker_values: int, store_values: int) -> None:
        self._held = [Held(worker_values) for _ in range(n_workers)]
        self._store = Held(store_values)

    def route(self, number: int) -> str:
        return self._routes[number]

    def plan(self, worker: int, number: int) -> Plan:
        chain, held = self.chains[number], self._held[worker]
        n_local = next((i for i, block in enumerate(chain) if block not in held), len(chain))
        rest = chain[n_local:]
        n_remote = next((i for i, block in enumerate(rest) if block not in self._store), len(rest))
        for block in reversed(chain[:n_local]):  # so that a beginning never leaves before what follows it
            held.add(block)
        return Plan(n_local, n_remote, len(rest) - n_remote, rest[:n_remote], bool(rest))

    def fetched(self, worker: int, values: Iterable[Hashable]) -> None:
        for block in reversed([*values]):
            self._held[worker].add(block)
            self._store.add(block)

    def computed(self, worker: int, number: int, plan: Plan) -> Sequence[Hashable]:
        chain = self.chains[number]
        new = chain[len(chain) - plan.n_computed :]
        for block in reversed(chain):
            self._held[worker].add(block)
        return new

    def is_stored(self, value: Hashable) -> bool:
        return value in self._store

    def stored(self, value: Hashable) -> None:
        self._store.add(value)

    def told(self, values: Iterable[Hashable]) -> None:
        """Nobody heeds it: blocks are found by their names."""

    def hear(self, worker: int) -> int:
        return 0
