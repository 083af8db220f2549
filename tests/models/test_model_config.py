"""`setting` reads a config past transformers' own access, and agrees with `getattr`."""

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from llmcache.models.model_config import setting

NAMES = ("output_attentions", "num_hidden_layers", "is_decoder", "return_dict", "_attn_implementation", "new")


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2", "t5", "qwen2_moe"])
def test_it_says_what_getattr_says_before_and_after_edits(family: str) -> None:
    config = AutoConfig.for_model(family)

    def check() -> None:
        for name in NAMES:
            assert setting(config, name, "none") == getattr(config, name, "none"), name

    check()
    config.num_hidden_layers, config.output_hidden_states, config.new = 3, True, "new"
    config._attn_implementation = "eager"  # which allows attentions
    config.output_attentions = True
    check()
    assert (setting(config, "num_hidden_layers"), setting(config, "output_attentions")) == (3, True)
    del config.new
    check()


@pytest.mark.parametrize("module", ["transformers.odd", "of_the_user"])
def test_what_a_class_makes_of_an_attribute_counts(module: str) -> None:
    class Odd(PreTrainedConfig):
        model_type = "odd"
        in_class = "of the class"

        @property
        def num_hidden_layers(self) -> int:
            return -self.held

        @property
        def another_name(self) -> Any:
            return self.in_class

    for part in vars(Odd).values():
        if isinstance(part, property):
            part.fget.__module__ = module
    config = Odd()
    config.held = 4
    assert setting(config, "num_hidden_layers") == -4 and setting(config, "none") is None
    assert setting(config, "in_class") == setting(config, "another_name") == "of the class"
    config.in_class = "its own"
    assert setting(config, "in_class") == setting(config, "another_name") == "its own"


def test_a_config_may_answer_as_it_likes() -> None:
    class Answering:
        def __getattr__(self, name: str) -> str:
            return name.upper()

    assert setting(Answering(), "held") == "HELD" and setting(None, "held", "none") == "none"
