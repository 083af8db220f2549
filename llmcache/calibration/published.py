"""One calibration for all caches that share a store: what is published of it.

    body       a value: the calibration, what fingerprint and decision learned, and all sources but their states
    standing   announced: which body, its version, and what has come of it since: alarms, drift

Decisions are made of what the body holds: fingerprints, answers and tokens of all sources. Of these only a state may be
missing where it is taken up. So each request is decided as in the cache that calibrated, and served so or computed.

Standings of one body are joined, which may be done in any order and again: the alarms of the one with most, and drift
if any has it. Of several bodies the one of the highest version is in force.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter
from torch import Tensor

from llmcache.arrays import Floats, below
from llmcache.banks.records import SavedRequest
from llmcache.banks.serialization import arrays_to_tensors, pack_requests, unpack
from llmcache.calibration.calibration import Calibration
from llmcache.request.rows import Scope

FORMAT = 2
_MOST_VERSION = 0xFFFFFF
_CALIBRATION = TypeAdapter(Calibration)


@dataclass(frozen=True, slots=True, order=True)
class Standing:
    """Which calibration is in force, and how it stands.

    Attributes:
        version: The higher replaces the lower.
        body: Digest of its body; of one version the larger is in force, so that all agree.
        n_alarms: Alarms of the audit since.
        has_drifted: Requests are no longer like those of the calibration.
    """

    version: int
    body: str
    n_alarms: int = 0
    has_drifted: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing may be served by it any more."""
        return self.has_drifted or self.n_alarms > 1

    @property
    def name(self) -> str:
        """Its name in a store; the same for all who say the same."""
        return f"{self.version:06x}.{self.body}.{self.n_alarms}{int(self.has_drifted)}"

    def joined(self, other: "Standing | None") -> "Standing":
        """What is in force, given another one that was heard."""
        if other is None or (other.version, other.body) < (self.version, self.body):
            return self
        if (other.version, other.body) > (self.version, self.body):
            return other
        return replace(
            self,
            n_alarms=max(self.n_alarms, other.n_alarms),
            has_drifted=self.has_drifted or other.has_drifted,
        )

    def about(self) -> dict[str, Any]:
        """Plain values, which `read` takes."""
        return asdict(self)

    @classmethod
    def read(cls, about: Mapping[str, Any]) -> Self:
        """Take up plain values; `KeyError`, `TypeError` or `ValueError` where they are no standing."""
        version, body, n_alarms = int(about["version"]), str(about["body"]), int(about["n_alarms"])
        if not (0 < version <= _MOST_VERSION and 0 <= n_alarms <= 2):
            raise ValueError(f"version {version}, {n_alarms} alarms")
        return cls(version, body, n_alarms, bool(about["has_drifted"]))


@dataclass(frozen=True, slots=True)
class Published:
    """A calibration and all that its decisions are made of.

    Attributes:
        calibration: As it was made.
        learned: What fingerprint (`fingerprint.`) and decision (`trust.`) learned, by name.
        sources: Requests that serve, all of one scope, with or without their states.
    """

    calibration: Calibration
    learned: Mapping[str, Floats]
    sources: Sequence[SavedRequest]

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Named tensors and plain values, without states."""
        bare = [replace(one, entries={}) for one in self.sources]
        tensors = pack_requests(bare, [bare[0].scope])
        tensors |= {f"learned.{name}": tensor for name, tensor in arrays_to_tensors(self.learned).items()}
        return tensors, {"format": FORMAT, "calibration": _CALIBRATION.dump_python(self.calibration, mode="json")}

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], about: Mapping[str, Any], scope: Scope) -> Self:
        """Take up what was packed, copied.

        Raises:
            KeyError, IndexError, TypeError, ValueError, RuntimeError: It is none of this scope.
        """
        calibration = _CALIBRATION.validate_python(about["calibration"])
        if about["format"] != FORMAT or calibration.weights != scope.weights:
            raise ValueError(f"format {about['format']}, of weights {calibration.weights[:12]}")
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        learned = {name: tensor.numpy() for name, tensor in below("learned.", copies).items()}
        sources = list(unpack(copies, {}, [scope]))
        if not sources or not all(np.isfinite(slot.vector).all() for one in sources for slot in one.slots):
            raise ValueError("no sources, or a fingerprint that is no number")
        return cls(calibration, learned, sources)


def digest_of(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Of a body: 24 hexadecimal digits."""
    made = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return made.hexdigest()[:24]
