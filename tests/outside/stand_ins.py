"""Replaces the modules of transformers' tests that its common mixins import and its source archive lacks.

Tests of `generate()` use a wrapped model, twice, and a plain copy, and expect the same tokens. The copy is made before
`eval`, in which the judge wraps models. Tests of export are left out: they are slow, and test graphs, not caches.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import set_seed

#: Options of `generate()` by test; besides, `padding`: its side, and `is_assisted`: whether a copy drafts for one row.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy_left_padded": {"padding": slice(0, 2)},
    "greedy_right_padded": {"padding": slice(-2, None)},
    "greedy_without_kv": {"use_cache": False},
    "sample": {"do_sample": True, "top_k": 5},
    "beam_search": {"num_beams": 2, "num_return_sequences": 2},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "static_cache": {"cache_implementation": "static", "disable_compile": True},
    "prompt_lookup": {"n_rows": 1, "prompt_lookup_num_tokens": 2},
    "assisted": {"n_rows": 1, "is_assisted": True},
}


class GenerationTesterMixin:
    """Tests of every class in `all_model_classes` that generates."""

    def _generates_alike(
        self, n_rows: int = 3, padding: slice = slice(0), is_assisted: bool = False, **how: Any
    ) -> None:
        for model_class in self.all_generative_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
                config.is_decoder = True  # BERT's relatives: else tokens attend to later ones
            set_seed(0)
            model = model_class(config)
            plain = nn.Module.eval(copy.deepcopy(model))
            ids = inputs["input_ids"][:n_rows].clamp(min=5)
            mask = torch.ones_like(ids)
            mask[0, padding] = 0
            prompt = {"input_ids": ids.masked_fill(mask == 0, config.pad_token_id), "attention_mask": mask}
            more = {"assistant_model": copy.deepcopy(plain)} if is_assisted else {}
            expected = _generate(plain, prompt, **how, **more)
            model.eval()
            for _ in range(2):
                self.assertEqual(_generate(model, prompt, **how, **more).tolist(), expected.tolist())


class ExportTesterMixin:
    """Adds no tests."""


def _generate(model: Any, prompt: dict[str, Tensor], **how: Any) -> Tensor:
    set_seed(0)
    tokens: Tensor = model.generate(**prompt, **{"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, **how})
    return tokens


def _test(how: dict[str, Any]) -> Callable[[Any], None]:
    return lambda self: self._generates_alike(**how)


for _name, _how in WAYS.items():
    setattr(GenerationTesterMixin, f"test_{_name}_generate", _test(_how))
