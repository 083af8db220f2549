"""If rows of a call affect each other, the call is stored and found as a whole, and calls share nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import CalibrationError, ConfigError, LLMCache
from tests.contract.judge import ask, check_calls, check_same, wrapped
from tests.contract.models import SIZES
from tests.contract.streams import ask as rungs_of
from tests.contract.streams import batched, classifier, requests
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, tokens

Make = Callable[[], nn.Module]
Edit = Callable[[nn.Module], nn.Module]


def int8(model: nn.Module) -> nn.Module:
    quantised: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)
    return quantised


class BatchStatistics(nn.BatchNorm1d):
    """Normalises by statistics of the call, even in eval mode."""

    def __init__(self, **more: Any) -> None:
        super().__init__(32, **{"track_running_stats": False, **more})

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


class LargestOfAll(nn.Module):
    """Rounds to 8 bits by the largest value of the call, as a user's quantised layers do."""

    def forward(self, hidden: Tensor) -> Tensor:
        scale = hidden.abs().max() / 127
        return (hidden / scale).round() * scale


class FirstComeFirstServed(nn.Module):
    """Halves all but the first tokens of a call, as experts with a capacity do."""

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        n_before = (flat[:, 0] > 0).cumsum(0)
        return torch.where((n_before < 9)[:, None], flat, flat * 0.5).view_as(hidden)


def with_part(part: Callable[[], nn.Module]) -> Edit:
    """Return an edit that puts a part into the first layer of a BERT or a Llama."""

    def edit(model: Any) -> nn.Module:
        if hasattr(model, "bert"):
            model.bert.encoder.layer[0].output.dropout = part()
        else:
            model.model.layers[0].mlp.act_fn = nn.Sequential(model.model.layers[0].mlp.act_fn, part())
        return model.eval()  # type: ignore[no-any-return]

    return edit


def edited(make: Make, edit: Edit) -> Make:
    return lambda: edit(make())


pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization:DeprecationWarning", "ignore:.*quantized:UserWarning"
)

BERT, LLAMA = CLASSIFIERS["bert"], GENERATORS["llama"]
MODELS: dict[str, Make] = {
    "int8": lambda: int8(build(BERT)),
    "int8, decoder": lambda: int8(build(LLAMA)),
    "batch statistics": edited(BERT, with_part(BatchStatistics)),
    "largest of all": edited(BERT, with_part(LargestOfAll)),
    "largest of all, decoder": edited(LLAMA, with_part(LargestOfAll)),
    "capacity": edited(BERT, with_part(FirstComeFirstServed)),
    # Attends both ways; causally as soon as anything in the call is padded.
    "aimv2": lambda: tf.Aimv2TextModel(tf.Aimv2TextConfig(**SIZES)),
    "nystroemformer": lambda: tf.NystromformerForSequenceClassification(
        tf.NystromformerConfig(**SIZES, num_landmarks=4, segment_means_seq_len=16)
    ),
}
A, B, C = (tokens(1, 16, seed)[0] for seed in range(3))
#: Calls that share rows: pairs, permutations, duplicates, a row alone. All but the last model get padded ones too.
CALLS = [{"input_ids": torch.stack(rows)} for rows in ((A, B), (A, C), (B, A), (A,), (A, A), (A, B, C), (A, A, B))]
PADDED = [padded([9]), padded([9, 4]), padded([9, 7]), padded([4]), padded([9, 4], left=True), padded([9, 12])]


@pytest.mark.parametrize("name", MODELS)
def test_calls_that_share_rows_are_answered_as_by_the_plain_model(name: str) -> None:
    """Same call, same output at every position, and bit for bit where shapes are the same (inside/reuse.md)."""
    with wrapped(MODELS[name]) as (cache, plain):
        hits = check_calls(cache, plain, *CALLS, *(() if name == "nystroemformer" else PADDED), exact=True)
        assert hits >= len(CALLS)  # repeats of whole calls


def one_scale(seed: int) -> Callable[..., Tensor]:
    """Return a callable that rounds token vectors, some of them large, by the largest of the call."""
    rng = torch.Generator().manual_seed(seed)
    table, weight = torch.randn(99, 16, generator=rng) ** 3, torch.randn(16, 5, generator=rng)

    def call(input_ids: Tensor) -> Tensor:
        hidden = table[input_ids]
        scale = hidden.abs().max() / 127
        return ((hidden / scale).round() * scale).mean(dim=1) @ weight

    return call


@pytest.mark.parametrize("seed", range(6))
def test_a_callable_with_one_scale_a_call_is_seen_whichever_row_decides_it(seed: int) -> None:
    """Callables are tried like trunks: calls that share rows get the answers of the callable (inside/reuse.md)."""
    call = one_scale(seed)
    cache = LLMCache.wrap(call, digest=f"one scale {seed}")
    assert check_calls(cache, call, *CALLS, exact=True) >= len(CALLS)


@pytest.mark.parametrize(
    ("edit", "settings"),
    [(int8, {}), (with_part(LargestOfAll), {}), (with_part(BatchStatistics), {"tau": -1.0})],
    ids=["int8", "part", "tau"],
)
def test_a_model_that_comes_to_be_so_after_wrapping_is_seen(edit: Edit, settings: dict[str, Any]) -> None:
    """After weights are quantised or modules replaced, nothing stale or similar is served (inside/reuse.md)."""
    with wrapped(BERT, **settings) as (cache, plain):
        for call in CALLS:
            ask(cache.model, **call)
        assert cache.stats().n_hits
        for model in (cache.model, plain):
            edit(model)
        check_calls(cache, plain, *CALLS, exact=True)


