"""A class from outside the package, registered through public names, serves a call; one that could not is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from llmcache import (
    CODECS,
    DECISIONS,
    FINGERPRINTS,
    INDEXES,
    POLICIES,
    STORES,
    Adapter,
    ConfigError,
    LLMCache,
    Policy,
    UnsupportedModelError,
    register_adapter,
)
from llmcache.models.adapters import ADAPTERS
from llmcache.reuse import Call
from tests.conformance import outside
from tests.stores.shared import Shared
from tests.tiny_models import CLASSIFIERS, GENERATORS, build, tokens

if TYPE_CHECKING:
    from fractions import Fraction

REGISTRIES: dict[str, tuple[Any, type]] = {
    "policy": (POLICIES, outside.MostRecent),
    "store": (STORES, Shared),
    "index": (INDEXES, outside.Scan),
    "fingerprint": (FINGERPRINTS, outside.Lengths),
    "decide": (DECISIONS, outside.SecondBest),
    "compression": (CODECS, outside.Mirrored),
}

HEADS = {"bert": CLASSIFIERS["bert"], "gpt2": GENERATORS["gpt2"]}


@pytest.fixture
def register() -> Iterator[Callable[..., Any]]:
    """Registers a class as `mine`, to the end of the test; by default a fresh one of `outside`, which has not counted.

    Of a class that is given, it is that itself.
    """
    registered = []

    def act(kind: str, made: type | None = None) -> Any:
        registry, example = REGISTRIES[kind]
        made = made or type(example.__name__, (example,), {"n_used": 0})
        registry.register("mine", made)
        registered.append(registry)
        return made

    yield act
    for registry in registered:
        del registry["mine"]


@pytest.fixture
def _table() -> Iterator[None]:
    """Adapters of a test end with it."""
    before = dict(ADAPTERS)
    yield
    ADAPTERS.clear()
    ADAPTERS.update(before)


def wrapped(model: nn.Module, **settings: Any) -> LLMCache:
    return LLMCache.wrap(model, auto_bypass=False, **settings)


def plain(model: nn.Module, *requests: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return [model(ids).logits for ids in requests]


@pytest.mark.parametrize(("spare", "left"), [(0, [0, 2]), (1, [1, 2])])
def test_a_policy_chooses_who_leaves(register: Callable[..., Any], spare: int, left: list[int]) -> None:
    mine = register("policy")
    model, asked = build(CLASSIFIERS["bert"]), [tokens(1, 6, seed=seed) for seed in range(3)]
    expected = plain(model, *asked)
    cache = wrapped(model, policy={"name": "mine", "spare": spare}, max_entries=2)
    for ids, logits in zip(asked, expected, strict=True):
        assert torch.equal(cache(ids).logits, logits)
    assert (mine.n_used, cache.stats().n_evicted) == (1, {3: 1})
    for number in left:
        torch.testing.assert_close(cache(asked[number]).logits, expected[number])
        assert cache.last[0].rung == "exact"


def test_a_policy_chooses_which_prefix_leaves(register: Callable[..., Any]) -> None:
    mine = register("policy")
    model, asked = build(GENERATORS["gpt2"]), [tokens(1, 6, seed=seed) for seed in range(3)]
    block = 4 * (4 * 2 + 1) * 32 * 4  # tokens, K and V of each layer and the last states, width, bytes
    cache = wrapped(model, exact=False, prefix_block=4, max_bytes=2 * block, policy="mine")
    for ids in asked:
        cache(ids)
    stats = cache.stats()
    assert (stats.n_blocks, stats.n_blocks_evicted, stats.errors) == (2, 1, 0)
    assert mine.n_used > 0
    cache(torch.cat([asked[0][:, :4], tokens(1, 3, seed=9)], dim=1))
    assert (cache.last[0].rung, cache.last[0].n_prefix) == ("prefix", 4)  # `lru` would have let it go


def test_an_index_is_searched(register: Callable[..., Any]) -> None:
    mine = register("index")
    model, ids = build(CLASSIFIERS["bert"]), tokens(3, 6)
    cache = wrapped(model, tau=0.8, exact=False, index={"name": "mine", "block": 2})
    stored = cache(ids).logits
    torch.testing.assert_close(cache(ids[1:2].flip(1)).logits, stored[1:2])
    assert (cache.last[0].rung, mine.n_used) == ("semantic", 1)
    assert cache.stats().index_nbytes == 3 * 32 * 4


def test_a_fingerprint_tells_what_is_alike(register: Callable[..., Any]) -> None:
    mine = register("fingerprint")
    model = build(CLASSIFIERS["bert"])
    cache = wrapped(model, tau=0.9999, fingerprint={"name": "mine", "longest": 8})
    stored = cache(tokens(1, 6)).logits
    assert torch.equal(cache(tokens(1, 6, seed=1)).logits, stored)
    assert (cache.last[0].rung, cache.last[0].similarity) == ("semantic", pytest.approx(1))
    cache(tokens(1, 5, seed=1))
    assert (cache.last[0].rung, mine.n_used) == (None, 3)


def test_a_decision_chooses_the_neighbour(register: Callable[..., Any]) -> None:
    mine = register("decide")
    model, ids, asked = build(CLASSIFIERS["bert"]), tokens(3, 6), tokens(1, 6, seed=1)
    chosen = {}
    for name in "threshold", "mine":
        with wrapped(model, tau=-1.0, decide=name) as cache:
            stored = cache(ids).logits
            keys = [outcome.key for outcome in cache.last]
            answer = cache(asked).logits
            chosen[name] = cache.last[0]
            source = keys.index(chosen[name].source)
            torch.testing.assert_close(answer, stored[source : source + 1])
    assert chosen["mine"].source != chosen["threshold"].source
    assert chosen["mine"].similarity < chosen["threshold"].similarity
    assert mine.n_used == 1


@pytest.mark.parametrize("family", HEADS)
def test_a_codec_packs_what_is_stored(register: Callable[..., Any], family: str) -> None:
    mine = register("compression")
    model, ids = build(HEADS[family]), tokens(2, 6)
    with torch.inference_mode():
        expected = model(ids)
    cache = wrapped(model, compression="mine", prefix=False)
    assert torch.equal(cache(ids).logits, expected.logits)
    served = cache(ids)
    torch.testing.assert_close(served.logits, expected.logits)
    assert (cache.stats().hits, cache.stats().errors) == ({"exact": 2}, 0)
    assert mine.n_used >= 2
    if family == "gpt2":  # K/V go through it as well
        for one, other in zip(served.past_key_values.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close(one.keys, other.keys)
            torch.testing.assert_close(one.values, other.values)


def test_a_rung_serves_rows() -> None:
    mine = type("SameTokens", (outside.SameTokens,), {"n_used": 0})
    model, ids = build(CLASSIFIERS["bert"]), tokens(2, 6)
    cache = wrapped(model, rungs=[partial(mine, least=6)])
    stored = cache(ids).logits
    keys = [outcome.key for outcome in cache.last]
    torch.testing.assert_close(cache(ids.flip(1)).logits, stored)
    assert [(outcome.rung, outcome.layer, outcome.source) for outcome in cache.last] == [
        ("same_tokens", 3, key) for key in keys
    ]
    cache(ids)  # which the exact rung serves first
    cache(ids[:, :5])
    cache(ids[:, :5].flip(1))  # too short for its setting
    stats = cache.stats()
    assert (stats.hits, stats.n_misses, stats.errors) == ({"same_tokens": 2, "exact": 2}, 6, 0)
    assert mine.n_used == 2
    assert "rungs='exact+same_tokens'" in repr(cache)


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ({"applies_at": lambda self, layer: 1 / (layer - 2) > 0}, "ZeroDivisionError"),
        ({"name": None}, "TypeError"),
        ({"__init__": lambda self: None}, "TypeError"),
    ],
)
def test_a_rung_that_cannot_say_where_it_is_asked_is_refused(instead: dict[str, Any], said: str) -> None:
    """In a call nobody catches what it raises."""
    mine = type("Mine", (outside.SameTokens,), instead)
    with pytest.raises(ConfigError, match=rf"rungs: .*Mine.* makes no rung: {said}"):
        wrapped(build(CLASSIFIERS["bert"]), rungs=[mine])


class Seen(outside.SameTokens):
    """Sees whole calls; one of its methods may fail."""

    name = "seen"
    serves_calls = True
    fails = ""
    steps: ClassVar[list[str]] = []

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name == self.fails:
            raise ValueError(f"{name} is broken")

    def applies_at(self, layer: int) -> bool:
        return False

    def begin(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._step("begin")
        return args, kwargs

    def complete(self, call: Call, output: Any) -> Any:
        self._step("complete")
        return output

    def store(self, call: Call, output: Any) -> None:
        self._step("store")

    def abandon(self, call: Call) -> None:
        self._step("abandon")


@pytest.mark.parametrize("fails", ["", "begin", "store", "abandon"])
@pytest.mark.parametrize("family", HEADS)
def test_a_rung_may_serve_whole_calls(family: str, fails: str) -> None:
    model = build(HEADS[family])
    (expected,) = plain(model, tokens(2, 6))
    mine: Any = type("Mine", (Seen,), {"fails": fails, "steps": []})
    cache = wrapped(model, rungs=[mine])
    assert torch.equal(cache(tokens(2, 6)).logits, expected)
    assert mine.steps == ["begin", "complete", "store"]
    assert cache.stats().errors == (fails in mine.steps)
    mine.steps.clear()
    with pytest.raises(IndexError):
        cache(torch.full((1, 4), 10_000))
    assert (mine.steps[0], mine.steps[-1]) == ("begin", "abandon")
    torch.testing.assert_close(cache(tokens(2, 6)).logits, expected)
    assert cache.stats().n_hits == 2


@pytest.mark.usefixtures("_table")
@pytest.mark.parametrize("adapter", ["auto", "tower"])
def test_an_adapter_finds_the_layers(adapter: str) -> None:
    model, ids = build(outside.Tower), tokens(3, 5)
    with pytest.raises(UnsupportedModelError):
        wrapped(model)
    register_adapter(Adapter("tower", ("Tower",), "nowhere"))
    register_adapter(Adapter("tower", ("OtherTower", "Tower"), "tower.stages", norm="top"))  # replaces it
    with torch.inference_mode():
        expected = model(ids)
    for layer in range(3):
        with wrapped(model, layers=[layer], payload="sequence", adapter=adapter) as cache:
            for _ in range(2):
                torch.testing.assert_close(cache(ids), expected)
            assert cache.stats().hits_by_layer == {layer: 3}
    with wrapped(nn.Sequential(model), payload="mean", adapter=adapter) as cache:
        cache(ids)
        torch.testing.assert_close(cache(ids).mean(1), expected.mean(1))


def test_a_family_may_be_named_where_the_class_does_not_tell(tmp_path: Path) -> None:
    """Code that came with a checkpoint may have a class of the same name: the user says that it is of the family."""
    model = build(CLASSIFIERS["bert"])
    own = type("BertModel", (type(model.bert),), {"__module__": "theirs"})
    model.bert.__class__ = own
    with wrapped(model) as cache:
        assert cache.payload == "sequence"  # recognised by its shape alone
    with wrapped(model, adapter="bert") as cache:
        assert cache.payload == "cls"
        cache(tokens(2, 5))
        cache.save(tmp_path)
    with LLMCache.load(model, tmp_path) as cache:
        assert cache.payload == "cls"
        cache(tokens(2, 5))
        assert cache.stats().hits == {"exact": 2}


def test_all_at_once_saved_and_loaded(register: Callable[..., Any], tmp_path: Path) -> None:
    made = [register(kind) for kind in REGISTRIES]
    model, ids = build(CLASSIFIERS["bert"]), tokens(3, 6)
    settings: dict[str, Any] = dict.fromkeys(REGISTRIES, "mine") | {"store_least_tokens": 7}
    with wrapped(model, tau=0.9999, max_entries=3, rungs=[outside.SameTokens], **settings) as cache:
        expected = cache(ids).logits
        keys = [outcome.key for outcome in cache.last]
        cache(tokens(1, 40, seed=1))  # its length is like none: what was stored last leaves for it
        cache.save(tmp_path)
    with LLMCache.load(model, tmp_path, rungs=[outside.SameTokens]) as cache:
        assert "same_tokens" in repr(cache)
        for row in 0, 1:
            torch.testing.assert_close(cache(ids[row : row + 1]).logits, expected[row : row + 1])
            assert cache.last[0].rung == "exact"
        cache(ids[2:])
        assert (cache.last[0].rung, cache.last[0].source) == ("semantic", keys[1])
        assert cache.stats().errors == 0
    assert all(one.n_used for one in made)


def without(example: type, *names: str, **instead: Any) -> dict[str, Any]:
    """The members of a class, but for some."""
    members = {name: value for name, value in vars(example).items() if not name.startswith("__") or name in KEPT}
    return {name: value for name, value in members.items() if name not in names} | instead


KEPT = ("__init__", "__len__")
LACKING = {
    "policy": ("on_hit", "victim"),
    "store": ("contains_prefix", "get_many"),
    "index": ("__len__", "nbytes", "vectors"),
    "fingerprint": ("project",),
    "decide": ("choose",),
    "compression": ("is_lossless",),
}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_what_lacks_something_is_refused_with_its_name(kind: str, register: Callable[..., Any]) -> None:
    """A class of another descent needs what others inherit, too."""
    registry, example = REGISTRIES[kind]
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
        ("store", {"get_many": lambda self, keys: []}, r"Wrong\.get_many\(self, keys\) .*\(keys, deadline\)"),
        ("index", {"search": lambda self, x: None}, r"Wrong\.search\(self, x\) .*\(x, k\)"),
        ("index", {"nbytes": lambda self: 0}, r"Wrong\.nbytes must be an attribute or a property, as of Index"),
        ("index", {"__init__": lambda self: None}, r"Wrong\(\) .*\(dim\)"),
        ("fingerprint", {"features": lambda self: None}, r"Wrong\.features\(self\) .*\(view\)"),
        ("fingerprint", {"fit": lambda self, features: None}, r"Wrong\.fit.*\(features, targets, outputs\)"),
        ("decide", {"choose": lambda self: None}, r"Wrong\.choose\(self\) .*\(seen\)"),
        ("compression", {"decode": lambda self, name, x: None}, r"Wrong\.decode.*\(name, tensors, dtype\)"),
    ],
)
def test_what_could_not_be_called_is_refused(kind: str, instead: dict[str, Any], message: str) -> None:
    registry, example = REGISTRIES[kind]
    with pytest.raises(ConfigError, match=f"^{kind}: {message}"):
        registry.register("mine", type("Wrong", (example,), instead))
    assert "mine" not in registry


@pytest.mark.parametrize("kind", REGISTRIES)
@pytest.mark.parametrize("name", ["auto", 3])
def test_a_name_that_no_setting_could_give_is_refused(kind: str, name: Any) -> None:
    registry, example = REGISTRIES[kind]
    with pytest.raises(
        ConfigError, match=rf"^{kind}: (give another name than {name!r}: a str, not auto|the name 'auto' is taken)"
    ):
        registry.register(name, example)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_what_is_ours_would_be_registered_too(kind: str) -> None:
    registry, _ = REGISTRIES[kind]
    for name, made in list(registry.items()):
        with pytest.raises(ConfigError, match=f"the name '{name}' is taken by {made.__name__}"):
            registry.register(name, made)
        registry.register("again", made)
        del registry["again"]
    with pytest.raises(ConfigError, match=f"{kind}: 'mine': register a class, not"):
        registry.register("mine", outside.MostRecent())


def test_methods_may_be_static_or_take_anything(register: Callable[..., Any]) -> None:
    class Loose(Policy):
        on_put = on_remove = staticmethod(lambda *args: None)

        @classmethod
        def on_hit(cls, key: str) -> None:
            """Ignore it."""

        def victim(self, *args: Any) -> str:
            raise KeyError("empty")

    register("policy", Loose)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_an_unknown_name_is_told_those_that_there_are(kind: str, register: Callable[..., Any]) -> None:
    register(kind)
    with pytest.raises(ConfigError) as refusal:
        wrapped(build(CLASSIFIERS["bert"]), tau=0.9, **{kind: "yours"})
    assert f"{kind}: unknown name 'yours'; known: {', '.join(sorted(REGISTRIES[kind][0]))}" in str(refusal.value)
    assert "mine" in str(refusal.value)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("bert", r"adapter: register an Adapter\(\.\.\.\), not 'bert'"),
        (Adapter("mine", (), "layers"), "'mine': name at least one trunk class"),
        (Adapter("mine", "Tower", "layers"), "'mine': name at least one trunk class"),  # type: ignore[arg-type]
        (Adapter("mine", ("Tower",), ""), "'mine': name the path"),
        (Adapter("mine", ("Tower",), "stages", skipped=lambda hidden: hidden), "'mine': skipped must take hidden"),  # type: ignore[misc, arg-type]
        (Adapter("mine", ("BertModel",), "layers"), "'mine'.*'BertModel'.*already belongs to 'bert'"),
    ],
)
def test_an_adapter_that_cannot_work_is_refused(adapter: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_adapter(adapter)
    assert "mine" not in ADAPTERS


@pytest.mark.usefixtures("_table")
@pytest.mark.parametrize("paths", [{"layers": "tower.steps"}, {"layers": "tower.stages", "norm": "bottom"}])
def test_an_adapter_that_does_not_fit_the_model_says_so(paths: dict[str, str]) -> None:
    register_adapter(Adapter("tower", ("Tower",), **paths))
    with pytest.raises(UnsupportedModelError, match=r"Tower: not as its adapter 'tower' says: .*(steps|bottom)"):
        wrapped(build(outside.Tower))


@pytest.mark.usefixtures("_table")
def test_a_trunk_without_a_config_is_refused() -> None:
    model = build(outside.Tower)
    del model.config
    register_adapter(Adapter("tower", ("Tower",), "tower.stages"))
    with pytest.raises(UnsupportedModelError, match="Tower: no config; give it one with vocab_size"):
        wrapped(model)


def test_an_unknown_family_is_told_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"adapter: unknown name 'tower'; known: auto, bart, bert, .*, t5"):
        wrapped(build(CLASSIFIERS["bert"]), adapter="tower")
    with pytest.raises(ConfigError, match="adapter='t5': BertForSequenceClassification holds no T5Stack"):
        wrapped(build(CLASSIFIERS["bert"]), adapter="t5")


def test_options_of_any_type_reach_the_constructor(register: Callable[..., Any]) -> None:
    class Drawn(outside.MostRecent):
        def __init__(self, rng: Random) -> None:
            super().__init__()
            self.rng = rng

    class Weighed(outside.MostRecent):
        def __init__(self, share: Fraction | None = None) -> None:  # known to type checkers alone
            super().__init__()

    # Annotations are text here: these classes have them resolved in this module, where `Random` is known.
    register("policy", Drawn)
    wrapped(build(CLASSIFIERS["bert"]), policy={"name": "mine", "rng": Random(0)})
    with pytest.raises(ConfigError, match=r"policy: mine: rng=7: .*instance of Random"):
        wrapped(build(CLASSIFIERS["bert"]), policy={"name": "mine", "rng": 7})
    with pytest.raises(ConfigError, match="policy: mine does not accept"):
        wrapped(build(CLASSIFIERS["bert"]), policy={"name": "mine", "rng": Random(0), "seed": 7})
    POLICIES["mine"] = Weighed
    wrapped(build(CLASSIFIERS["bert"]), policy={"name": "mine", "share": 0.5})


def test_bases_count_few_methods_of_their_own() -> None:
    """Four at most; an index has two facts on top, and a store is a service of its own, as their docstrings say."""
    n_own = {kind: len(example.__bases__[0].__abstractmethods__) for kind, (_, example) in REGISTRIES.items()}
    assert {kind: n for kind, n in n_own.items() if n > 4} == {"store": 9, "index": 6}
