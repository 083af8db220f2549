"""A class registered from outside the package serves calls; a class that cannot work is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from llmcache import (
    CODECS,
    FINGERPRINTS,
    INDEXES,
    POLICIES,
    STORES,
    Adapter,
    ConfigError,
    LLMCache,
    UnsupportedModelError,
    register_adapter,
)
from llmcache.models.adapters import ADAPTERS
from tests.conformance import page
from tests.tiny_models import CLASSIFIERS, build, tokens

if TYPE_CHECKING:
    from fractions import Fraction

#: By kind: its registry, a class, and a method that a cache calls to serve.
REGISTRIES: dict[str, tuple[Any, type, str]] = {
    "policy": (POLICIES, page.Policy, "victim"),
    "store": (STORES, page.Store, "get_many"),
    "index": (INDEXES, page.Index, "search"),
    "fingerprint": (FINGERPRINTS, page.Fingerprint, "project"),
    "compression": (CODECS, page.Codec, "decode"),
}


@pytest.fixture
def register() -> Iterator[Callable[..., list[Any]]]:
    """Registers a class as `mine` until the test ends: the given one, or the page's, whose calls are returned."""
    registered = []

    def act(kind: str, made: type | None = None) -> list[Any]:
        registry, example, method = REGISTRIES[kind]
        calls: list[Any] = []

        def call(self: Any, *args: Any) -> Any:
            calls.append(args)
            return getattr(example, method)(self, *args)

        registry.register("mine", made or type(example.__name__, (example,), {method: call}))
        registered.append(registry)
        return calls

    yield act
    for registry in registered:
        del registry["mine"]


@pytest.fixture
def _table() -> Iterator[None]:
    """Restores the adapters after the test."""
    before = dict(ADAPTERS)
    yield
    ADAPTERS.clear()
    ADAPTERS.update(before)


def test_parts_of_the_papers_cache_saved_and_loaded(register: Callable[..., Any], tmp_path: Path) -> None:
    kinds = ("policy", "index", "fingerprint", "compression")
    calls = [register(kind) for kind in kinds]
    model, ids = build(CLASSIFIERS["bert"]), tokens(3, 6)
    with LLMCache.wrap(model, tau=0.9999, layers="last", max_entries=3, **dict.fromkeys(kinds, "mine")) as cache:
        expected = cache(ids).logits
        cache.save(tmp_path)
    with LLMCache.load(model, tmp_path) as cache:
        torch.testing.assert_close(cache(ids.flip(1)).logits, expected, atol=0.05, rtol=0.05)  # of the same words
        assert (cache.stats().n_hits, cache.stats().errors) == (3, 0)
        cache(tokens(1, 6, seed=1))
    assert all(calls)


def test_a_rung_and_a_store_serve_rows(register: Callable[..., Any]) -> None:
    reads = register("store")
    model, ids = build(CLASSIFIERS["bert"]), tokens(2, 6)
    settings: dict[str, Any] = {"store": {"name": "mine", "place": "here", "least_tokens": 0}}
    with LLMCache.wrap(model, rungs=[page.Rung], **settings) as cache:
        stored = cache(ids).logits
        keys = [outcome.key for outcome in cache.last]
        torch.testing.assert_close(cache(ids.flip(1)).logits, stored)
        assert [(outcome.rung, outcome.layer, outcome.source) for outcome in cache.last] == [
            ("same_tokens", 3, key) for key in keys
        ]
        cache(ids)  # the exact rung serves it first
        stats = cache.stats()
        assert (stats.hits, stats.n_misses, stats.errors) == ({"same_tokens": 2, "exact": 2}, 2, 0)
        assert "rungs='exact+same_tokens'" in repr(cache)
        cache.drain()
    reads.clear()
    with LLMCache.wrap(model, **settings) as cache:
        for _ in range(2):
            torch.testing.assert_close(cache(ids).logits, stored)
        assert (cache.stats().hits, bool(reads)) == ({"exact": 4}, True)


def test_a_store_is_given_the_password_that_its_settings_do_not_show(register: Callable[..., Any]) -> None:
    register("store")
    url = "db://me:zebra@host/1?token=quokka&size=2"
    with LLMCache.wrap(build(CLASSIFIERS["bert"]), store={"name": "mine", "place": url}) as cache:
        assert url in page.Store.places
        assert repr(cache.config.store.options) == "{'place': 'db://me:***@host/1?size=2'}"
        assert cache.config.store.model_dump(mode="json")["place"] == "db://me@host/1?size=2"


