"""The checks of `llmcache.testing` name the rule that a class breaks; docs/extending.md has classes that pass."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from llmcache.testing import check_codec, check_fingerprint, check_index, check_policy, check_store
from tests.conformance.page import Codec, Fingerprint, Index, Policy, Store

#: Check and class that passes, by kind.
KINDS: dict[str, tuple[Callable[[Any], None], Any]] = {
    "policy": (check_policy, Policy),
    "index": (check_index, Index),
    "fingerprint": (check_fingerprint, Fingerprint),
    "codec": (check_codec, Codec),
    "store": (check_store, Store),
}
VALUES = "get_many: a value for each key, in their order, bit for bit"


def forgetful(self: Any) -> str:
    key = Policy.victim(self)
    self.on_remove(key)
    return key


def flattering(self: Any, x: Any, k: int) -> Any:
    ids, similarity = Index.search(self, x, k)
    return ids, np.minimum(similarity + np.float32(0.1), 1)


def borrowing(self: Any, ids: Any, x: Any) -> None:
    Index.add(self, ids, x)
    self._rows |= dict(zip(ids.tolist(), x, strict=True))


def turning(self: Any, name: str, x: Any) -> Any:
    packed = Codec.encode(self, name, x.clone())
    x.data.zero_()
    return packed


RENAMING: dict[str, Any] = {
    "encode": lambda self, name, x: {f"{name}.packed": Codec.encode(self, name, x)[name]},
    "decode": lambda self, name, packed, *more: Codec.decode(self, name, {name: packed[f"{name}.packed"]}, *more),
}


def joined(self: Any, key: Any) -> bytes | None:
    """Compare keys by their joined text."""
    text = f"{key.namespace}:{key.name}"
    return next((v for k, (_, v) in self.place.values.items() if f"{k.namespace}:{k.name}" == text), None)


def silent(self: Any, since: str | None) -> Any:
    """Do not report forgotten keys."""
    purges = Store.purges(self, since)
    return replace(purges, found=[purge for purge in purges.found if not purge.names])


#: By kind: what is wrong with a class that passes else, and the rule that it breaks.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("policy", {"victim": forgetful}, "victim: asking changes nothing"),
    (
        "policy",
        {"on_remove": lambda self, key: None, "on_put": lambda self, key, nbytes: self._rank.update({key: 0.0})},
        "victim(: a key that was put and not removed since| while no key is held)",
    ),
    ("policy", {"expired": lambda self: [*self._rank]}, "expired: only where lets_entries_leave_early is set"),
    (
        "index",
        {"search": lambda self, x, k: [found[:, ::-1][:, :k] for found in Index.search(self, x, 10**6)]},
        "search: (best first|the most similar rows)",
    ),
    ("index", {"search": flattering}, "search: the similarity of the rows named"),
    (
        "index",
        {"add": lambda self, ids, x: self._rows.update(zip(ids.tolist(), x.copy(), strict=True))},
        "of .*: ValueError",
    ),
    ("index", {"add": borrowing}, "search: the similarity of the rows named"),
    ("fingerprint", {"project": lambda self, x: 2 * Fingerprint.project(self, x)}, "project: L2 norm 1"),
    (
        "fingerprint",
        {"features": lambda self, view: Fingerprint.features(self, view) + len(view.ids)},
        "features: each row is independent",
    ),
    ("codec", {"is_lossless": lambda self, dtype: True}, "is_lossless: every bit comes back"),
    ("codec", RENAMING, "encode: except for `hidden`, the given name is in the result"),
    ("codec", {"encode": turning}, "encode: the tensor is not modified"),
    # Keeps its numbers at a purge, so that a put that began before the purge still lands.
    (
        "store",
        {"number": lambda self, namespace: self.place.n_purged[namespace] if "forgotten" in namespace else 0},
        "purge: the namespace has another number in all stores",
    ),
    (
        "store",
        {"get_many": lambda self, keys, *more: Store.get_many(self, sorted(keys, key=lambda one: one.name), *more)},
        VALUES,
    ),
    (
        "store",
        {"get_many": lambda self, keys, deadline: Store.get_many(self, keys, inf)},
        "get_many: nothing after the deadline, and no error",
    ),
    ("store", {"purges": silent}, "purges: all purges, in order"),
    ("store", {"is_forgotten": lambda self, put: False}, "forget: no forgotten value is returned"),
    (
        "store",
        {"numbers": lambda self, spaces: Store.numbers(self, [name.partition("\0")[0] for name in spaces])},
        "forget: the number of `forgets_of` the namespace changes",
    ),
    ("store", {"find": joined}, VALUES),
    ("store", {"__init__": lambda self: Store.__init__(self, f"{id(self)}")}, VALUES),  # shares with nobody
]


@pytest.mark.parametrize(("kind", "wrong", "rule"), WRONG)
def test_a_class_that_breaks_a_rule_is_told_which(kind: str, wrong: dict[str, Any], rule: str) -> None:
    check, passes = KINDS[kind]
    with pytest.raises(AssertionError, match=rule):
        check(type("Wrong", (passes,), wrong))
