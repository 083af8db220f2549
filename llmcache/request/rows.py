"""A request of a call, its scope and its exact key. `reading.py` makes them."""

import base64
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from llmcache.errors import ConfigError
from llmcache.support.arrays import Positions

KEY_LENGTH = 43  # characters of a SHA-256 in base64
DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class Scope:
    """Everything but the tokens that a state depends on. Lookups never cross scopes.

    Attributes:
        namespace: The caller's partition (tenant). No search crosses it.
        weights: Digest of the trunk's weights and active adapters.
        dtype: Dtype of the hidden states, autocast included.
        attention: Attention implementation; kernels differ in the last bits.
        engine: Name of the engine, "" for the trunk itself; its kernels differ in the last bits too.
    """

    namespace: str
    weights: str
    dtype: str
    attention: str
    engine: str = ""

    @property
    def key(self) -> bytes:
        """Unambiguous bytes to hash: each field, quoted and escaped.

        Uses `str.__repr__`, not `repr`, which a subclass of `str` may override. Saved caches depend on these bytes.
        """
        engine = (self.engine,) if self.engine else ()
        fields = (self.namespace, self.weights, self.dtype, self.attention, *engine)
        return f"({', '.join(map(str.__repr__, fields))})".encode()


def checked_namespace(name: Any) -> str:
    """Return a namespace unchanged, after checking it.

    Subclasses of `str` are rejected: they may override equality and hash, by which scopes are compared.

    Raises:
        ConfigError: It is not exactly a `str`, or has surrogates, which no file can hold as text.
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
    """One request of a call.

    Attributes:
        number: Its index in the batch.
        key: SHA-256 (base64) of its scope, valid tokens, types and positions; of all rows if they affect each other.
        ids: Its valid token ids, packed.
        valid: Columns of the valid tokens.
        n_valid: Number of valid tokens.
        start: Position of the first valid token if positions of the valid tokens are consecutive; else None.
        bypass_reason: Why the row bypasses the cache, or "".
        has_layout: The key also covers padding, so the entry holds the states of padding too.
        layout: Digest of its padding, if entries keep states of padding and the key does not cover it; else b"".
        is_misread: The head may read a padding column, whose state another request's entry does not hold. So only the
            row's own entry may serve it.
        same_as: Number of an earlier row of the call with the same `key`, columns and padding; None if there is none.
        duplicate_key: Of a row whose `key` an earlier row of the call has, too: a key of its own for its blocks, since
            kernels may round the two rows differently. "" of other rows.
    """

    number: int
    key: str
    ids: bytes
    valid: Positions
    n_valid: int
    start: int | None = None
    bypass_reason: str = ""
    has_layout: bool = False
    layout: bytes = b""
    is_misread: bool = False
    same_as: int | None = None
    duplicate_key: str = ""

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
