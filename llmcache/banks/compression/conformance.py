"""What every codec has to do, as a check for classes from outside the library and for its own."""

from collections.abc import Callable

import torch
from torch import Tensor

from llmcache.banks.compression.base import Codec
from llmcache.registry import refuses, rule

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_codec(make: Callable[[], Codec], width: int = 8, seed: int = 0) -> None:
    """Fit it if it learns, then pack tensors whose last dimension is `width`, of every type that models have."""
    codec, generator = make(), torch.Generator().manual_seed(seed)
    are_lossless = {dtype: codec.is_lossless(dtype) for dtype in _FLOATS}
    x = torch.randn(3, width, generator=generator)
    early = codec.encode("hidden", x)
    before = codec.decode("hidden", early, x.dtype)
    if codec.n_fit:
        drawn = torch.get_rng_state()
        codec.fit(torch.randn(codec.n_fit, width, generator=generator))
        rule(codec.n_fit == 0, "n_fit: 0 once it was fitted")
        rule(torch.equal(torch.get_rng_state(), drawn), "fit: the global random numbers are left alone")
    after = codec.decode("hidden", early, x.dtype)
    rule(torch.equal(before, after), "decode: what was encoded before the fit comes back as before")
    _check_packed(codec, torch.randn(2, 3, width, generator=generator))
    for dtype, is_lossless in are_lossless.items():
        for shape in ((width,), (3, 4, width), (1, width), (0, width)):
            x = (torch.randn(shape, generator=generator) + 3).to(dtype)
            back = codec.decode("hidden", codec.encode("hidden", x), dtype)
            rule(back.dtype == dtype and back.shape == x.shape, "decode: the shape and type of what was encoded")
            rule(not is_lossless or torch.equal(back, x), "is_lossless: every bit comes back, before a fit and after")
        if is_lossless:
            info = torch.finfo(dtype)
            hard = torch.tensor([info.max, -info.max, info.tiny, info.tiny / 4, 0.0, -0.0, 1 + info.eps], dtype=dtype)
            back = codec.decode("hidden", codec.encode("hidden", hard), dtype)
            rule(torch.equal(back.view(torch.uint8), hard.view(torch.uint8)), "is_lossless: at the ends of the range")
    other, x = make(), torch.randn(3, width, generator=generator)
    other.restore(codec.state())
    one, two = (which.decode("hidden", which.encode("hidden", x), x.dtype) for which in (codec, other))
    rule(other.n_fit == 0 and torch.equal(one, two), "restore: packs as the one whose state it takes up")


def _check_packed(codec: Codec, x: Tensor) -> None:
    """What a caller passes stays his, and names tell what is whose."""
    mine = x.clone().requires_grad_()
    packed = codec.encode("hidden", mine) | codec.encode("keys", x[1])
    rule(not any(part.requires_grad for part in packed.values()), "encode: no gradient in the result")
    rule(torch.equal(mine, x), "encode: the tensor is not modified")
    rule({name.split(".")[0] for name in packed} == {"hidden", "keys"}, "encode: names begin with the name given")
    rule("keys" in packed, "encode: but for `hidden`, the name given is itself one of those in the result")
    kept = {name: part.clone() for name, part in packed.items()}
    for name, given in (("hidden", x), ("keys", x[1])):
        alone = codec.decode(name, codec.encode(name, given), given.dtype)
        rule(torch.equal(codec.decode(name, packed, given.dtype), alone), "decode: other names do not matter")
        rule(codec.decode(name, packed, torch.bfloat16).dtype == torch.bfloat16, "decode: the type asked for")
    rule(all(torch.equal(part, kept[name]) for name, part in packed.items()), "decode: tensors are not modified")
    turned = x.transpose(0, 1)
    back = [codec.decode("hidden", codec.encode("hidden", one), x.dtype) for one in (turned, turned.contiguous())]
    rule(torch.equal(*back), "encode: layout in memory does not matter")
    with refuses(KeyError, "decode: KeyError where the name is missing"):
        codec.decode("values", packed, x.dtype)
    for wrong in (torch.arange(4), torch.tensor([True]), torch.zeros(2, dtype=torch.complex64)):
        with refuses(ValueError, f"encode: ValueError for {wrong.dtype}"):
            codec.encode("hidden", wrong)
