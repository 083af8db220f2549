"""A request of a call, the scope that it is found in, and its exact key. `reading.py` makes them."""

import base64
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from llmcache.arrays import Positions
from llmcache.errors import ConfigError

KEY_LENGTH = 43  # characters of a SHA-256 in base64
DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class Scope:
    """Everything but the tokens that decides a state. States are found only within their own scope.

    Attributes:
        namespace: The caller's partition (tenant). No search crosses it.
        weights: Digest of the trunk's weights and active adapters.
        dtype: Dtype of the hidden states, autocast included.
        attention: Attention implementation; kernels differ in the last bits.
        engine: Name of the engine that computes, "" for the trunk itself; kernels differ likewise.
    """

    namespace: str
    weights: str
    dtype: str
    attention: str
    engine: str = ""

    @property
    def key(self) -> bytes:
        """Unambiguous bytes to hash: the characters of each field, quoted and escaped.

        `str.__repr__`, not `repr`: a subclass of `str` may have one of its own. Saved caches depend on these bytes.
        """
        engine = (self.engine,) if self.engine else ()
        fields = (self.namespace, self.weights, self.dtype, self.attention, *engine)
        return f"({', '.join(map(str.__repr__, fields))})".encode()


def checked_namespace(name: Any) -> str:
    """Return a namespace as it was given, after checking it.

    Subclasses of `str` are refused: they may have an equality and a hash of their own, and scopes are compared by both.

    Raises:
        ConfigError: It is no `str`, or of a subclass, or has surrogates, which no file can hold as text.
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
        number: Its row in the batch.
        key: SHA-256 (base64) of its scope, valid tokens, types and positions; of the whole call where rows affect each
            other.
        ids: Its valid token ids, packed.
        valid: Columns of the valid tokens.
        n_valid: Number of valid tokens.
        start: Position of the first valid token where those of the others follow one by one; else None.
        bypass_reason: Why the row takes no part in caching, or "".
        has_layout: Its key covers its padding as well, so that an entry holds the states of padding too.
        layout: Digest of its padding, where states of padding are kept and the key does not cover it; else b"".
        is_misread: No other request's entry may serve it: the head may read a column that is not valid, where such an
            entry holds nothing known. Its own entry may.
        again: A key of its own, where an earlier row of the call has the same key; else "". Their outputs may differ in
            the last bits, since kernels round by the place in a batch.
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
    again: str = ""


@lru_cache(maxsize=8)
def id_dtype(vocabulary: int) -> np.dtype[Any]:
    """Smallest integer dtype in which token ids are packed."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.int32)


def key_of(digest: bytes) -> str:
    """A digest in `KEY_LENGTH` characters: keys are held by the hundred thousand."""
    return base64.urlsafe_b64encode(digest)[:KEY_LENGTH].decode()
