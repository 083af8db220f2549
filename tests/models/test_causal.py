"""A trial finds what a causal trunk allows: cuts, packed rows, padding, rotated keys."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from llmcache.models.adapters import Trunk, locate
from llmcache.models.causal import Causal
from llmcache.models.causal_trial import MOST_OF_FORWARD, look_at
from llmcache.models.rope import rotate
from tests.tiny_models import BARE, CACHE, DECODER, GENERATORS, STRANGE_GENERATORS, Make, build, kv_named, llama, tokens

WINDOWS: dict[str, Any] = {
    "head_dim": 8,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def gemma() -> nn.Module:
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**DECODER, **WINDOWS))


class Placed(tf.LlamaModel):
    """Counts positions from the first token that the mask leaves."""

    @kv_named
    def forward(
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, kv_cache: Any = None, **more: Any
    ) -> Any:
        more[CACHE] = kv_cache
        if position_ids is None and attention_mask is not None and attention_mask.ndim == 2:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        return super().forward(input_ids, attention_mask, position_ids=position_ids, **more)


#: Packs, is placed by columns, how it rotates.
ALLOWED: dict[str, tuple[Make, bool, bool, str]] = {
    "llama": (GENERATORS["llama"], True, True, "half"),
    "added to scores": (lambda: tf.LlamaModel(llama(attn_implementation="eager")), True, True, "half"),
    "positions": (GENERATORS["gpt2"], True, True, ""),
    "positions from the mask": (
        lambda: tf.OPTModel(tf.OPTConfig(**DECODER, ffn_dim=48, word_embed_proj_dim=32)),
        True,
        False,
        "",
    ),
    "rotated by positions from the mask": (lambda: Placed(llama()), True, False, "half"),
    "a window": (STRANGE_GENERATORS["mistral"], True, True, "half"),
    "windows": (gemma, True, True, ""),
    "chunks": (
        lambda: tf.Llama4ForCausalLM(
            tf.Llama4TextConfig(
                **DECODER, attention_chunk_size=32, intermediate_size_mlp=48, head_dim=8, num_local_experts=2
            )
        ),
        True,
        True,
        "",
    ),
    "pairs": (lambda: tf.CohereModel(tf.CohereConfig(**DECODER)), True, True, "interleaved"),
    "part of a key": (STRANGE_GENERATORS["neox"], True, True, "half"),
    "distances": (lambda: tf.BloomModel(tf.BloomConfig(**DECODER)), False, False, ""),
    "a window of columns": (
        lambda: tf.GPTNeoModel(
            tf.GPTNeoConfig(
                **DECODER, num_layers=4, num_heads=4, window_size=8, attention_types=[[["global", "local"], 2]]
            )
        ),
        False,
        True,
        "",
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_families_allow(name: str) -> None:
    make, *expected = ALLOWED[name]
    found = look_at(locate(build(make)))
    assert found.is_causal and found.cuts and found.knows_padding and found.makes_dynamic_cache, found
    assert [found.packs, found.is_by_column, found.rotates] == expected
    assert found.counts_padding == (name in ("positions", "a window of columns"))


class Heedless(tf.LlamaModel):
    """Sees all columns before a token, whatever the mask says."""

    @kv_named
    def forward(self, input_ids: Any, attention_mask: Any = None, kv_cache: Any = None, **more: Any) -> Any:
        return super().forward(input_ids, **{CACHE: kv_cache}, **more)


class Forgetful(tf.LlamaModel):
    """Begins at position 0, whatever the cache holds."""

    @kv_named
    def forward(self, input_ids: Any, attention_mask: Any = None, kv_cache: Any = None, **more: Any) -> Any:
        positions = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, attention_mask, position_ids=positions, **{CACHE: kv_cache}, **more)


class Mixing(tf.LlamaModel):
    """Adds the mean of all tokens to each."""

    @kv_named
    def forward(self, input_ids: Any, attention_mask: Any = None, kv_cache: Any = None, **more: Any) -> Any:
        output = super().forward(input_ids, attention_mask, **{CACHE: kv_cache}, **more)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(1, keepdim=True)
        return output


def test_a_trunk_that_does_not_heed_the_mask_packs_nothing_and_knows_no_padding() -> None:
    found = look_at(locate(build(lambda: Heedless(llama()))))
    assert found.cuts and not found.packs and not found.knows_padding


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Forgetful(llama()), "comes out differently"),
        (lambda: Mixing(llama()), "later ones"),
        (lambda: tf.LlamaModel(llama(is_causal=False)), "later ones"),
        (BARE["bert"], "later ones"),
        (
            lambda: tf.Qwen3NextModel(
                tf.Qwen3NextConfig(
                    **DECODER, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
                )
            ),
            "one column",
        ),
    ],
    ids=["forgetful", "mixing", "both directions", "encoder", "states"],
)
def test_nothing_is_cut_off_where_a_trial_shows_that_it_would_be_wrong(make: Make, told: str) -> None:
    found = look_at(locate(build(make)))
    assert not found.cuts and not found.packs and told in found.reason


def test_a_forward_that_cannot_be_timed_costs_most_and_loses_nothing_else() -> None:
    class Picky(tf.BloomModel):
        """Refuses a single token without K/V."""

        @kv_named
        def forward(self, input_ids: Any, *args: Any, kv_cache: Any = None, **more: Any) -> Any:
            if input_ids.shape[1] == 1 and kv_cache is not None and not kv_cache.get_seq_length():
                raise ValueError("more tokens, please")
            return super().forward(input_ids, *args, **{CACHE: kv_cache}, **more)

    found = look_at(locate(build(lambda: Picky(tf.BloomConfig(**DECODER)))))
    assert found.cuts and not found.packs and found.of_segment == MOST_OF_FORWARD
    assert 0 <= look_at(locate(build(lambda: tf.BloomModel(tf.BloomConfig(**DECODER))))).of_segment <= MOST_OF_FORWARD


def test_wrapping_a_decoder_that_allows_all_takes_six_forwards() -> None:
    trunk, n_forwards = locate(build(GENERATORS["llama"])), 0

    class Counting(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            nonlocal n_forwards
            n_forwards += 1
            return states

    trunk.module.norm = nn.Sequential(trunk.module.norm, Counting())  # type: ignore[assignment,arg-type]
    assert look_at(trunk).packs and n_forwards == 6


def test_an_encoder_that_was_not_known_is_found_to_heed_the_mask() -> None:
    found = look_at(locate(build(lambda: tf.MegatronBertModel(tf.MegatronBertConfig(**DECODER)))))
    assert found.knows_padding and found.counts_padding and not found.is_causal


def test_windows_are_told_by_layer_and_the_model_keeps_its_own() -> None:
    model = build(gemma)
    assert look_at(locate(model)).windows == (20, None, 20, None)
    assert model.config.sliding_window == 20  # type: ignore[union-attr]


def test_a_step_that_sees_another_window_than_the_whole_row_is_found() -> None:
    moshi = tf.MoshiConfig(**DECODER, sliding_window=8, head_dim=8, ffn_dim=48)
    mistral = tf.MistralConfig(**DECODER, sliding_window=8)
    made = build(lambda: tf.MoshiForCausalLM(moshi)), build(lambda: tf.MistralForCausalLM(mistral))
    found = [look_at(locate(model)) for model in made]
    assert [(one.cuts, one.steps) for one in found] == [(True, False), (True, True)]


def test_what_cannot_be_tried_is_not_allowed() -> None:
    trunk: Trunk = locate(build(GENERATORS["llama"]))
    trunk.module.forward = lambda input_ids: None  # type: ignore[assignment]
    assert look_at(trunk) == Causal(reason=look_at(trunk).reason) and "could not be tried" in look_at(trunk).reason


@pytest.mark.parametrize("offset", [3, -3])
def test_rotated_keys_are_those_of_other_positions(offset: int) -> None:
    model: Any = build(lambda: tf.LlamaModel(llama()))
    ids, positions = tokens(1, 9), torch.arange(5, 14)[None]

    def keys(positions: torch.Tensor) -> torch.Tensor:
        kv_cache = tf.DynamicCache()
        with torch.no_grad():
            model(ids, position_ids=positions, past_key_values=kv_cache)
        return kv_cache.layers[1].keys

    rotated = rotate(keys(positions), torch.full_like(ids, offset), model, "half")
    torch.testing.assert_close(rotated, keys(positions + offset), atol=1e-5, rtol=0)
