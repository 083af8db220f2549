"""The judge: it wraps models, repeats calls, finds differences, and allows only listed ones."""

import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from judge import archive, plugin
from judge.comparing import compare
from judge.verdict import Allowed, Finding, find, read_allowed, table
from judge.wrapping import Judge, _copied
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification, DynamicCache, PreTrainedModel

from tests.fixtures import Patch
from tests.tiny_models import BARE, build, tokenizer

TINY = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
NAME = "BertForSequenceClassification"

# -- wrapping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "drift", "hits", "counts", "kinds"),
    [
        ("hit", 0.0, {"exact": 3}, {"repeated": 2}, []),  # 2 calls, each made twice with the cache
        ("cold", 0.0, {}, {"misses": 2, "bit_equal": 2}, []),
        ("hit", 1.0, {"exact": 3}, {}, ["plain", "repeat"]),
        ("twice", 1.0, {}, {}, []),
    ],
)
def test_calls_are_made_as_the_way_requires_and_an_answer_that_changes_is_seen(
    way: str, drift: float, hits: dict[str, int], counts: dict[str, int], kinds: list[str]
) -> None:
    """The model's answer drifts at each computation."""
    judge, n_computed = Judge(way), 0

    def drifting(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal n_computed
        n_computed += 1
        return output + drift * n_computed

    before = PreTrainedModel.eval, PreTrainedModel.__call__
    judge.start()
    try:
        model = BertForSequenceClassification(BertConfig(**TINY)).eval()
        model.classifier.register_forward_hook(drifting)
        ids = torch.tensor([[5, 6, 7, 8]])
        with torch.no_grad():
            for _ in range(2):
                model(input_ids=ids, attention_mask=torch.ones_like(ids))
    finally:
        judge.stop()
    assert (PreTrainedModel.eval, PreTrainedModel.__call__) == before and "__call__" not in vars(PreTrainedModel)
    assert way != "twice" or (n_computed == 4 and not judge.counts)
    assert judge.hits[NAME] == hits and judge.counts[NAME].items() >= counts.items()
    found = {(one["kind"], one["class"], one["field"]) for one in judge.differences}
    assert found == {(kind, NAME, "logits") for kind in kinds}


def test_token_states_of_a_sentence_model_are_read_as_a_user_reads_them(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules

    build(BARE["bert"]).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    parts = [modules.Transformer(str(tmp_path)), modules.Pooling(32, pooling_mode="mean")]
    judge = Judge("hit")
    judge.start(sentence_transformers.SentenceTransformer)
    try:
        model = sentence_transformers.SentenceTransformer(modules=parts, device="cpu").eval()
        model.encode(["w5 w6 w7 w8", "w9 w10"])
    finally:
        judge.stop()
    assert judge.hits["SentenceTransformer"] == {"exact": 2} and judge.counts["SentenceTransformer"]["calls"] == 1
    assert {one["field"] for one in judge.differences} <= {"sentence_embedding"}


def test_arguments_that_a_call_changes_are_copied() -> None:
    cache, features = DynamicCache(), BatchEncoding({"input_ids": torch.ones(1, 2)})
    copied = _copied(({"past": cache}, features))
    copied[0]["past"].update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    copied[1]["more"] = 1
    assert cache.get_seq_length() == 0 and "more" not in features


# -- comparing ---------------------------------------------------------------------------------------------------------


def kv(value: float) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3, 4), value), 0)
    return cache


ODD = torch.tensor([[1.0, float("nan"), float("inf")]])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"logits": ODD, "loss": None}, {"logits": ODD.clone(), "loss": None}, {}),
        ([torch.zeros(1, 3)], [torch.tensor([[0.0, 0.0, 0.5]])], {"0": (0.5, False)}),
        ({"x": torch.zeros(2)}, {"x": torch.full((2,), 2.0**-20)}, {"x": (2.0**-20, True)}),  # rounding
        ({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}, {"b": (float("inf"), False)}),
        ({"a": torch.ones(1)}, {"a": torch.ones(2)}, {"a": (float("inf"), False)}),
        ({"past": kv(0.0)}, {"past": kv(1.0)}, {"past.0.values": (1.0, False)}),
    ],
)
def test_outputs_differ_where_a_tensor_is_not_equal(one: Any, other: Any, expected: dict[str, Any]) -> None:
    assert {found.field: (found.most, found.is_close) for found in compare(one, other)} == expected


# -- the verdict -------------------------------------------------------------------------------------------------------


def result(**changes: Any) -> dict[str, Any]:
    """Return the plug-in's result for a family without differences."""
    counts = {"calls": 2, "bit_equal": 2, "repeated": 2, "errors": 0}
    counts |= {"hits": {"exact": 3}, "bypassed": {"gradients": 1}}
    plain = {"outcomes": {"T::test_a": "passed"}, "messages": {}, "classes": {"M": counts}, "refused": {}}
    return plain | {"differences": []} | changes


