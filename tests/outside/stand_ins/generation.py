"""Replaces transformers' `tests/generation/test_utils.py`, which its source archive lacks: tests of `generate()`.

Each calls a wrapped model, twice, and a plain copy, and expects the same tokens and scores. The copy is made before
`eval`, in which the judge wraps models.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, set_seed


class GenerationTesterMixin:
    """Tests of every class in `all_model_classes` that generates."""

    max_new_tokens = 5

    def test_greedy_generate(self) -> None:
        self._generates_alike(do_sample=False)

    def test_greedy_generate_without_kv(self) -> None:
        self._generates_alike(do_sample=False, use_cache=False)

    def test_sample_generate(self) -> None:
        self._generates_alike(do_sample=True, top_k=5)

    def test_beam_search_generate(self) -> None:
        self._generates_alike(do_sample=False, num_beams=2, num_return_sequences=2)

    def test_beam_sample_generate(self) -> None:
        self._generates_alike(do_sample=True, num_beams=2)

    def test_generate_left_padded(self) -> None:
        self._generates_alike(padding="left", do_sample=False)

    def test_generate_right_padded(self) -> None:
        self._generates_alike(padding="right", do_sample=False)

    def test_generate_with_static_cache(self) -> None:
        self._generates_alike(do_sample=False, cache_implementation="static", disable_compile=True)

    def test_prompt_lookup_generate(self) -> None:
        self._generates_alike(rows=1, do_sample=False, prompt_lookup_num_tokens=2)

    def test_assisted_generate(self) -> None:
        for model, plain, inputs in self._models(rows=1):
            assistant = copy.deepcopy(plain).eval()
            self._compare(model, plain, inputs, do_sample=False, assistant_model=assistant)

    def test_scores_and_logits(self) -> None:
        for model, plain, inputs in self._models():
            asked = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
            for _ in range(2):
                ours = self._generate(model, inputs, do_sample=False, **asked)
                theirs = self._generate(plain, inputs, do_sample=False, **asked)
                for name in ("scores", "logits"):
                    for mine, other in zip(ours[name], theirs[name], strict=True):
                        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)

    def test_continue_from_past_key_values(self) -> None:
        for model, plain, inputs in self._decoders():
            asked = {"do_sample": False, "return_dict_in_generate": True}
            for _ in range(2):
                ours, theirs = (self._generate(one, inputs, **asked) for one in (model, plain))
                again = [self._continue(one, inputs, done) for one, done in ((model, ours), (plain, theirs))]
                self.assertEqual(again[0].tolist(), again[1].tolist())

    def test_prompt_that_grows(self) -> None:
        for model, plain, inputs in self._decoders(rows=1):
            for _ in range(3):
                ours, theirs = (self._generate(one, inputs, do_sample=False) for one in (model, plain))
                self.assertEqual(ours.tolist(), theirs.tolist())
                inputs = {"input_ids": theirs, "attention_mask": torch.ones_like(theirs)}

    def test_forward_with_logits_to_keep(self) -> None:
        for model, plain, inputs in self._decoders():
            if "logits_to_keep" not in inspect.signature(type(model).forward).parameters:
                continue
            with torch.no_grad():
                whole = plain(**inputs).logits
                for _ in range(2):
                    last = model(**inputs, logits_to_keep=2).logits
                    torch.testing.assert_close(last, whole[:, -2:], atol=1e-5, rtol=1e-5)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _models(self, padding: str = "", rows: int = 0) -> Any:
        """Yield each class's model, a copy that is never wrapped, and a prompt."""
        for model_class in self.all_generative_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
                config.is_decoder = True  # BERT's relatives: else tokens attend to later ones
            set_seed(0)
            model = model_class(copy.deepcopy(config))
            plain = nn.Module.eval(copy.deepcopy(model))
            yield model.eval(), plain, self._prompt(inputs, padding, rows)

    def _decoders(self, rows: int = 0) -> Any:
        for model, plain, inputs in self._models(rows=rows):
            if not model.config.is_encoder_decoder:
                yield model, plain, inputs

    def _prompt(self, inputs: dict[str, Tensor], padding: str, rows: int) -> dict[str, Tensor]:
        ids = inputs["input_ids"][: rows or None].clamp(min=5)
        mask = torch.ones_like(ids)
        if padding:
            at = slice(0, 2) if padding == "left" else slice(-2, None)
            mask[0, at] = 0
            ids = ids.masked_fill(mask == 0, self.model_tester.pad_token_id)
        return {"input_ids": ids, "attention_mask": mask}

    def _generates_alike(self, padding: str = "", rows: int = 0, **how: Any) -> None:
        for model, plain, inputs in self._models(padding, rows):
            self._compare(model, plain, inputs, **how)

    def _compare(self, model: Any, plain: Any, inputs: dict[str, Tensor], **how: Any) -> None:
        expected = self._generate(plain, inputs, **how)
        for _ in range(2):
            self.assertEqual(self._generate(model, inputs, **how).tolist(), expected.tolist())

    def _generate(self, model: Any, inputs: dict[str, Tensor], **how: Any) -> Any:
        set_seed(0)
        lengths = {"max_new_tokens": self.max_new_tokens, "min_new_tokens": self.max_new_tokens}
        return model.generate(**inputs, **lengths, **how)

    def _continue(self, model: Any, inputs: dict[str, Tensor], done: Any) -> Tensor:
        """Continue a finished generation from its K/V."""
        sequences = done.sequences
        mask = torch.ones_like(sequences)
        mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
        past = done.past_key_values
        assert isinstance(past, DynamicCache)
        going_on = {"input_ids": sequences, "attention_mask": mask}
        result: Tensor = self._generate(model, going_on, past_key_values=past, do_sample=False)
        return result
