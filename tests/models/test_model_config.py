"""`setting` reads a config past transformers' own access, and agrees with `getattr`."""

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from llmcache.models.model_config import setting

_NAMES = (
    *("output_attentions", "output_hidden_states", "output_router_logits", "output_cross_attentions"),
    *("num_hidden_layers", "is_decoder", "return_dict", "pad_token_id", "_attn_implementation", "no_such_setting"),
)
_FAMILIES = (
    *("bert", "roberta", "distilbert", "electra", "mpnet", "deberta-v2", "modernbert", "gpt2", "llama", "qwen2"),
    *("qwen3", "mistral", "t5", "bart", "qwen2_moe"),
)


def check(config: Any) -> None:
    assert [setting(config, name, "none") for name in _NAMES] == [getattr(config, name, "none") for name in _NAMES]


@pytest.mark.parametrize("family", _FAMILIES)
def test_it_says_what_getattr_says_before_and_after_edits(family: str) -> None:
    config = AutoConfig.for_model(family)
    check(config)
    config.num_hidden_layers, config.output_hidden_states, config.no_such_setting = 3, True, "new"
    config._attn_implementation = "eager"
    config.output_attentions = True
    check(config)
    assert (setting(config, "num_hidden_layers"), setting(config, "output_attentions")) == (3, True)
    del config.no_such_setting
    check(config)


@pytest.mark.parametrize("module", ["transformers.odd", "of_the_user"])
def test_what_a_class_makes_of_an_attribute_counts(module: str) -> None:
    class Odd(PreTrainedConfig):
        model_type = "odd"
        in_class = "of the class"

        @property
        def num_hidden_layers(self) -> int:
            return -self.held

        @property
        def one_more(self) -> int:
            return self.held + 1

        @property
        def another_name(self) -> Any:
            return self.in_class

        @property
        def made(self) -> Any:
            return not self.held

    for part in vars(Odd).values():
        if isinstance(part, property):
            part.fget.__module__ = module
    config = Odd()
    config.held = 4
    assert setting(config, "num_hidden_layers") == -4 and setting(config, "made") is False
    assert setting(config, "in_class") == "of the class" and setting(config, "none") is None
    assert setting(config, "one_more") == 5 and setting(config, "another_name") == "of the class"
    config.in_class = "its own"
    assert setting(config, "in_class") == setting(config, "another_name") == "its own"


def test_any_object_may_stand_for_a_config() -> None:
    class Slotted:
        __slots__ = ("held",)

    class Answering:
        def __getattr__(self, name: str) -> str:
            return name.upper()

    slotted = Slotted()
    slotted.held = 3  # type: ignore[attr-defined]
    assert setting(slotted, "held") == 3 and setting(slotted, "none", 7) == 7
    assert setting(Answering(), "held") == "HELD" and setting(None, "held", "none") == "none"