FAILED = result(outcomes={"T::test_a": "failed"}, messages={"T::test_a": "x\nE   AssertionError: no"})
NO_HIT = {"hits": {}, "bypassed": {}, "calls": 1}
OF_LAYERS = [
    {"test": f"T::test_{n}", "class": "M", "kind": "plain", "field": f"past.{n}.keys", "most": n} for n in range(3)
]


@pytest.mark.parametrize(
    ("results", "found"),
    [
        ({"cold": result(), "hit": result()}, []),
        ({"hit": FAILED}, [("test", "T::test_a", "AssertionError: no")]),
        ({"hit": result(outcomes={})}, [("test", "T::test_a", "missing")]),
        # Tests that fail unwrapped, or with repeated calls, do not count.
        ({"off": FAILED, "hit": FAILED}, []),
        ({"hit": FAILED, "twice": FAILED}, []),
        # Classes that the cache does not serve.
        ({"hit": result(classes={"M": NO_HIT})}, [("no hit", "M", "1 calls without gradients; bypassed: none")]),
        (
            {"hit": result(classes={"M": NO_HIT | {"hits": {"exact": 1}, "errors": 2}})},
            [("error", "M", "2 failures were computed around")],
        ),
        ({"hit": result(refused={"M": "no trunk found"})}, [("refused", "M", "no trunk found")]),
        # Layers of one class are one finding.
        (
            {"hit": result(differences=OF_LAYERS)},
            [("plain", "M", "past.K/V: 3 times, up to 2.0e+00; test_0, test_1, test_2")],
        ),
    ],
)
def test_what_the_cache_changed_is_found(results: dict[str, Any], found: list[tuple[str, str, str]]) -> None:
    assert find("bert", {"off": result(), **results}) == [Finding("bert", "hit", *one) for one in found]


def test_the_table_tells_all_ways() -> None:
    told = table("bert", {"off": result(), "cold": result(), "hit": result()})
    assert all(part in told for part in ("off 1, cold 1, hit 1", "exact 3", "gradients 1"))


def test_an_entry_needs_a_reason_and_a_kind_and_covers_what_all_its_patterns_match(tmp_path: Path) -> None:
    file = tmp_path / "allowed.toml"
    for fields in ('reason = ""\nkind = "test"', 'reason = "x"\nkind = "all"'):
        file.write_text(f"[[allowed]]\n{fields}\n")
        with pytest.raises(ValueError, match="reason"):
            read_allowed(file)
    finding = Finding("bert", "hit", "plain", "BertModel", "past.K/V: 3 times")
    entry = Allowed("by design", "plain", where="*Model", text="past.K/V*")
    assert entry.covers(finding) and entry.n_used == 1
    assert not Allowed("by design", "repeat").covers(finding)
    assert not Allowed("by design", "plain", way="cold").covers(finding)


# -- plug-in, archive --------------------------------------------------------------------------------------------------


def test_what_fails_in_any_phase_has_failed(monkeypatch: Patch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(plugin, "_OUTCOMES", seen)
    monkeypatch.setattr(plugin, "_MESSAGES", {})

    def report(when: str, outcome: str, **more: Any) -> Any:
        facts = {"failed": outcome == "failed", "skipped": outcome == "skipped", "longreprtext": "E no"}
        return SimpleNamespace(nodeid="file.py::T::test_a", when=when, **facts, **more)

    for given, told in (
        (report("call", "skipped", context=None), {}),  # a sub-test
        (report("call", "passed"), {"T::test_a": "passed"}),
        (report("teardown", "failed"), {"T::test_a": "failed"}),
    ):
        plugin.pytest_runtest_logreport(given)
        assert seen == told


def test_an_archive_is_unpacked_once_and_refused_in_another_version(tmp_path: Path, monkeypatch: Patch) -> None:
    downloads: list[str] = []

    def download(requirement: str, folder: Path) -> None:
        """Write an archive that says that it is version 1.2."""
        downloads.append(requirement)
        stem = requirement.replace("-", "_").replace("==", "-")
        (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nVersion: 1.2\nName: x\n")
        with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as packed:
            packed.add(folder / "PKG-INFO", f"{stem}/PKG-INFO")

    monkeypatch.setattr(archive, "_download", download)
    monkeypatch.setattr(archive.importlib.metadata, "version", lambda name: "1.2")
    for _ in range(2):
        assert archive.fetch("some-package", tmp_path) == tmp_path / "some_package-1.2"
    monkeypatch.setattr(archive.importlib.metadata, "version", lambda name: "1.3")
    with pytest.raises(RuntimeError, match=r"not version 1\.3"):
        archive.fetch("some-package", tmp_path)
    assert downloads == ["some-package==1.2", "some-package==1.3"]
    assert not (tmp_path / "some_package-1.3").exists()
