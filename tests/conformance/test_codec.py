"""Every codec keeps the rules (`check_codec`); how far off what comes back may be, and what is refused."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmcache.banks.compression import CODECS, Codec, Half, Int8
from llmcache.testing import check_codec
from tests.conformance.outside import Mirrored

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# Largest relative error of a value that is neither subnormal nor out of range, for values about as large as their row.
# PCA keeps all its axes here, so that only rounding is left; an autoencoder gives no bound.
TOLERANCE = {"none": 0.0, "fp16": 2.0**-11, "int8": 1.0001 / 254, "pca": 2.0**-9, "outside": 0.0}
ALL = {**CODECS, "outside": Mirrored}
LEARNED = ["pca", "autoencoder"]  # of ours, those with settings `dim` and `fit_on`


@pytest.fixture(params=sorted(ALL))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@functools.cache
def ready(name: str, width: int = 8) -> Codec:
    """A codec that packs rows of this width, as well as it can."""
    codec = ALL[name](**({"dim": width, "fit_on": 4 * width} if name in LEARNED else {}))
    if codec.n_fit:
        codec.fit(torch.randn(codec.n_fit, width, generator=torch.Generator().manual_seed(0)))
    return codec


@pytest.fixture
def codec(name: str) -> Codec:
    return ready(name)


def there_and_back(codec: Codec, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return codec.decode("hidden", codec.encode("hidden", x), dtype or x.dtype)


def test_every_codec_keeps_the_rules(name: str) -> None:
    check_codec(lambda: ALL[name](**({"dim": 8, "fit_on": 32} if name in LEARNED else {})))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5,), (3, 4, 7), (1, 1), (0, 6)])
def test_values_come_back_within_the_tolerance(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) + 3).to(dtype)
    back = there_and_back(ready(name, shape[-1]), x)
    narrow = torch.finfo(dtype).eps if name in ("int8", "pca") else 0.0  # the result is rounded once more
    limit = (TOLERANCE.get(name, float("inf")) + narrow) * (x.double().abs().amax() if x.numel() else 0)
    assert ((back.double() - x.double()).abs() <= limit).all()


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_plain_until_fitted_is_not_called_lossless(name: str) -> None:
    """A cache must not serve as exact today what it packs tomorrow."""
    codec = CODECS[name](dim=2, fit_on=4)
    x = torch.randn(3, 8)
    assert torch.equal(there_and_back(codec, x), x)
    assert not codec.is_lossless(x.dtype)
    early = codec.encode("hidden", x)
    codec.fit(torch.randn(4, 8))
    assert torch.equal(codec.decode("hidden", early, x.dtype), x)


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned_is_copied_to_a_device_once(codec: Codec) -> None:
    elsewhere = torch.device("meta")
    copies = codec._on(elsewhere)
    assert {part.device for part in copies.values()} == {elsewhere}
    assert codec._on(elsewhere) is copies


def test_who_is_lossless() -> None:
    expected = {"none": FLOATS, "fp16": [torch.float16], "int8": [], "pca": [], "autoencoder": []}
    assert {name: [dtype for dtype in FLOATS if CODECS[name]().is_lossless(dtype)] for name in expected} == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_half_stays_finite(dtype: torch.dtype) -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, 1e38, -1e38, torch.inf, -torch.inf], dtype=dtype)
    back = there_and_back(Half(), x, torch.float32)
    assert back.tolist() == [65504.0] * 4 + [-65504.0, 65504.0, -65504.0]
    assert there_and_back(Half(), torch.tensor([torch.nan], dtype=dtype)).isnan().all()
    assert torch.equal(there_and_back(Half(), x.half()), x.half())  # its own type passes untouched


def test_half_halves_and_int8_quarters() -> None:
    x = torch.randn(4, 768)
    nbytes = {
        name: sum(part.nbytes for part in CODECS[name]().encode("hidden", x).values())
        for name in ("none", "fp16", "int8")
    }
    assert nbytes == {"none": x.nbytes, "fp16": x.nbytes // 2, "int8": x.nbytes // 4 + 4 * 4}


def check_bound(x: Tensor) -> None:
    """The bound that the docstring of `Int8` states."""
    largest = x.double().abs().amax(-1, keepdim=True)
    limit = torch.where(largest < 1.5e-36, 6e-39, largest / 254 * 1.0001)
    assert ((there_and_back(Int8(), x).double() - x.double()).abs() <= limit).all()


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(rows=st.lists(st.lists(FINITE, min_size=4, max_size=4), min_size=1))
def test_int8_keeps_its_bound(rows: list[list[float]]) -> None:
    check_bound(torch.tensor(rows))


def test_int8_keeps_its_bound_between_two_steps_and_at_any_scale() -> None:
    check_bound(torch.linspace(-1, 1, 50_001) * torch.rand(10, 1).exp())  # among so many some are half a step off
    x = torch.randn(84, 16) * 10.0 ** torch.arange(-46, 38)[:, None]
    check_bound(x)
    scale = Int8().encode("hidden", x)["hidden.scale"]
    assert (scale > 0).all() and scale.isfinite().all()  # none divides zero by zero


def test_int8_scales_each_row_alone() -> None:
    x = torch.tensor([[1e-6, 2e-6], [1.0, -3.0], [1e6, 5e5], [0.0, 0.0]])
    parts, back = Int8().encode("hidden", x), there_and_back(Int8(), x)
    assert parts["hidden"].dtype == torch.int8
    assert (parts["hidden.scale"].dtype, parts["hidden.scale"].shape) == (torch.float32, (4, 1))
    assert torch.equal(back[3], x[3])
    assert torch.equal(there_and_back(Int8(), x[1:2]), back[1:2])


def test_int8_does_not_round_over_the_end() -> None:
    x = torch.tensor([[torch.finfo(torch.float32).max, -1.0]])
    assert there_and_back(Int8(), x).isfinite().all()
    check_bound(x)
    assert there_and_back(Int8(), x, torch.float16).tolist() == [[65504.0, 0.0]]


NOT_PACKED = {
    **{
        f"{value} in {dtype}": (torch.tensor([1, value], dtype=dtype), str(value))
        for value in (torch.nan, torch.inf, -torch.inf)
        for dtype in FLOATS
    },
    "too large for float32": (torch.tensor([1, 1e300], dtype=torch.float64), "finite in float32"),
    "no row": (torch.tensor(1.0), "'hidden'"),
    "empty rows": (torch.ones(3, 0), "'hidden'"),
}


@pytest.mark.parametrize(("x", "message"), NOT_PACKED.values(), ids=NOT_PACKED)
@pytest.mark.parametrize("name", ["int8", *LEARNED])
def test_what_is_no_row_of_finite_numbers_is_refused(name: str, x: Tensor, message: str) -> None:
    for codec in CODECS[name](), ready(name, 2):  # before a fit and after it
        with pytest.raises(ValueError, match=message):
            codec.encode("hidden", x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_lossless_is_so_at_the_ends_of_the_range(name: str, dtype: torch.dtype) -> None:
    codec, info = ready(name, 7), torch.finfo(dtype)
    x = torch.tensor([info.max, -info.max, info.tiny, info.tiny / 4, 0.0, -0.0, 1 + info.eps], dtype=dtype)
    if codec.is_lossless(dtype):
        assert torch.equal(there_and_back(codec, x).view(torch.uint8), x.view(torch.uint8))
