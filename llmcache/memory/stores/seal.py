"""Turns tensors into the bytes that stores hold, and back. Every value is verified before it is used.

    magic, format, flags, SHA-256 of key and number   header of fixed size
    SHA-256, or HMAC-SHA-256 if a secret is set       checksum of header and body
    safetensors                                       body: tensors and metadata

The number is that of the namespace when the value was computed: a value from before a purge is one of another key. If
an encryption key is set, the body is encrypted with AES-256-GCM, with a new nonce each time and with header and
secret as associated data; there is no checksum then. No pickle: nothing in a value is ever executed.
"""

import base64
import binascii
import hashlib
import hmac
import json
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import load, save
from torch import Tensor

from llmcache.errors import ConfigError
from llmcache.memory.stores.base import FORMAT, Bytes, StoreKey

SECRET, KEY = "LLMCACHE_STORE_SECRET", "LLMCACHE_STORE_KEY"  # environment variables
_MAGIC = b"LLMC"
_HEAD = struct.Struct("<4sHH32s")
_SIGNED, _ENCRYPTED = 1, 2
_CHECKSUM_BYTES, _NONCE_BYTES = 32, 12
_ABOUT = "__about__"  # the tensor that holds the metadata as JSON


class MismatchError(ValueError):
    """A value does not match its key or is not ours: a miss."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        #: `damaged` (truncated, changed, or of another secret or key), `other_format` or `other_key` (or number).
        self.reason = reason


class Opened(NamedTuple):
    """The content of a value."""

    tensors: dict[str, Tensor]  # by name, on the CPU, none sharing memory
    about: dict[str, Any]  # the metadata sealed with them


class Seal:
    """Makes values, and opens values made with the same secret and key. Thread-safe."""

    def __init__(self, secret: bytes = b"", key: bytes = b"") -> None:
        """Sign with a secret of any length and encrypt with a key of 32 bytes; an empty one is not used."""
        self._secret = secret
        self._flags = _SIGNED * bool(secret) | _ENCRYPTED * bool(key)
        self._cipher: Any = None
        if key:
            try:
                from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            except ImportError as error:
                raise ConfigError(
                    f"{KEY} is set, but cryptography is not installed: pip install 'llmcache-torch[stores]'"
                ) from error
            self._cipher = AESGCM(key)

    @classmethod
    def from_environment(cls) -> Self:
        """Read `LLMCACHE_STORE_SECRET` (text) and `LLMCACHE_STORE_KEY` (32 bytes in base64), both optional.

        Raises:
            ConfigError: The key is not 32 bytes in base64, or `cryptography` is not installed.
        """
        text = os.environ.get(KEY, "")
        try:
            key = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ConfigError(f"{KEY}: not base64: {error}") from error
        if len(key) not in (0, 32):
            raise ConfigError(f"{KEY}: {len(key)} bytes; give 32 in base64, as from `openssl rand -base64 32`")
        return cls(os.environ.get(SECRET, "").encode(), key)

    @property
    def is_authentic(self) -> bool:
        """Whether only those with the secret or the encryption key can make values."""
        return bool(self._flags)

    def close(self, key: StoreKey, number: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
        """Make a value from tensors on any device and JSON-serialisable metadata; `number` as of `Put`."""
        # Copies: safetensors rejects tensors that share memory.
        held = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
        held[_ABOUT] = torch.frombuffer(bytearray(json.dumps(dict(about)).encode()), dtype=torch.uint8)
        head, body = _HEAD.pack(_MAGIC, FORMAT, self._flags, _digest(key, number)), save(held)
        if self._cipher is None:
            return b"".join((head, self._checksum(head, body), body))
        nonce = os.urandom(_NONCE_BYTES)
        return b"".join((head, nonce, self._cipher.encrypt(nonce, body, head + self._secret)))

    def open(self, key: StoreKey, number: int, value: Bytes) -> Opened:
        """Return a value's content; `MismatchError` if it was not sealed under this key, number, secret and cipher."""
        whole = memoryview(value)
        head, rest = whole[: _HEAD.size], whole[_HEAD.size :]
        if len(head) < _HEAD.size or head[:4] != _MAGIC:
            raise MismatchError("damaged", "this is no value of ours")
        _, version, flags, digest = _HEAD.unpack(head)
        if version != FORMAT:
            raise MismatchError("other_format", f"a value of format {version}; this version reads {FORMAT}")
        if digest != _digest(key, number):
            raise MismatchError("other_key", "a value of another key, or from before a purge")
        if flags != self._flags or (body := self._checked(head, rest)) is None:
            raise MismatchError("damaged", "cut short or changed, or made with another secret or key")
        try:
            with torch.inference_mode(False):
                tensors = load(body)
            return Opened(tensors, json.loads(tensors.pop(_ABOUT).numpy().tobytes()))
        except Exception as error:  # without a secret, anyone can make a value with a correct checksum
            raise MismatchError("damaged", f"its header does not fit it: {error!r}") from error

    def _checksum(self, head: Bytes, body: Bytes) -> bytes:
        sha: Any = hmac.new(self._secret, head, "sha256") if self._secret else hashlib.sha256(head)
        sha.update(body)
        return bytes(sha.digest())

    def _checked(self, head: memoryview, rest: memoryview) -> bytes | None:
        """Verify and decrypt the part after the header; None if it was changed."""
        if self._cipher is None:
            checksum, body = rest[:_CHECKSUM_BYTES], bytes(rest[_CHECKSUM_BYTES:])
            return body if hmac.compare_digest(checksum, self._checksum(head, body)) else None
        from cryptography.exceptions import InvalidTag

        try:
            nonce, sealed = bytes(rest[:_NONCE_BYTES]), rest[_NONCE_BYTES:]
            body = self._cipher.decrypt(nonce, sealed, bytes(head) + self._secret)
        except (InvalidTag, ValueError):  # ValueError: a truncated nonce
            return None
        return bytes(body)


def _digest(key: StoreKey, number: int) -> bytes:
    return hashlib.sha256(key.digest + str(number).encode()).digest()
