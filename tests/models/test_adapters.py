"""`locate` finds the trunk by class or by shape, or refuses and says what it looked for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from llmcache import ConfigError, LLMCache, UnsupportedModelError
from llmcache.models.adapters import locate, special_ids
from llmcache.models.arguments import Arguments, can_select_rows, select_rows
from tests.contract.judge import ask, check_same
from tests.tiny_models import (
    BARE,
    CACHE,
    CLASSIFIERS,
    GENERATORS,
    STRANGERS,
    Make,
    build,
    kv_named,
    llama,
    states,
    tokens,
)


def without_layers() -> nn.Module:
    model: Any = BARE["bert"]()
    model.encoder.layer = nn.ModuleList()
    return model


class Stateful(nn.Module):
    def forward(self, hidden_states: Any, state: Any = None) -> Any: ...


class Caching(nn.Module):
    def forward(self, hidden_states: Any, past_key_values: Any = None) -> Any: ...


class Own(nn.Module):
    """Calls the K/V cache as transformers did before 5.24."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.config, self.layers = tf.PretrainedConfig(), nn.ModuleList([layer])

    def forward(self, input_ids: Any, past_key_values: Any = None) -> Any: ...


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
REFUSED: dict[str, tuple[Make, str]] = {
    "a linear layer": (
        lambda: nn.Linear(2, 2),
        "Linear.*BertModel.*input_ids.*layers.*hidden_states.*register_adapter",
    ),
    "layers of torch": (lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True), "TransformerEncoderLayer"),
    "no layers": (without_layers, "no layers"),
    "other states": (lambda: Own(Stateful()), "keeps no other state"),
    "no vocabulary": (lambda: tf.CanineModel(tf.CanineConfig(**SIZES)), r"CanineModel: .* vocab_size"),
}


class Renamed(tf.LlamaModel):
    """As `Own`, but its layers are those of the installed version."""

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **more: Any) -> Any:
        return super().forward(input_ids, **{CACHE: past_key_values}, **more)


if CACHE != "past_key_values":
    told = f"rename the argument to '{CACHE}'"
    REFUSED["K/V by another name"] = lambda: Renamed(llama()), told
    REFUSED["K/V by another name in layers, too"] = lambda: Own(Caching()), told


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_was_looked_for(name: str) -> None:
    make, told = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=told) as refusal:
        LLMCache.wrap(build(make))
    assert isinstance(refusal.value, TypeError)


def test_the_mean_of_a_stranger_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapter"):
        LLMCache.wrap(build(STRANGERS["megatron"]), payload="mean")


@pytest.mark.parametrize("family", BARE)
def test_the_trunk_of_every_family(family: str) -> None:
    trunk = locate(build(BARE[family]))
    assert trunk.depth == 4
    assert trunk.adapter.family in (family, "MPNetModel", "DebertaV2Model")
    if family in CLASSIFIERS:
        model = build(CLASSIFIERS[family])
        trunk = locate(nn.ModuleDict({"inner": model}))
        assert trunk.adapter.family == family and trunk.module is not model


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_of_an_encoder_decoder_the_encoder(family: str) -> None:
    model = build(GENERATORS[family])
    assert locate(model).module is model.get_encoder()


def test_a_class_that_only_has_the_name_of_one_of_transformers_is_told_by_its_shape() -> None:
    """A checkpoint's own code may reuse a class name: here tokens attend to later ones."""
    named = tf.LlamaModel

    class LlamaModel(named):  # type: ignore[misc, valid-type]
        @kv_named
        def forward(self, input_ids: torch.Tensor, kv_cache: Any = None, **more: Any) -> Any:
            seen = torch.ones(len(input_ids), 1, input_ids.shape[1], input_ids.shape[1], dtype=torch.bool)
            return super().forward(input_ids, attention_mask=seen, **{CACHE: kv_cache}, **more)

    model = build(lambda: LlamaModel(llama()))
    first = tokens(1, 40)
    second = torch.cat([first[:, :32], tokens(1, 8, seed=1)], dim=1)
    plain = states(ask(model, second))
    with LLMCache.wrap(model) as cache:
        cache(first)
        for hits in ({}, {"exact": 1}):
            check_same(states(cache(second)), plain)
            assert cache.stats().hits == hits


def test_special_ids_come_from_tokenizer_config_or_family() -> None:
    assert special_ids(locate(build(GENERATORS["gpt2"]))) == (0, 1, 2)
    trunk = locate(build(BARE["bert"]))
    assert special_ids(trunk) == (0,)  # 101 and the like are beyond this small vocabulary
    assert special_ids(trunk, SimpleNamespace(all_special_ids=[3, 1, 3])) == (1, 3)


def test_rows_are_selected_where_there_is_one_a_request() -> None:
    x, shared, table = torch.arange(12.0).reshape(3, 4), torch.zeros(1, 4), torch.zeros(3, 9)

    def forward(hidden_states: object, position_embeddings: object, *more: object, **rest: object) -> None: ...

    args, kwargs = select_rows(
        Arguments(forward),
        (x, (x, [None, x]), table),
        {"attention_mask": shared, "rel_embeddings": table, "text": "t"},
        torch.tensor([2, 0]),
        3,
    )
    check_same(args, (x[[2, 0]], (x[[2, 0]], [None, x[[2, 0]]]), table), exact=True)
    assert kwargs["attention_mask"] is shared and kwargs["rel_embeddings"] is table and kwargs["text"] == "t"


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"rel_embeddings": torch.zeros(3, 4), "mask": torch.zeros(1, 4)}, True),
        ({"position_embeddings": [torch.zeros(3, 4)], "past_key_values": object()}, True),
        ({"slopes": torch.zeros(1, 4)}, True),
        ({"slopes": torch.zeros(3, 4)}, False),  # rows, or entries of a table?
        ({"slopes": (None, torch.zeros(3, 4))}, False),
        ({"slopes": torch.zeros(6, 1, 4)}, False),  # by head
    ],
)
def test_a_table_of_unknown_meaning_forbids_taking_rows_out(kwargs: dict[str, Any], expected: bool) -> None:
    assert can_select_rows(Arguments(lambda hidden_states: None), (torch.zeros(3, 4),), kwargs, 3) == expected
