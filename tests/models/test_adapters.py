"""Finding the trunk: by class, by shape, or a refusal that says what was looked for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from llmcache import LLMCache, UnsupportedModelError
from llmcache.models.adapters import ADAPTERS, locate, special_ids
from llmcache.models.arguments import Arguments, can_select_rows, select_rows
from tests.models.checks import repeated
from tests.tiny_models import (
    BARE,
    CLASSIFIERS,
    GENERATORS,
    STRANGE_GENERATORS,
    STRANGERS,
    VOCABULARY,
    build,
    llama,
    padded,
    states,
    tokens,
)


class Mix(nn.Module):
    """What every toy layer does to hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)


class Toy(nn.Module):
    """A trunk of toy layers, called in a way of its own: with layer, hidden states and mask."""

    def __init__(self, make: Callable[[], nn.Module], call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.words = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.call = call

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = self.call(layer, hidden, attention_mask)
        return hidden


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.Sequential(), nn.TransformerEncoderLayer(8, 2, batch_first=True)]
)
def test_a_refusal_says_what_was_looked_for(model: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        LLMCache.wrap(model)
    for part in (type(model).__name__, "BertModel", "input_ids", "hidden_states", "layers", "register_adapter"):
        assert part in str(refusal.value)
    assert isinstance(refusal.value, TypeError)


def test_a_model_without_layers_is_refused() -> None:
    model = build(BARE["bert"])
    model.encoder.layer = nn.ModuleList()
    with pytest.raises(UnsupportedModelError, match="no layers"):
        LLMCache.wrap(model)


@pytest.mark.parametrize("family", BARE)
def test_the_trunk_of_every_family(family: str) -> None:
    trunk = locate(build(BARE[family]))
    assert trunk.depth == 4
    assert trunk.adapter.family in (family, "MPNetModel", "DebertaV2Model")
    if family in CLASSIFIERS:
        model = build(CLASSIFIERS[family])
        trunk = locate(nn.ModuleDict({"inner": model}))
        assert trunk.adapter.family == family
        assert trunk.module is not model


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_of_an_encoder_decoder_the_encoder(family: str) -> None:
    model = build(GENERATORS[family])
    assert locate(model).module is model.get_encoder()


@pytest.mark.parametrize("family", ["marian", "mbart"])
def test_of_an_unknown_encoder_decoder_the_encoder(family: str) -> None:
    model = build(STRANGE_GENERATORS[family])
    inputs = padded([6, 4])
    settings = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**inputs, **settings)
    assert locate(model).module is model.get_encoder()
    cache = LLMCache.wrap(model)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **settings), plain)
    assert cache.stats().hits == {"exact": 2}


def test_of_an_unknown_decoder_the_trunk_and_not_the_head() -> None:
    model = build(STRANGE_GENERATORS["qwen3"])
    assert locate(model).module is model.model


def test_recognised_by_shape() -> None:
    model = build(STRANGERS["convbert"])
    trunk = locate(model)
    assert type(trunk.module).__name__ not in {name for adapter in ADAPTERS.values() for name in adapter.trunks}
    inputs = padded([6, 4])
    stats = repeated(model, inputs, read=lambda output: states(output)[inputs["attention_mask"].bool()])
    assert (stats.hits, stats.n_layers_skipped) == ({"exact": 2}, 2 * trunk.depth)


def test_layers_that_hand_on_more_than_hidden_states_are_never_skipped() -> None:
    model = build(STRANGERS["megatron"])
    cache = LLMCache.wrap(model)
    for _ in range(3):
        cache(**padded([6, 4]))
    stats = cache.stats()
    assert (stats.n_hits, stats.bypassed, stats.n_layers_skipped) == (0, {"unknown_output": 4}, 0)


def test_layers_that_return_lists_are_skipped_by_lists() -> None:
    settings = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    model = build(lambda: tf.OpenAIGPTModel(tf.OpenAIGPTConfig(**settings)))
    calls = [tokens(2, 6), tokens(2, 6), torch.cat([tokens(2, 6)[1:], tokens(1, 6, seed=1)])]
    with torch.inference_mode():
        plain = [states(model(ids)) for ids in calls]
    cache = LLMCache.wrap(model)
    for ids, expected in zip(calls, plain, strict=True):
        torch.testing.assert_close(states(cache(ids)), expected, atol=1e-5, rtol=1e-5)
    stats = cache.stats()
    assert (stats.hits, stats.n_layers_skipped, stats.errors) == ({"exact": 3}, 9, 0)


def test_layers_that_return_something_else_are_never_skipped() -> None:
    class Wide(Mix):
        def forward(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"states": hidden_states + self.mix(hidden_states)}

    model = Toy(Wide, lambda layer, hidden, mask: layer(hidden)["states"]).eval()
    cache = LLMCache.wrap(model)
    plain = cache(torch.arange(5)[None])
    for _ in range(2):
        assert torch.equal(cache(torch.arange(5)[None]), plain)
    stats = cache.stats()
    assert (stats.bypassed, stats.n_stored, stats.errors) == ({"unknown_output": 2}, 0, 0)


