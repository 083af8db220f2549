"""What a new user tries first: texts, sizes in words, a pipeline; and what the cache says of a call."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from llmcache import ConfigError, LLMCache, WrapError
from tests.contract.judge import ask, check_same, wrapped
from tests.contract.models import fresh
from tests.contract.test_coupled_rows import LargestOfAll
from tests.tiny_models import BARE, CLASSIFIERS, TOKEN_HEADS, build, tokenizer, tokens

TEXTS = ["w5 w6 w7 w8", "w9 w10"]


def test_texts_are_tokenised_and_cut_with_the_tokenizer_that_was_given() -> None:
    words = tokenizer()
    with wrapped(CLASSIFIERS["bert"], tokenizer=words) as (cache, plain):
        for texts in (TEXTS, TEXTS, TEXTS[1]):
            expected = ask(plain, **words(texts, return_tensors="pt", padding=True))
            check_same(cache(texts), expected)
        assert cache.last[0].rung == "exact"
        assert cache("w5 " * 500).logits.isfinite().all()  # longer than the model takes
    with wrapped(BARE["bert"]) as (cache, _), pytest.raises(ConfigError, match=r"tokenizer.*return_tensors"):
        cache("w5 w6")


def test_a_pipeline_is_refused_for_its_model() -> None:
    pipeline = tf.pipeline("text-classification", model=build(CLASSIFIERS["bert"]), tokenizer=tokenizer())
    with pytest.raises(ConfigError, match=r"wrap\(pipeline.model\)"):
        LLMCache.wrap(pipeline)


def test_a_budget_is_given_in_words() -> None:
    for text, n in (("500MB", 500_000_000), ("2GiB", 2 << 30), ("1024", 1024)):
        with LLMCache.wrap(build(BARE["bert"]), max_bytes=text) as cache:
            assert cache.config.max_bytes == n


def test_a_save_is_loaded_with_single_settings(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"]), policy="lfu", payload="cls") as cache:
        cache.save(tmp_path)
    with LLMCache.load(build(BARE["bert"]), tmp_path, auto_bypass=False) as cache:
        assert not cache.config.auto_bypass
        assert (cache.config.policy.name, cache.payload) == ("lfu", "cls")  # as saved


def test_explain_says_what_would_happen_and_changes_nothing() -> None:
    with LLMCache.wrap(build(CLASSIFIERS["bert"]), tokenizer=tokenizer()) as cache:
        assert [str(one) for one in cache.explain(TEXTS)] == ["computed: nothing stored serves it"] * 2
        assert cache.stats().n_requests == 0
        cache(TEXTS[0])
        first, second = cache.explain(TEXTS)
        assert (str(first), first.outcome.rung, second.outcome.rung) == ("served by exact", "exact", None)
        bypassed = cache.explain(TEXTS, output_attentions=True)
        assert len(bypassed) == 2
        assert bypassed[0].outcome.bypassed == "output_attentions" and "turn output_attentions off" in str(bypassed[0])
    with pytest.raises(WrapError):
        cache.explain(TEXTS)


def test_explain_names_the_prefix_of_a_prompt() -> None:
    with LLMCache.wrap(build(TOKEN_HEADS["causal"]), tokenizer=tokenizer()) as cache:
        prompt = " ".join(f"w{i}" for i in range(5, 23))
        cache(prompt)
        (found,) = cache.explain(f"{prompt} w50")
    n_known = found.outcome.n_prefix
    assert n_known >= 16 and str(found).startswith(f"served by prefix: the first {n_known}")


STEM = tokens(1, 40)
LONGER = torch.cat([STEM, tokens(1, 2, seed=1)], dim=1)
PADDED: dict[str, Any] = {
    "input_ids": torch.cat([torch.zeros(1, 4, dtype=torch.int64), LONGER], dim=1),
    "attention_mask": torch.tensor([[0] * 4 + [1] * 42]),
    "position_ids": torch.tensor([[0] * 4 + [*range(42)]]),
}
BESIDE: dict[str, Any] = {"input_ids": torch.cat([torch.cat([STEM[:, :16], tokens(1, 44)], dim=1), tokens(1, 60, 2)])}
#: By reason of a miss: settings, the call, and the call that the cure advises, if it can be had without other settings.
MISSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "new": ("llama", {}, {"input_ids": tokens(2, 20, seed=2)}, None),
    "padding": ("llama", {}, PADDED | {"labels": PADDED["input_ids"]}, PADDED),
    "too_short": ("llama", {}, BESIDE, {"input_ids": BESIDE["input_ids"][:1]}),
    "no_kv": ("llama", {"prefix": False}, {"input_ids": LONGER, "use_cache": False}, None),
    "whole_prompts": ("llama", {"prefix": False}, {"input_ids": LONGER}, None),
    "coupled": ("mixtral", {}, {"input_ids": tokens(2, 20, seed=2)}, None),
}


@pytest.mark.parametrize("case", MISSED)
def test_why_a_stored_prompt_did_not_serve_a_call(case: str) -> None:
    family, settings, call, advised = MISSED[case]
    model = fresh(family, "causal")
    if case == "coupled":
        model.model.layers[0].mlp = LargestOfAll()
    with LLMCache.wrap(model, auto_bypass=False, **settings) as cache:
        cache(input_ids=STEM)
        told, *others = cache.explain(**call)
        n_known = {"new": 0, "too_short": 16, "coupled": 0, "no_kv": 40}.get(case, 32)
        known = f"its beginning is known to token {n_known}; " if n_known else ""
        assert (told.outcome.missed, str(told)) == (case, f"computed: {known}{told.cure}")
        if advised is not None:
            assert [one.outcome.rung for one in cache.explain(**advised)] == ["prefix"]
        cache(**call)
        assert [one.missed for one in cache.last] == [
            None if case == "no_kv" else one.outcome.missed for one in (told, *others)
        ]


@pytest.mark.parametrize("use_cache", [True, False])
def test_why_only_the_beginning_of_a_prompt_was_served(use_cache: bool) -> None:
    with LLMCache.wrap(fresh("llama", "causal"), auto_bypass=False) as cache:
        cache(input_ids=STEM)
        for ids, missed in ((LONGER, "differs"), (STEM[:, :32], "last_token")):
            (told,) = cache.explain(input_ids=ids, use_cache=use_cache)
            n, outcome = min(40, ids.shape[1] - 1), told.outcome
            assert (outcome.rung, outcome.n_prefix, outcome.n_known, outcome.missed) == ("prefix", n, n, missed)
            assert told.cure and str(told) == f"served by prefix: the first {n} tokens; {told.cure}"
            n_seen = cache.stats().n_requests
            cache(input_ids=ids, use_cache=use_cache)
            assert cache.last == (outcome,) and cache.stats().n_requests == n_seen + 1


def test_a_bypass_is_logged_once_for_a_model_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = fresh("gpt2", "causal"), {"input_ids": STEM, "token_type_ids": torch.zeros_like(STEM)}
    for _ in range(3):
        with LLMCache.wrap(model) as cache:
            for _ in range(2):
                cache(**inputs)
            assert cache.stats().bypassed == {"token_types": 2}
            assert cache.last[0].bypassed == cache.explain(**inputs)[0].outcome.bypassed == "token_types"
    assert len([one for one in caplog.messages if "token_types" in one]) == 1


def test_stats_are_a_table_in_a_notebook() -> None:
    with LLMCache.wrap(build(CLASSIFIERS["bert"]), tokenizer=tokenizer()) as cache:
        for text in (TEXTS[0], TEXTS[0], TEXTS[1]):
            cache(text)
        stats = cache.stats()
    own_s = (stats.lookup_ms + stats.storing_ms) / 1e3
    assert stats.saved_s == pytest.approx(stats.computing_ms / 2 / 1e3 - own_s)
    assert replace(stats, hits={}).saved_s == pytest.approx(-own_s)
    assert replace(stats, hits={"prefix": 1}, n_prompt_tokens=9).saved_s is None
    shown = stats._repr_html_()
    assert "3 requests, 33.3% hits" in shown
    assert "<td>exact</td><td>1</td><td>33.3%</td>" in shown and "<td>computed</td><td>2</td>" in shown


def test_a_model_that_takes_texts_itself_gets_them() -> None:
    class OfTexts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.words = build(CLASSIFIERS["bert"]), tokenizer()

        def forward(self, texts: list[str]) -> torch.Tensor:
            logits: torch.Tensor = self.model(**self.words(texts, return_tensors="pt", padding=True)).logits
            return logits

    with LLMCache.wrap(OfTexts(), audit=0) as cache:
        torch.testing.assert_close(cache(TEXTS), cache(TEXTS))
        assert cache.stats().hits == {"exact": 2}