@pytest.mark.parametrize("instead", [{"name": None}, {"look_up": None}, {"__init__": lambda self: None}])
def test_what_is_no_rung_is_refused(instead: dict[str, Any]) -> None:
    mine = type("Mine", (page.Rung,), instead)
    with pytest.raises(ConfigError, match=r"rungs: .*Mine.* makes no rung: TypeError"):
        LLMCache.wrap(build(CLASSIFIERS["bert"]), rungs=[mine])


# -- what is refused ---------------------------------------------------------------------------------------------------


def without(example: type, *names: str, **instead: Any) -> dict[str, Any]:
    """Return a class's members without `names`, and with `instead`."""
    members = {name: value for name, value in vars(example).items() if not name.startswith("__") or name in KEPT}
    return {name: value for name, value in members.items() if name not in names} | instead


KEPT = ("__init__", "__len__")
LACKING = {
    "policy": ("on_hit", "victim"),
    "store": ("get_many",),
    "index": ("__len__", "nbytes", "vectors"),
    "fingerprint": ("project",),
    "compression": ("is_lossless",),
}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_what_lacks_something_is_refused_with_its_name(kind: str, register: Callable[..., Any]) -> None:
    """A class without the base must also have the members that others inherit."""
    registry, example, _ = REGISTRIES[kind]
    base, wrong = example.__bases__[0], without(example, *LACKING[kind])
    with pytest.raises(ConfigError, match=f"^{kind}: Wrong lacks {', '.join(LACKING[kind])} of {base.__name__}$"):
        registry.register("mine", type("Wrong", (base,), wrong))
    inherited = {name: value for name, value in vars(base).items() if name[0] != "_" and name not in vars(example)}
    with pytest.raises(ConfigError, match=f"{kind}: Wrong lacks {', '.join(sorted({*inherited, *LACKING[kind]}))} of"):
        registry.register("mine", type("Wrong", (), wrong))
    assert "mine" not in registry
    register(kind, type("Right", (), inherited | without(example)))


@pytest.mark.parametrize(
    ("kind", "instead", "message"),
    [
        (
            "policy",
            {"on_put": lambda self, key: None},
            r"Wrong\.on_put\(self, key\) .*\(key, nbytes\), as Policy\.on_put is",
        ),
        ("policy", {"victim": "first"}, r"Wrong\.victim must be a method, as of Policy"),
        ("policy", {"checks_reuse": lambda self: True}, r"Wrong\.checks_reuse must be an attribute or a property"),
        ("index", {"nbytes": lambda self: 0}, r"Wrong\.nbytes must be an attribute or a property, as of Index"),
        ("index", {"__init__": lambda self: None}, r"Wrong\(\) .*\(dim\)"),
        ("fingerprint", {"fit": lambda self: None}, r"Wrong\.fit\(self\) .*\(features\)"),
        ("compression", {"decode": lambda self, name, x: None}, r"Wrong\.decode.*\(name, tensors, dtype\)"),
    ],
)
def test_what_could_not_be_called_is_refused(kind: str, instead: dict[str, Any], message: str) -> None:
    registry, example, _ = REGISTRIES[kind]
    with pytest.raises(ConfigError, match=f"^{kind}: {message}"):
        registry.register("mine", type("Wrong", (example,), instead))
    assert "mine" not in registry


@pytest.mark.parametrize("kind", REGISTRIES)
@pytest.mark.parametrize("name", ["auto", 3])
def test_a_name_that_no_setting_could_give_is_refused(kind: str, name: Any) -> None:
    registry, example, _ = REGISTRIES[kind]
    with pytest.raises(
        ConfigError, match=rf"^{kind}: (give another name than {name!r}: a str, not auto|the name 'auto' is taken)"
    ):
        registry.register(name, example)