def test_a_class_that_only_has_the_name_of_one_of_transformers_is_told_by_its_shape() -> None:
    """As code that comes with a checkpoint is: its tokens may see later ones."""
    named = tf.LlamaModel

    class LlamaModel(named):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **more: Any) -> Any:
            seen = torch.ones(len(input_ids), 1, input_ids.shape[1], input_ids.shape[1], dtype=torch.bool)
            return super().forward(input_ids, attention_mask=seen, past_key_values=past_key_values, **more)

    model = build(lambda: LlamaModel(llama()))
    first = tokens(1, 40)
    second = torch.cat([first[:, :32], tokens(1, 8, seed=1)], dim=1)
    with torch.inference_mode():
        plain = states(model(second))
        causal = states(named.forward(model, second))
    assert (plain - causal).abs().max() > 0.1
    with LLMCache.wrap(model) as cache:
        cache(first)
        torch.testing.assert_close(states(cache(second)), plain, atol=1e-5, rtol=1e-5)
        assert cache.stats().n_hits == 0
        assert torch.equal(states(cache(second)), plain)
        assert cache.stats().hits == {"exact": 1}


def test_a_model_whose_vocabulary_is_not_told_is_refused() -> None:
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(UnsupportedModelError, match=r"CanineModel: .* vocab_size"):
        LLMCache.wrap(tf.CanineModel(tf.CanineConfig(**settings)).eval())


def test_special_ids_come_from_tokenizer_config_or_family() -> None:
    assert special_ids(locate(build(GENERATORS["gpt2"]))) == (0, 1, 2)
    trunk = locate(build(BARE["bert"]))
    assert special_ids(trunk) == (0,)  # 101 and its like are beyond this small vocabulary
    assert special_ids(trunk, SimpleNamespace(all_special_ids=[3, 1, 3])) == (1, 3)


def test_rows_are_selected_where_there_is_one_a_request() -> None:
    rows = torch.tensor([2, 0])
    x = torch.arange(12.0).reshape(3, 4)
    shared = torch.zeros(1, 4)

    def forward(hidden_states: object, position_embeddings: object, *more: object, **rest: object) -> None: ...

    arguments = Arguments(forward)
    table = torch.zeros(3, 9)
    args, kwargs = select_rows(
        arguments, (x, (x, None), table), {"attention_mask": shared, "rel_embeddings": table, "text": "t"}, rows, 3
    )
    assert torch.equal(args[0], x[[2, 0]])
    assert torch.equal(args[1][0], x[[2, 0]])
    assert args[1][1] is None
    assert args[2] is table
    assert kwargs["attention_mask"] is shared
    assert kwargs["rel_embeddings"] is table
    assert kwargs["text"] == "t"


def test_a_table_of_unknown_meaning_forbids_taking_rows_out() -> None:
    x, arguments = torch.zeros(3, 4), Arguments(lambda hidden_states: None)
    assert can_select_rows(arguments, (x,), {"rel_embeddings": x, "mask": x[:1]}, 3)
    assert not can_select_rows(arguments, (x,), {"slopes": x}, 3)
    assert not can_select_rows(arguments, (x,), {"slopes": (None, x)}, 3)
    assert not can_select_rows(arguments, (x,), {"slopes": torch.zeros(6, 1, 4)}, 3)  # by head
    assert can_select_rows(Arguments(lambda signal: None), (x,), {"slopes": x[:1]}, 3)
    assert can_select_rows(arguments, (x[:1],), {"slopes": x[:1]}, 1)


def test_rows_are_taken_out_of_lists_and_tuples() -> None:
    x = torch.arange(6).reshape(3, 2)
    arguments = Arguments(lambda hidden_states: None)
    rotary: dict[str, Any] = {"position_embeddings": [x, (x, None)], "past_key_values": object()}
    assert can_select_rows(arguments, (x,), rotary, 3)
    _, kwargs = select_rows(arguments, (x,), rotary, torch.tensor([2]), 3)
    (first, (second, nothing)) = kwargs["position_embeddings"]
    assert torch.equal(first, x[2:]) and torch.equal(second, x[2:]) and nothing is None


@pytest.mark.parametrize("name", ["attention_mask", "something"])
def test_rows_are_not_taken_out_of_objects(name: str) -> None:
    """Flex attention gets its mask as one, and reads beyond it where rows are fewer than it is for."""

    class Mask:
        def __init__(self, valid: torch.Tensor) -> None:
            self.valid = valid

    class Masked(Mix):
        def forward(self, hidden_states: torch.Tensor, **passed: Mask) -> torch.Tensor:
            weights = passed[name].valid.unsqueeze(-1).float()
            return hidden_states + self.mix((hidden_states * weights).mean(1, keepdim=True))

    model = Toy(Masked, lambda layer, hidden, mask: layer(hidden, **{name: Mask(mask)})).eval()
    ids = tokens(4, 6)
    mask = torch.ones_like(ids)
    mask[1:, 4:] = 0
    with torch.inference_mode():
        plain = model(ids, mask)
    cache = LLMCache.wrap(model)
    for rows in ([0, 1], [0, 2, 1], [3, 1], [2, 3]):
        torch.testing.assert_close(cache(ids[rows], mask[rows]), plain[rows], atol=1e-5, rtol=1e-5)
    stats = cache.stats()
    assert (stats.hits, stats.errors) == ({"exact": 2}, 0)  # of the last call, none of whose rows is run
