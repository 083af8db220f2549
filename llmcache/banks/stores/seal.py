"""How tensors become the bytes that stores hold, and back. Every value is checked before anything of it is used.

    magic, format, flags, key's own SHA-256, checksum, length     a head of fixed size
    JSON                                                          name, dtype, shape of each tensor; what it is about
    bytes of each tensor                                          each begins at a multiple of 64

The checksum covers all but itself: SHA-256, or HMAC-SHA-256 where a secret is set. With a key, all that follows the
head is encrypted (AES-256 in GCM, a nonce of its own each time); the head is bound to it. No pickle: nothing in a value
is ever run.
"""

import base64
import binascii
import hashlib
import hmac
import json
import math
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from llmcache.banks.stores.base import Bytes, StoreKey
from llmcache.errors import ConfigError

SECRET, KEY = "LLMCACHE_STORE_SECRET", "LLMCACHE_STORE_KEY"  # environment variables
FORMAT = 1
_MAGIC = b"LLMC"
_HEAD = struct.Struct("<4sHH32s32sQ")  # magic, format, flags, key's digest, checksum, bytes that follow
_SIGNED, _ENCRYPTED = 1, 2
_CHECKSUM = slice(40, 72)
_JSON = struct.Struct("<I")
_NONCE_BYTES = 12
_ALIGNED = 64
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)}  # fmt: skip


class MismatchError(ValueError):
    """A value is not what its key asks for, or not ours: a miss.

    Attributes:
        reason: `damaged` (cut short, changed, or signed or encrypted otherwise), `other_format` or `other_key`.
    """

    def __init__(self, reason: str, said: str) -> None:
        super().__init__(said)
        self.reason = reason


class Opened(NamedTuple):
    """What a value holds.

    Attributes:
        tensors: By name, on the host; they lie in the value's bytes. Nobody writes to them.
        about: What was sealed with them.
    """

    tensors: dict[str, Tensor]
    about: dict[str, Any]


