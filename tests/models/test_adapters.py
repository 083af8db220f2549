"""`locate` finds the trunk by class or by shape, or refuses and says what it looked for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from llmcache import LLMCache, UnsupportedModelError
from llmcache.models.adapters import locate, special_ids
from llmcache.models.arguments import Arguments, can_select_rows, select_rows
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, llama, states, tokens


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


def test_a_class_that_only_has_the_name_of_one_of_transformers_is_told_by_its_shape() -> None:
    """A checkpoint's own code may reuse a class name: here tokens attend to later ones."""
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
