"""PEFT's adapters, put on, switched, merged and swapped under a wrapped model: no answer comes from other weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import permutations
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.helpers import rescale_adapter_scale
from peft.utils.hotswap import hotswap_adapter
from torch import Tensor, nn
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

from llmcache import LLMCache
from tests.contract.judge import ask, carries, check_moment, check_same
from tests.contract.models import SIZES
from tests.tiny_models import GENERATORS, build, padded, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of what these tests do on purpose
X = padded([6, 4])
LINEAR = ["query", "value"]
IDS = X["input_ids"][0, :3].tolist()


def wrap(model: nn.Module, **settings: Any) -> LLMCache:
    return LLMCache.wrap(model, auto_bypass=False, **settings)


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": LINEAR, "init_lora_weights": False, **more})


# Kinds of PEFT adapters for linear layers, embeddings and norms, by the name of the config.
METHODS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4},
    "LoraConfig dora": {"r": 4, "use_dora": True},
    "LoraConfig embedding": {"r": 4, "target_modules": ["word_embeddings"]},
    "IA3Config": {"feedforward_modules": []},
    "OFTConfig": {"oft_block_size": 8, "use_cayley_neumann": False},
    "ShiraConfig": {"r": 4},
    "BeftConfig": {},
    "OSFConfig": {},
    "LNTuningConfig": {"target_modules": ["LayerNorm"]},
    "TrainableTokensConfig": {"token_indices": IDS, "target_modules": ["word_embeddings"]},
}


def config(method: str) -> PeftConfig:
    made: PeftConfig = getattr(peft, method.split()[0])(**{"target_modules": LINEAR, **METHODS[method]})
    return made


def encoder() -> nn.Module:
    """A bare BERT without trainable weights."""
    return build(lambda: tf.BertModel(tf.BertConfig(**SIZES))).requires_grad_(False)


def classifier() -> nn.Module:
    return tf.BertForSequenceClassification(tf.BertConfig(**SIZES, num_labels=5))


def train(model: nn.Module) -> None:
    """Change all trainable weights, as training would, and freeze them."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def check(cache: LLMCache, model: nn.Module, hits: int | None = None, **inputs: Any) -> None:
    """Assert that two calls answer as the model does now, with this number of hits if given."""
    inputs, before = inputs or X, cache.stats().n_hits
    with cache.disabled():
        expected = ask(model, **inputs)
    for _ in range(2):
        check_same(ask(model, **inputs), expected)
    assert hits in (None, cache.stats().n_hits - before)


def tuned(*names: str, make: Callable[[], nn.Module] = classifier, **more: Any) -> Any:
    """A model with adapters of these names; the first is active."""
    model = get_peft_model(build(make), lora(**more), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, lora(**more))
    return model.eval()


# -- merged, for every kind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_from_its_coming_to_its_merging(method: str) -> None:
    """Adapters of any kind may be put on, merged, disabled and merged for good under a cache."""
    cache = wrap(encoder())
    check(cache, cache.model, hits=2)
    model: Any = get_peft_model(cache.model, config(method)).eval()
    train(model)
    check(cache, model)
    with model.disable_adapter():
        check(cache, model, hits=4)  # those of the base model
    with torch.no_grad():
        model.merge_adapter()
        check(cache, model)
        if method != "OSFConfig":  # it cannot unmerge
            model.unmerge_adapter()
            check(cache, model)
        with model.disable_adapter():
            check(cache, model)
        check(cache, model.merge_and_unload())


@pytest.mark.parametrize("method", ["LoraConfig", "OSFConfig", "LNTuningConfig"])
def test_an_adapter_that_no_call_saw(method: str) -> None:
    """After an adapter is put on and merged between two calls, the next call is computed."""
    cache = wrap(encoder())
    ask(cache.model, **X)
    model: Any = get_peft_model(cache.model, config(method)).eval()
    train(model)
    check(cache, model.merge_and_unload(), hits=2)


def within(block: AbstractContextManager[object], model: Any, inputs: dict[str, Any]) -> Any:
    with block:
        return model(**inputs)


def by_another(model: Any, **inputs: Any) -> Any:
    model.set_adapter("north")
    output = model(**inputs)
    model.set_adapter("south")
    return output


#: Calls of a model during which another adapter is in force.
MOMENTARY: dict[str, Callable[..., Any]] = {
    "none": lambda model, **inputs: within(model.disable_adapter(), model, inputs),
    "another": by_another,
    "another scale": lambda model, **inputs: within(rescale_adapter_scale(model, 0.25), model, inputs),
}


