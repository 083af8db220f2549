"""The checks of `llmcache.testing` pass a class from outside, and name the rule that a wrong class breaks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llmcache import View
from llmcache.memory.stores import Bytes, Purges, Put, StoreKey
from llmcache.testing import check_codec, check_fingerprint, check_index, check_policy, check_store
from tests.conformance import outside
from tests.stores.shared import Shared

#: Check and class that passes, by kind.
KINDS: dict[str, tuple[Callable[[Any], None], Any]] = {
    "policy": (check_policy, outside.MostRecent),
    "index": (check_index, outside.Scan),
    "fingerprint": (check_fingerprint, outside.Lengths),
    "codec": (check_codec, outside.Mirrored),
    "store": (check_store, Shared),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_from_outside_passes(kind: str) -> None:
    check, made = KINDS[kind]
    check(made)


class Forgetful(outside.MostRecent):
    def victim(self) -> str:
        key = super().victim()
        self.on_remove(key)
        return key


class Stale(outside.MostRecent):
    def on_remove(self, key: str) -> None:
        """Keep it."""

    def on_put(self, key: str, nbytes: int) -> None:
        self.keys[key] = None


class Hasty(outside.MostRecent):
    def expired(self) -> list[str]:
        return list(self.keys)


class Worst(outside.Scan):
    def search(self, x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        ids, similarity = super().search(x, 10**6)
        return ids[:, ::-1][:, :k], similarity[:, ::-1][:, :k]


class Flattering(outside.Scan):
    def search(self, x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        ids, similarity = super().search(x, k)
        return ids, np.minimum(similarity + np.float32(0.1), 1)


class Trusting(outside.Scan):
    def check(self, x: np.ndarray) -> None:
        """Take anything."""


class Borrowing(outside.Scan):
    def add(self, ids: np.ndarray, x: np.ndarray) -> None:
        super().add(ids, x)
        self.rows |= dict(zip(ids.tolist(), x, strict=True))


class Long(outside.Lengths):
    def project(self, features: np.ndarray) -> np.ndarray:
        return 2 * super().project(features)


class Crowd(outside.Lengths):
    def features(self, view: View) -> Tensor:
        return super().features(view) + len(view.ids)


class Half(outside.Mirrored):
    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        return super().encode(name, x.half() if x.is_floating_point() else x)


class Renaming(outside.Mirrored):
    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        return {f"{name}.mirrored": super().encode(name, x)[name]}

    def decode(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return super().decode(name, {name: tensors[f"{name}.mirrored"]}, dtype)


class Turning(outside.Mirrored):
    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        packed = super().encode(name, x)
        x.data.zero_()
        return packed


class Unmoved(Shared):
    """Keeps its numbers at a purge: a put that began before the purge still lands."""

    def number(self, namespace: str) -> int:
        return self.place.n_purged[namespace] if namespace.endswith("forgotten") else 0


class Shuffled(Shared):
    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        return super().get_many(sorted(keys, key=lambda key: key.name), deadline)


class Patient(Shared):
    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        return super().get_many(keys, inf)


class Nameless(Shared):
    """Compares keys by their joined text."""

    def find(self, key: StoreKey) -> bytes | None:
        text = f"{key.namespace}:{key.name}"
        return next((v for k, (_, v) in self.place.values.items() if f"{k.namespace}:{k.name}" == text), None)


class Silent(Shared):
    """Does not report forgotten keys."""

    def purges(self, since: str | None) -> Purges:
        all_of_them = super().purges(since)
        return replace(all_of_them, found=[purge for purge in all_of_them.found if not purge.names])


class Late(Shared):
    """Takes values that were forgotten while they were computed."""

    def is_forgotten(self, put: Put) -> bool:
        return False


class Uncounted(Shared):
    """Does not count what it forgets."""

    def numbers(self, namespaces: Sequence[str]) -> list[int]:
        return super().numbers([name.partition("\0")[0] for name in namespaces])


class Alone(Shared):
    def __init__(self) -> None:
        super().__init__(f"{id(self)}")


@pytest.mark.parametrize(
    ("kind", "made", "said"),
    [
        ("policy", Forgetful, "victim: asking changes nothing"),
        ("policy", Stale, "victim(: a key that was put and not removed since| while no key is held)"),
        ("policy", Hasty, "expired: only where lets_entries_leave_early is set"),
        ("index", Worst, "search: (best first|the most similar rows)"),
        ("index", Flattering, "search: the similarity of the rows named"),
        ("index", Trusting, "add of .*: ValueError"),
        ("index", Borrowing, "search: the similarity of the rows named"),
        ("fingerprint", Long, "project: L2 norm 1"),
        ("fingerprint", Crowd, "features: each row is independent"),
        ("codec", Half, "is_lossless: every bit comes back"),
        ("codec", Renaming, "encode: except for `hidden`, the given name is in the result"),
        ("codec", Turning, "encode: the tensor is not modified"),
        ("store", Unmoved, "purge: the namespace has another number in all stores"),
        ("store", Shuffled, "get_many: a value for each key, in their order, bit for bit"),
        ("store", Patient, "get_many: nothing after the deadline, and no error"),
        ("store", Silent, "purges: all purges, in order"),
        ("store", Late, "forget: no forgotten value is returned"),
        ("store", Uncounted, "forget: the number of `forgets_of` the namespace changes"),
        ("store", Nameless, "get_many: a value for each key, in their order, bit for bit"),
        ("store", Alone, "get_many: a value for each key, in their order, bit for bit"),
    ],
)
def test_a_class_that_breaks_a_rule_is_told_which(kind: str, made: type, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        KINDS[kind][0](made)