def test_options_of_any_type_reach_the_constructor(register: Callable[..., Any]) -> None:
    class Drawn(page.Policy):
        def __init__(self, rng: Random) -> None:
            super().__init__()
            self.rng = rng

    class Weighed(page.Policy):
        def __init__(self, share: Fraction | None = None) -> None:  # known to type checkers only
            super().__init__()

    # Annotations are strings here, resolved in this module, which knows `Random`.
    register("policy", Drawn)
    LLMCache.wrap(build(CLASSIFIERS["bert"]), policy={"name": "mine", "rng": Random(0)})
    with pytest.raises(ConfigError, match=r"policy: mine: rng=7: .*instance of Random"):
        LLMCache.wrap(build(CLASSIFIERS["bert"]), policy={"name": "mine", "rng": 7})
    with pytest.raises(ConfigError, match="policy: mine: unknown option 'seed'; its options: rng"):
        LLMCache.wrap(build(CLASSIFIERS["bert"]), policy={"name": "mine", "rng": Random(0), "seed": 7})
    POLICIES["mine"] = Weighed
    LLMCache.wrap(build(CLASSIFIERS["bert"]), policy={"name": "mine", "share": 0.5})


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_table")
@pytest.mark.parametrize("adapter", ["auto", "tower"])
def test_an_adapter_finds_the_layers(adapter: str) -> None:
    model, ids = build(page.Model), tokens(3, 5)
    with pytest.raises(UnsupportedModelError):
        LLMCache.wrap(model)
    register_adapter(Adapter("tower", ("MyModel",), "nowhere"))
    register_adapter(Adapter("tower", ("OtherModel", "MyModel"), "encoder.blocks", norm="final_norm"))  # replaces it
    with torch.inference_mode():
        expected = model(ids)
    for payload in "sequence", "mean":
        with LLMCache.wrap(nn.Sequential(model), payload=payload, adapter=adapter) as cache:
            for _ in range(2):
                torch.testing.assert_close(cache(ids).mean(1), expected.mean(1))
            assert cache.stats().hits_by_layer == {2: 3}


def test_a_family_may_be_named_where_the_class_does_not_tell(tmp_path: Path) -> None:
    """A checkpoint's own class may have the name of a known one: the user names its family."""
    model = build(CLASSIFIERS["bert"])
    model.bert.__class__ = type("BertModel", (type(model.bert),), {"__module__": "theirs"})
    with LLMCache.wrap(model) as cache:
        assert cache.payload == "sequence"  # recognised by its shape alone
    with LLMCache.wrap(model, adapter="bert") as cache:
        assert cache.payload == "cls"
        cache(tokens(2, 5))
        cache.save(tmp_path)
    with LLMCache.load(model, tmp_path) as cache:
        assert cache.payload == "cls"
        cache(tokens(2, 5))
        assert cache.stats().hits == {"exact": 2}


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("bert", r"adapter: register an Adapter\(\.\.\.\), not 'bert'"),
        (Adapter("mine", (), "layers"), "'mine': name at least one trunk class"),
        (Adapter("mine", "Tower", "layers"), "'mine': name at least one trunk class"),  # type: ignore[arg-type]
        (Adapter("mine", ("Tower",), ""), "'mine': name the path"),
        (Adapter("mine", ("Tower",), "stages", skipped=lambda hidden: hidden), "'mine': skipped takes hidden"),  # type: ignore[misc, arg-type]
        (Adapter("mine", ("BertModel",), "layers"), "'mine'.*'BertModel'.*already belongs to 'bert'"),
    ],
)
def test_an_adapter_that_cannot_work_is_refused(adapter: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_adapter(adapter)
    assert "mine" not in ADAPTERS


@pytest.mark.usefixtures("_table")
@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ({"layers": "encoder.steps"}, "does not match its adapter 'tower': .*steps"),
        ({"layers": "encoder.blocks", "norm": "bottom"}, "does not match its adapter 'tower': .*bottom"),
        ({"layers": "encoder.blocks"}, "no config; give it one with vocab_size"),
    ],
)
def test_an_adapter_that_does_not_fit_the_model_says_so(paths: dict[str, str], message: str) -> None:
    model = build(page.Model)
    if "config" in message:
        del model.config
    register_adapter(Adapter("tower", ("MyModel",), **paths))
    with pytest.raises(UnsupportedModelError, match=f"MyModel: {message}"):
        LLMCache.wrap(model)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("tower", "unknown name 'tower'; known: auto, bart, bert, .*, t5"),
        ("t5", "='t5': BertForSequenceClassification holds no T5Stack"),
    ],
)
def test_a_family_that_does_not_fit_the_model_is_refused(family: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"adapter:? ?{message}"):
        LLMCache.wrap(build(CLASSIFIERS["bert"]), adapter=family)