class Seal:
    """Makes values, and opens those that were made with the same secret and key. Thread-safe."""

    def __init__(self, secret: bytes = b"", key: bytes = b"") -> None:
        """Sign with a secret of any length, and encrypt with a key of 32 bytes; empty: not."""
        self._secret = secret
        self._cipher: Any = _cipher(key) if key else None
        self._flags = _SIGNED * bool(secret) | _ENCRYPTED * bool(key)

    @classmethod
    def from_environment(cls) -> Self:
        """Read `LLMCACHE_STORE_SECRET`, a text, and `LLMCACHE_STORE_KEY`, 32 bytes in base64; unset or empty: not.

        Raises:
            ConfigError: The key is none, or `cryptography` is not installed.
        """
        text = os.environ.get(KEY, "")
        try:
            key = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ConfigError(f"{KEY}: not base64: {error}") from error
        if len(key) not in (0, 32):
            raise ConfigError(
                f"{KEY}: {len(key)} bytes; give 32 in base64, for instance from `openssl rand -base64 32`"
            )
        return cls(os.environ.get(SECRET, "").encode(), key)

    def close(self, key: StoreKey, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytearray:
        """Make a value of tensors, any device, and of what JSON can hold."""
        arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        header = {"tensors": [[n, _name(x.dtype), list(x.shape)] for n, x in arrays.items()], "about": dict(about)}
        packed = json.dumps(header, separators=(",", ":")).encode()
        places = _places(len(packed), [x.nbytes for x in arrays.values()])
        body = bytearray(places[-1].stop if places else _JSON.size + len(packed))
        body[: _JSON.size + len(packed)] = _JSON.pack(len(packed)) + packed
        for place, x in zip(places, arrays.values(), strict=True):
            body[place] = x.reshape(-1).view(torch.uint8).numpy().data
        if self._cipher is None:
            return self._signed(key, body)
        nonce = os.urandom(_NONCE_BYTES)
        return self._signed(key, nonce + self._cipher.encrypt(nonce, body, self._bound(key)))

    def open(self, key: StoreKey, value: Bytes) -> Opened:
        """Check a value and return what is in it.

        Raises:
            MismatchError: It is not what was sealed under this key, with this secret and encryption key.
        """
        whole = memoryview(value)
        magic, number, flags, digest, checksum, n_bytes = _unpack(whole)
        if magic != _MAGIC:
            raise MismatchError("damaged", "this is no value of ours")
        if number != FORMAT:
            raise MismatchError("other_format", f"a value of format {number}; this version reads {FORMAT}")
        if digest != key.digest:
            raise MismatchError("other_key", "a value of another key")
        body = whole[_HEAD.size :]
        if flags != self._flags or n_bytes != len(body) or not hmac.compare_digest(checksum, self._checksum(whole)):
            raise MismatchError("damaged", "cut short or changed, or made with another secret or key")
        try:
            return _parse(body if self._cipher is None else self._decrypted(key, body))
        except Exception as error:  # without a secret, anybody may have made a value with a checksum that is right
            raise MismatchError("damaged", f"its header does not fit it: {error!r}") from error

    def _signed(self, key: StoreKey, body: Bytes) -> bytearray:
        whole = bytearray(_HEAD.pack(_MAGIC, FORMAT, self._flags, key.digest, bytes(32), len(body)))
        whole += body
        whole[_CHECKSUM] = self._checksum(memoryview(whole))
        return whole

    def _checksum(self, whole: memoryview) -> bytes:
        covered = (whole[: _CHECKSUM.start], whole[_CHECKSUM.stop :])
        made: Any = hmac.new(self._secret, digestmod="sha256") if self._secret else hashlib.sha256()
        for part in covered:
            made.update(part)
        checksum: bytes = made.digest()
        return checksum

    def _bound(self, key: StoreKey) -> bytes:
        """What encryption covers beside the body: the head's fields that are known before it."""
        return _HEAD.pack(_MAGIC, FORMAT, self._flags, key.digest, bytes(32), 0)

    def _decrypted(self, key: StoreKey, body: memoryview) -> memoryview:
        from cryptography.exceptions import InvalidTag

        nonce, sealed = body[:_NONCE_BYTES], body[_NONCE_BYTES:]
        try:
            return memoryview(self._cipher.decrypt(bytes(nonce), sealed, self._bound(key)))
        except InvalidTag as error:
            raise ValueError("encrypted with another key") from error


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigError(
            f"{KEY} is set, but cryptography is not installed: pip install 'llmcache-torch[stores]'"
        ) from error
    return AESGCM(key)


def _unpack(whole: memoryview) -> tuple[Any, ...]:
    if len(whole) < _HEAD.size:
        raise MismatchError("damaged", f"{len(whole)} bytes are no value")
    return _HEAD.unpack_from(whole)


def _parse(body: memoryview) -> Opened:
    (n_json,) = _JSON.unpack_from(body)
    header = json.loads(bytes(body[_JSON.size : _JSON.size + n_json]))
    kinds = [(name, _DTYPES[dtype], shape) for name, dtype, shape in header["tensors"]]
    places = _places(n_json, [math.prod(shape) * dtype.itemsize for _, dtype, shape in kinds])
    if places and places[-1].stop != len(body):
        raise ValueError(f"{len(body)} bytes where {places[-1].stop} are described")
    tensors = {n: _tensor(body[place], dtype, shape) for place, (n, dtype, shape) in zip(places, kinds, strict=True)}
    return Opened(tensors, header["about"])


def _tensor(data: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """A normal tensor over bytes, which are copied only where torch would warn that they cannot be written."""
    with torch.inference_mode(False):
        if not data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype).reshape(shape)


def _places(n_json: int, sizes: list[int]) -> list[slice]:
    """Where bytes of tensors lie in a body, after so much JSON."""
    places, begin = [], _JSON.size + n_json
    for size in sizes:
        begin += -(begin + _HEAD.size) % _ALIGNED  # counted from the beginning of the value, which is mapped
        places.append(slice(begin, begin + size))
        begin += size
    return places


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"tensors of {dtype} are not stored")
    return name
