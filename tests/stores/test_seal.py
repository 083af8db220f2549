"""A seal opens its own values unchanged, and refuses all others."""

import base64
import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from llmcache import ConfigError
from llmcache.memory.stores import StoreKey
from llmcache.memory.stores.seal import KEY, SECRET, MismatchError, Seal
from tests.fixtures import Patch

ONE, OTHER = StoreKey("a", "0" * 64, "x"), StoreKey("a", "0" * 64, "y")
SEALS = {
    "plain": Seal(),
    "signed": Seal(b"secret"),
    "encrypted": Seal(key=bytes(32)),
    "both": Seal(b"secret", bytes(32)),
}
TENSORS = {
    "h": torch.arange(6.0).reshape(2, 3),
    "half": torch.tensor(1.5).half(),
    "brain": torch.ones(2, 1, 3).bfloat16(),
    "none": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
    "turned": torch.arange(6).reshape(2, 3).T,
}


@pytest.mark.parametrize("seal", SEALS.values(), ids=SEALS)
def test_what_is_sealed_comes_back(seal: Seal) -> None:
    value = seal.close(ONE, 7, TENSORS, {"layout": "ab", "ids": [1, 2]})
    for whole in (value, bytes(value), memoryview(bytes(value))):
        opened = seal.open(ONE, 7, whole)
        assert opened.about == {"layout": "ab", "ids": [1, 2]}
        assert opened.tensors.keys() == TENSORS.keys()
        for name, x in TENSORS.items():
            assert opened.tensors[name].dtype == x.dtype and torch.equal(opened.tensors[name], x)
    assert seal.open(OTHER, 7, seal.close(OTHER, 7, {}, {})) == ({}, {})


@torch.inference_mode()
def test_tensors_are_normal_ones_of_their_own() -> None:
    x = torch.ones(4, 5)
    value = SEALS["plain"].close(ONE, 7, {"h": x[:2], "rest": x[1:]}, {})  # views of one tensor
    opened = SEALS["plain"].open(ONE, 7, value).tensors
    assert not opened["h"].is_inference()
    opened["h"].zero_()
    assert torch.equal(opened["rest"], x[1:]) and torch.equal(SEALS["plain"].open(ONE, 7, value).tensors["h"], x[:2])


@pytest.mark.parametrize("name", SEALS)
@given(data=st.data())
def test_a_flipped_bit_or_a_cut_is_found(name: str, data: st.DataObject) -> None:
    value = SEALS[name].close(ONE, 7, {"h": torch.ones(5)}, {"layout": ""})
    place = data.draw(st.integers(0, len(value) - 1))
    flipped = bytearray(value)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    for wrong in (flipped, value[:place], value + b"\0"):
        with pytest.raises(MismatchError):
            SEALS[name].open(ONE, 7, wrong)


@pytest.mark.parametrize("mine", SEALS)
def test_values_of_another_secret_or_key_are_refused(mine: str) -> None:
    others = SEALS | {"another secret": Seal(b"other"), "another key": Seal(key=b"k" * 32)}
    for theirs in others.keys() - {mine}:
        with pytest.raises(MismatchError) as refused:
            SEALS[mine].open(ONE, 7, others[theirs].close(ONE, 7, TENSORS, {}))
        assert refused.value.reason == "damaged"


def test_values_of_other_keys_and_formats_are_told_apart() -> None:
    value = SEALS["plain"].close(ONE, 7, TENSORS, {})
    with pytest.raises(MismatchError) as refused:
        SEALS["plain"].open(OTHER, 7, value)
    assert refused.value.reason == "other_key"
    older = value[:4] + (1).to_bytes(2, "little") + value[6:]
    with pytest.raises(MismatchError, match="format 1; this version reads 5") as refused:
        SEALS["plain"].open(ONE, 7, older)
    assert refused.value.reason == "other_format"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff" * 20,
        save({"h": torch.ones(5)}),
        save({"__about__": torch.tensor([1, 2], dtype=torch.uint8)}),
        save({"h": torch.ones(5), "__about__": torch.tensor([123, 125], dtype=torch.uint8)})[:-1],
        save({"__about__": torch.tensor([123, 125], dtype=torch.uint8)}).replace(b"[2]", b"[9]"),
    ],
    ids=len,
)
def test_a_body_that_does_not_fit_is_refused_although_its_checksum_does(body: bytes) -> None:
    head = SEALS["plain"].close(ONE, 7, {}, {})[:40]
    with pytest.raises(MismatchError, match="header does not fit"):
        SEALS["plain"].open(ONE, 7, head + hashlib.sha256(head + body).digest() + body)


def test_no_two_keys_have_one_digest() -> None:
    parts = ["", "a", "b", "1:a", "ä", "\0"]
    keys = {StoreKey(a, b, c) for a in parts for b in parts for c in parts}
    assert len({key.digest for key in keys}) == len(keys)


def test_secrets_come_from_the_environment(monkeypatch: Patch) -> None:
    monkeypatch.setenv(SECRET, "secret")
    monkeypatch.setenv(KEY, base64.b64encode(bytes(32)).decode())
    value = SEALS["both"].close(ONE, 7, TENSORS, {})
    assert Seal.from_environment().open(ONE, 7, value).tensors.keys() == TENSORS.keys()
    for wrong in ("no base64!", base64.b64encode(b"short").decode()):
        monkeypatch.setenv(KEY, wrong)
        with pytest.raises(ConfigError, match=KEY):
            Seal.from_environment()
    monkeypatch.setenv(KEY, "")
    monkeypatch.setenv(SECRET, "")
    assert Seal.from_environment().open(ONE, 7, SEALS["plain"].close(ONE, 7, TENSORS, {}))