@pytest.mark.parametrize("adapter", MOMENTARY)
def test_an_adapter_for_a_moment(adapter: str) -> None:
    """After many calls without an edit, what another adapter computes in a block serves none outside of it."""
    check_moment(wrap(tuned("south", "north")), MOMENTARY[adapter])


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("init", ["pissa", "gaussian"])
def test_what_adapters_leave_in_the_base(init: str, is_seen: bool) -> None:
    """The cache sees inits that write to the base weights, even after the adapter is removed."""
    cache = wrap(encoder())
    before = ask(cache.model, **X)
    model: Any = get_peft_model(cache.model, lora(init_lora_weights=init)).eval()
    if is_seen:
        check(cache, model)
    base = model.unload()
    with cache.disabled():
        has_changed = not torch.allclose(ask(base, **X)[0], before[0], atol=1e-5)
    check(cache, base, hits=2 if has_changed else 4)


def test_a_save_beside_an_unused_adapter(tmp_path: Path) -> None:
    """A model with the same active adapter loads a save, whatever unused adapters there were."""
    cache = wrap(tuned("north", "south"))
    ask(cache.model, **X)
    assert carries(cache, tuned("north"), tmp_path, **X)


# -- switched, swapped, added ------------------------------------------------------------------------------------------


def saved(folder: Path, seed: int, **more: Any) -> str:
    """Save a new adapter; return its folder."""
    base = build(classifier)
    torch.manual_seed(seed)
    model = get_peft_model(base, lora(**more))
    model.save_pretrained(folder)
    return str(folder)


