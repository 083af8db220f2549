"""A request of a call, its scope and its exact key. `reading.py` makes them."""

import base64
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import ConfigError
from llmcache.support.arrays import Positions

KEY_LENGTH = 43  # characters of a SHA-256 in base64
DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class Scope:
    """Everything but the tokens that a state depends on. Lookups never cross scopes."""

    namespace: str  # the caller's partition (tenant)
    weights: str  # digest of the trunk's weights and active adapters
    dtype: str  # of the hidden states, autocast included
    attention: str  # attention implementation; kernels differ in the last bits
    engine: str = ""  # its name, "" for the trunk itself; its kernels differ in the last bits too

    @property
    def key(self) -> bytes:
        """Unambiguous bytes to hash: each field, quoted and escaped.

        Uses `str.__repr__`, not `repr`, which a subclass of `str` may override. Saved caches depend on these bytes.
        """
        engine = (self.engine,) if self.engine else ()
        fields = (self.namespace, self.weights, self.dtype, self.attention, *engine)
        return f"({', '.join(map(str.__repr__, fields))})".encode()


def checked_namespace(name: Any) -> str:
    """Return a namespace; raise `ConfigError` if it has surrogates, which no file can hold as text, or is no `str`.

    Subclasses of `str` are rejected: they may override equality and hash, by which scopes are compared.
    """
    if type(name) is not str:
        raise ConfigError(f"namespace: give a plain str, str(name) of another type (got a {type(name).__name__})")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"namespace: {name!r} is no Unicode text: character {error.start} is a surrogate") from error
    return name


@dataclass(slots=True)
class Row:
    """One request of a call."""

    number: int  # its index in the batch
    key: str  # SHA-256 (base64) of its scope, valid tokens, types and positions; of all rows if they affect each other
    ids: bytes  # its valid token ids, packed
    valid: Positions  # columns of the valid tokens
    n_valid: int
    start: int | None = None  # position of the first valid token, if those of all are consecutive
    bypass_reason: str = ""
    has_layout: bool = False  # the key also covers padding, so the entry holds the states of padding too
    layout: bytes = b""  # digest of its padding, if entries keep states of padding and the key does not cover it
    #: The head may read a padding column, whose state only the row's own entry holds; so no other entry may serve it.
    is_misread: bool = False
    same_as: int | None = None  # number of an earlier row of the call with the same `key`, columns and padding
    #: If an earlier row of the call has the same `key`: a key for its blocks, as kernels may round the two differently.
    duplicate_key: str = ""
    activated_at: int | None = None  # number of tokens before those that an activated LoRA applies to, if there are any

    @property
    def first(self) -> int:
        """The column of its first valid token, if these are contiguous."""
        assert isinstance(self.valid, slice)
        return int(self.valid.start)

    @property
    def plain_ids(self) -> bytes:
        """Its ids before those that an activated LoRA applies to."""
        return self.ids if self.activated_at is None else self.ids[: max(0, self.activated_at) * self.id_width]

    @property
    def id_width(self) -> int:
        """Bytes per packed token id, of a row with tokens."""
        return len(self.ids) // self.n_valid

    def pack(self, ids: NDArray[Any]) -> bytes:
        """Return token ids packed as the row's own."""
        return ids.astype(np.uint16 if self.id_width == 2 else np.int32).tobytes()

    @property
    def starts_first(self) -> bool:
        """Whether its valid tokens are contiguous from the first column on."""
        return self.n_valid > 0 and isinstance(self.valid, slice) and self.valid.start == 0


@lru_cache(maxsize=8)
def id_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the integer dtype for packed token ids, given the vocabulary size."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.int32)


def key_of(digest: bytes) -> str:
    """Return a digest as base64 of `KEY_LENGTH` characters, short since caches hold hundreds of thousands of keys."""
    return base64.urlsafe_b64encode(digest)[:KEY_LENGTH].decode()