def test_a_norm_that_learns_while_the_model_does_not_is_computed() -> None:
    """The model in training mode, in part or as a whole, bypasses the cache (inside/reuse.md)."""
    part = with_part(lambda: BatchStatistics(track_running_stats=True, momentum=0.0))
    with wrapped(edited(BERT, part)) as (cache, plain):
        assert check_calls(cache, plain, *CALLS) > 0
        for one in (cache.model, plain):
            next(part for part in one.modules() if isinstance(part, nn.BatchNorm1d)).train()
        assert check_calls(cache, plain, *CALLS, exact=True) == 0


def test_a_decoder_s_prefixes_and_steps_are_those_of_the_plain_model() -> None:
    """`generate()` gives the plain model's tokens and logits, whatever came before (docs/prefix.md)."""
    prompts = [torch.cat([tokens(1, 40, 7), tokens(1, n, n)], dim=1) for n in (3, 5, 3)]
    how = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with wrapped(MODELS["largest of all, decoder"]) as (cache, plain):
        for prompt in (*prompts, prompts[0].repeat(2, 1)):
            found, expected = (one.generate(prompt, **how) for one in (cache.model, plain))
            assert torch.equal(found.sequences, expected.sequences)
            check_same(found.logits, expected.logits, exact=True)


def test_a_threshold_is_refused() -> None:
    """`wrap` refuses settings that do not suit the model, with the reason (inside/reuse.md)."""
    for name in ("int8", "batch statistics"):
        with pytest.raises(ConfigError, match=r"affect each other.*leave tau out"):
            LLMCache.wrap(MODELS[name](), tau=0.9)


@pytest.mark.parametrize("is_learned", [True, False], ids=["learned", "calibrated"])
def test_calls_of_one_row_are_served_approximately_and_others_as_a_whole(is_learned: bool) -> None:
    """Calibrated reuse learns from, and serves, calls of one row; others are the plain model's (inside/reuse.md)."""
    call, ids, new = one_scale(7), requests(300)[0], requests(40, seed=1)[0]
    settings = {"max_drop": 0.05, "auto_bypass": False, "audit": {"rate": 1.0, "share": 1.0, "in_background": False}}
    settings |= {"learn": 300} if is_learned else {}
    with LLMCache.wrap(call, digest="one scale", **settings) as cache:
        if is_learned:
            cache(input_ids=new)  # several rows: nothing is learned from them
            for row in ids:
                cache(input_ids=row[None])
            cache.drain()
        else:
            with pytest.raises(CalibrationError, match="request 0 has 50 rows, and rows of a call affect each other"):
                cache.calibrate(batched(ids))
            cache.calibrate([{"input_ids": row[None]} for row in ids])
        n_served = sum(rung == "semantic" for row in new for rung in rungs_of(cache, row[None]))
        assert n_served > 10
        for rows in (new, new.flip(0), new):
            assert torch.equal(cache(input_ids=rows), call(rows))
            assert len({one.rung for one in cache.last} - {"semantic"}) == 1
        cache.drain()
        found = cache.stats().audit
        assert found is not None and found.n_recomputed == found.n_drawn == n_served and cache.stats().errors == 0


@pytest.mark.slow
def test_a_padded_row_is_audited_with_its_padding() -> None:
    """The audit recomputes the request that was served, whose answer its padding changes (docs/calibration.md)."""
    ids, new = requests(150)[0], nn.functional.pad(requests(40, seed=1)[0], (0, 3))
    audit = {"rate": 1.0, "share": 1.0, "in_background": False}
    model = with_part(LargestOfAll)(classifier())
    with LLMCache.wrap(model, max_drop=0.1, audit=audit, auto_bypass=False) as cache:
        cache.calibrate([{"input_ids": row[None]} for row in ids])
        for row in new:
            cache(input_ids=row[None], attention_mask=(row > 0).long()[None])
        cache.drain()
        found = cache.stats().audit
        assert found is not None and found.n_recomputed == found.n_drawn > 10 and cache.stats().errors == 0


def test_part_of_a_call_is_not_served_alone() -> None:
    """A call with an evicted row is computed as a whole (inside/reuse.md)."""
    with wrapped(MODELS["largest of all"], max_entries=3) as (cache, plain):
        check_calls(cache, plain, *CALLS, exact=True, repeats=3)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (CLASSIFIERS["bert"], torch.float32),
        (CLASSIFIERS["bert"], torch.float64),
        (CLASSIFIERS["bert"], torch.bfloat16),
        (BARE["mpnet"], torch.float16),
        (GENERATORS["gpt2"], torch.float32),
        (GENERATORS["gpt2"], torch.bfloat16),
    ],
)
def test_rounding_alone_keeps_rows_apart(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """Rounding couples no rows: batches are served in part, in every dtype (inside/reuse.md, what is equal to what)."""
    with wrapped(lambda: make().to(dtype)) as (cache, _):
        ask(cache.model, **CALLS[3])
        ask(cache.model, **CALLS[2])
        assert [row.rung for row in cache.last] == [None, "exact"]