SWITCHES: dict[str, Callable[[Any, Path], object]] = {
    "both": lambda model, _: model.base_model.set_adapter(["north", "south"]),
    "hotswap, fewer modules": lambda model, folder: hotswap_adapter(
        model, saved(folder, 9, target_modules=["query"]), "north"
    ),
    "loaded beside": lambda model, folder: (model.load_adapter(saved(folder, 9), "west"), model.set_adapter("west")),
    "weighted": lambda model, _: (
        model.add_weighted_adapter(["north", "south"], [0.5, 0.5], "mean", combination_type="linear"),
        model.set_adapter("mean"),
    ),
    "added, writing to the base": lambda model, _: model.add_adapter("west", lora(init_lora_weights="olora")),
    "deleted": lambda model, _: model.delete_adapter("north"),
    "merged, one of two": lambda model, _: model.merge_adapter(["south"]),
    "set_scale": lambda model, _: [
        part.set_scale("north", 0.3) for part in model.modules() if hasattr(part, "set_scale")
    ],
    "state dict": lambda model, _: peft.set_peft_model_state_dict(
        model,
        {name: value * 2 for name, value in peft.get_peft_model_state_dict(model, adapter_name="north").items()},
        adapter_name="north",
    ),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_adapters_are_switched(switch: str, tmp_path: Path) -> None:
    """After a switch of adapters no older answer is served, and repeats are served again."""
    cache = wrap(tuned("north", "south"))
    check(cache, cache.model, hits=2)
    SWITCHES[switch](cache.model, tmp_path)
    cache.model.eval()
    check(cache, cache.model, hits=2)


def test_adapters_take_turns() -> None:
    """Each of two adapters, and the model without, finds its own entries again."""
    cache = wrap(tuned("north", "south"))
    model = cache.model
    for hits in (2, 4, 4):
        for name in ("north", "south"):
            model.set_adapter(name)
            check(cache, model, hits=hits)
        with model.disable_adapter():
            check(cache, model, hits=hits)
    with rescale_adapter_scale(model, 0.1):
        check(cache, model, hits=2)


#: By name: the adapter in use, and another.
UNUSED: dict[str, tuple[PeftConfig, PeftConfig]] = {
    "alike": (config("LoraConfig"), config("LoraConfig")),
    "of tokens": (config("TrainableTokensConfig"), config("TrainableTokensConfig")),
    "of other modules": (lora(), lora(r=2, use_dora=True, target_modules=["key", "query"])),
    "of another scale": (lora(), lora(r=8, lora_bias=True, use_rslora=True, target_modules=["key"])),
}


@pytest.mark.parametrize("name", UNUSED)
def test_an_adapter_that_is_not_used(name: str) -> None:
    """Adding, editing or deleting an unused adapter keeps the entries of the active one, and of the base."""
    cache, (used, unused) = wrap(encoder()), UNUSED[name]

    def check_both(hits: int) -> None:
        model.eval()
        check(cache, model, hits)
        with model.disable_adapter():
            check(cache, model, hits)

    model: Any = get_peft_model(cache.model, used, adapter_name="north")
    check_both(2)
    model.add_adapter("south", unused)
    check_both(4)
    for parameter_name, parameter in model.named_parameters():
        if ".south" in parameter_name:
            parameter.data.add_(0.5)
    check_both(4)
    model.set_adapter("south")
    check(cache, model)
    model.set_adapter("north")
    model.delete_adapter("south")
    check_both(4)
    part = next(part for part in model.modules() if hasattr(part, "base_layer"))
    part.forward = lambda x, *args, **kwargs: part.base_layer(x) + 0.5  # not PEFT's
    with model.disable_adapter():
        check(cache, model, hits=2)


def test_transformers_own_adapters() -> None:
    """The cache tells apart adapters that transformers' own `add_adapter` adds."""
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError:  # transformers 5.24 asks for one that came out after it
        pytest.skip(f"needs a later PEFT: pip install 'peft>={MIN_PEFT_VERSION}'")
    cache = wrap(build(classifier))
    model: Any = cache.model
    check(cache, model, hits=2)
    for name in ("north", "south"):
        model.add_adapter(lora(), name)
        model.eval()
        check(cache, model, hits=2)
    model.set_adapter("north")
    check(cache, model, hits=4)
    model.disable_adapters()
    check(cache, model, hits=4)


def test_an_adapter_for_each_row() -> None:
    """A batch with an adapter per row is computed."""
    cache = wrap(tuned("north", "south"))
    ask(cache.model, **X)
    check(cache, cache.model, hits=0, adapter_names=["north", "south"], **X)


# -- activated LoRA ----------------------------------------------------------------------------------------------------

INVOKED = [7, 8]


def activated(*others: str, **more: Any) -> Any:
    """A decoder whose adapters `north` and `others` are active from the invocation tokens on."""
    return tuned(
        "north",
        *others,
        make=GENERATORS["llama"],
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        alora_invocation_tokens=INVOKED,
        **more,
    )


def prompt(before: int, after: int, seed: int = 0, *, times: int = 1) -> Tensor:
    """Return a prompt that contains the invocation tokens `times` times."""
    text = tokens(1, before + after, seed)
    text[(text == INVOKED[0]) | (text == INVOKED[1])] = 9
    pieces = [text[:, :before], *[torch.tensor([INVOKED])] * times, text[:, before:]]
    return torch.cat(pieces, dim=1)


def test_repeats_of_an_activated_lora() -> None:
    """Repeats under an activated LoRA are served, alone and in batches, with and without its invocation."""
    cache = wrap(activated())
    texts = [prompt(9, 3), prompt(9, 3, times=0), prompt(30, 4, seed=1), prompt(4, 20, seed=2)]
    for text in texts:
        check(cache, cache.model, hits=1, input_ids=text)
    both = torch.cat([prompt(5, 7, seed=3), prompt(7, 5, seed=4)])
    check(cache, cache.model, hits=2, input_ids=both)
    check(cache, cache.model, input_ids=torch.cat([both, prompt(7, 5, seed=5)]))  # partly known
    check(cache, cache.model, hits=2, input_ids=both[:1])


def test_what_an_activated_lora_begins_with() -> None:
    """Prompts that begin alike do not serve each other if the adapter begins at other tokens."""
    cache = wrap(activated())
    begin = prompt(17, 16)
    check(cache, cache.model, input_ids=begin)
    for end in (prompt(2, 3, seed=4), prompt(2, 3, seed=4, times=0)):
        check(cache, cache.model, input_ids=torch.cat([begin, end], dim=1))
    ids = prompt(17, 16, seed=2)
    for n, hits in ((None, 1), (5, 2), (12, 2), (30, 1), (35, 1)):  # a known block before the offset is a hit as well
        check(cache, cache.model, hits=hits, input_ids=ids, alora_offsets=[n])
    cache.model.peft_config["north"].alora_invocation_tokens = ids[0, 3:5].tolist()
    check(cache, cache.model, input_ids=ids)
    with cache.model.disable_adapter():
        check(cache, cache.model, hits=2, input_ids=ids)


def test_an_activated_lora_generates() -> None:
    """`generate()` puts out the plain model's tokens with an activated LoRA."""
    cache = wrap(activated())
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    for text in (prompt(18, 3), prompt(18, 3, times=2)):
        with cache.disabled():
            expected = cache.model.generate(input_ids=text, **settings)
        for _ in range(2):
            assert torch.equal(cache.model.generate(input_ids=text, **settings), expected)
    assert (cache.stats().n_hits, cache.stats().errors) == (3, 0)  # the second begins like the first


def n_served(cache: LLMCache, adapter: str, *pieces: Tensor) -> int:
    """Ask with one adapter, or with none (`base`), and check the answer; return how many tokens a prefix served."""
    cache.model.set_adapter("north" if adapter == "base" else adapter)
    with cache.model.disable_adapter() if adapter == "base" else nullcontext():
        with cache.disabled():
            expected = ask(cache.model, input_ids=torch.cat(pieces, dim=1))
        check_same(ask(cache.model, input_ids=torch.cat(pieces, dim=1)), expected)
    return cache.last[0].n_prefix


BEGIN, INVOCATION = prompt(40, 0, times=0), torch.tensor([INVOKED])


@pytest.mark.parametrize("order", [*permutations(["base", "north", "south"])])
def test_what_precedes_an_invocation_is_shared_with_the_base_model(order: tuple[str, ...]) -> None:
    """The tokens before an invocation serve the base model and all activated LoRAs, whoever computes them first."""
    cache = wrap(activated("south"))
    ends = {"base": tokens(1, 5, 8), "north": INVOCATION, "south": torch.cat([INVOCATION, tokens(1, 6, 9)], dim=1)}
    for number, adapter in enumerate(order):
        n_shared = 40 if "base" in order[:number] else 32  # an activated LoRA leaves whole blocks alone
        assert n_served(cache, adapter, BEGIN, ends[adapter]) == (n_shared if number else 0)
    assert cache.stats().errors == 0


def test_what_an_activated_lora_computes_after_its_invocation_serves_no_other() -> None:
    """Tokens from the invocation on come from the adapter's own prompt alone, and none reach the base model."""
    cache, end = wrap(activated("south")), torch.cat([INVOCATION, tokens(1, 20, 9)], dim=1)
    assert [n_served(cache, adapter, BEGIN, end) for adapter in ("north", "south", "base", "north")] == [0, 32, 32, 0]
    assert cache.last[0].rung == "exact"
    assert n_served(cache, "south", BEGIN, end, tokens(1, 1)) == 40  # the base knows more, but not as this adapter's
    assert n_served(cache, "base", BEGIN, end, tokens(1, 1)) == 62  # all: for it, they are tokens like others
    early = [prompt(9, 0, times=0), INVOCATION, tokens(1, 30, 3)]
    assert [n_served(cache, adapter, *early) for adapter in ("north", "base", "south")] == [0, 0, 0]


def test_steps_of_an_activated_lora_after_a_prompt_of_its_base_serve_no_other() -> None:
    """What an activated LoRA generates into the base model's K/V cache does not serve the base model."""
    cache, asked, kv_cache = wrap(activated()), prompt(20, 0, times=0), tf.DynamicCache()
    base, added = cache.model.get_base_model(), torch.cat([INVOCATION, tokens(1, 20, 9)], dim=1)
    with torch.inference_mode():
        base(asked, past_key_values=kv_cache)
        for number, step in enumerate(added.split(1, dim=1), 1):
            cache.model(input_ids=step, past_key_values=kv_cache, alora_offsets=[number])
        base(torch.cat([asked, added], dim=1), use_cache=True)
    assert cache.last[0].n_prefix == asked.shape[1]


def test_without_its_invocation_an_activated_lora_is_the_base_model() -> None:
    """A prompt without invocation tokens shares all of its tokens with the base model."""
    cache = wrap(activated())
    assert n_served(cache, "base", BEGIN) == 0 and n_served(cache, "north", BEGIN) == 39
    assert n_served(cache, "north", BEGIN.flip(1)) == 0 and n_served(cache, "base", BEGIN.flip(1)) == 32


def test_no_other_adapter_beside_an_activated_lora_is_taken_for_the_base() -> None:
    """Beside an adapter that applies to every token, nothing is shared with the base model."""
    cache = wrap(activated())
    cache.model.add_adapter("south", lora(target_modules=["v_proj"], task_type="CAUSAL_LM"))
    assert n_served(cache, "base", BEGIN, tokens(1, 4)) == 0
    cache.model.base_model.set_adapter(["north", "south"])
    check(cache, cache.model, input_ids=torch.cat([BEGIN, INVOCATION], dim=1))
    assert cache.last[0].rung == "exact" and cache.stats().hits == {"exact": 1}


def test_a_store_holds_what_precedes_an_invocation_for_the_base_model(tmp_path: Path) -> None:
    """Another process has the shared blocks and the adapter's own prompts from a store, until they are forgotten."""
    text = torch.cat([BEGIN, INVOCATION], dim=1)
    served = []
    for adapter, ids in [("north", text), ("base", BEGIN), ("north", text), ("base", BEGIN.flip(1)), ("base", BEGIN)]:
        with wrap(activated(), store={"name": "disk", "folder": str(tmp_path)}) as cache:
            served.append((n_served(cache, adapter, ids), cache.last[0].rung))
            if len(served) == 4:
                cache.model.set_adapter("north")
                cache.forget(input_ids=text)
    assert served == [(0, None), (32, "prefix"), (0, "exact"), (0, None), (0, None)]


def test_a_call_that_is_only_looked_up_leaves_no_hooks_of_its_adapters() -> None:
    """`explain` and `forget` end a forward before PEFT removes its hooks: calls after them are served as before."""
    cache, text = wrap(activated()), prompt(18, 3)
    assert cache.explain(input_ids=text)[0].outcome.missed == "new"
    cache.forget(input_ids=text)
    check(cache, cache.model, hits=1, input_ids=text)
    assert "adapter_names" not in cache.stats().bypassed
