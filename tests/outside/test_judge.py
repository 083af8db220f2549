"""The judge: it wraps models, repeats calls, finds differences, and allows only listed ones."""

import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from judge import __main__ as command
from judge import archive, plugin
from judge.comparing import compare
from judge.verdict import Allowed, Finding, find, read_allowed, table
from judge.wrapping import Judge, _copied
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification, DynamicCache, PreTrainedModel

from tests.tiny_models import BARE, build, tokenizer

TINY = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def result(**changes: Any) -> dict[str, Any]:
    """Return the plug-in's result for a family without differences."""
    counts = {
        "hits": {"exact": 3},
        "bypassed": {"gradients": 1},
        "calls": 2,
        "bit_equal": 2,
        "repeated": 2,
        "errors": 0,
    }
    plain = {"outcomes": {"T::test_a": "passed"}, "messages": {}, "classes": {"M": counts}, "refused": {}}
    return plain | {"differences": []} | changes


def judged(way: str, drift: float = 0.0) -> tuple[Judge, int]:
    """Judge two calls of a model whose answer drifts at each computation; return the judge and the computations."""
    judge, n_computed = Judge(way), 0

    def drifting(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal n_computed
        n_computed += 1
        return output + drift * n_computed

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
    return judge, n_computed


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


# -- comparing ---------------------------------------------------------------------------------------------------------


def test_equal_outputs_do_not_differ() -> None:
    one = {"logits": torch.tensor([[1.0, float("nan"), float("inf")]]), "loss": None}
    assert compare(one, {"logits": one["logits"].clone(), "loss": None}) == []


def test_a_difference_at_padding_is_told_from_one_at_a_token() -> None:
    one, other = torch.zeros(1, 3, 2), torch.zeros(1, 3, 2)
    other[0, 2] = 0.5
    (found,) = compare([one], [other], torch.tensor([[1, 1, 0]]))
    assert (found.field, found.most, found.at_valid, found.is_close) == ("0", 0.5, 0.0, False)
    (found,) = compare([one], [other], torch.tensor([[1, 1, 1]]))
    assert found.at_valid == 0.5


def test_rounding_is_close_and_what_one_output_lacks_is_not() -> None:
    (found,) = compare({"x": torch.ones(2)}, {"x": torch.ones(2) + 1e-6})
    assert found.is_close
    (found,) = compare({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
    assert (found.field, found.is_close) == ("b", False)
    assert not compare({"a": torch.ones(1)}, {"a": torch.ones(2)})[0].is_close


def test_kv_is_compared_layer_by_layer() -> None:
    caches = [DynamicCache(), DynamicCache()]
    for number, cache in enumerate(caches):
        cache.update(torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3, 4), float(number)), 0)
    (found,) = compare({"past": caches[0]}, {"past": caches[1]}, torch.tensor([[1, 1, 0]]))
    assert (found.field, found.at_valid) == ("past.0.values", 1.0)


# -- wrapping ----------------------------------------------------------------------------------------------------------


def test_hits_are_repeated_and_counted_and_cold_calls_are_computed() -> None:
    judge, _ = judged("hit")
    assert judge.hits["BertForSequenceClassification"] == {"exact": 3}  # 2 calls, each made twice with the cache
    assert judge.counts["BertForSequenceClassification"]["repeated"] == 2
    assert judge.differences == []
    judge, _ = judged("cold")
    counts = judge.counts["BertForSequenceClassification"]
    assert (counts["misses"], counts["bit_equal"]) == (2, 2)
    assert not judge.hits["BertForSequenceClassification"]


def test_an_answer_that_changes_is_seen() -> None:
    judge, _ = judged("hit", drift=1.0)
    assert {one["kind"] for one in judge.differences} == {"plain", "repeat"}
    assert {(one["class"], one["field"]) for one in judge.differences} == {("BertForSequenceClassification", "logits")}


def test_twice_wraps_nothing() -> None:
    judge, n_computed = judged("twice", drift=1.0)
    assert n_computed == 4
    assert not judge.counts


def test_arguments_that_a_call_changes_are_copied() -> None:
    cache = DynamicCache()
    features = BatchEncoding({"input_ids": torch.ones(1, 2)})
    copied = _copied(({"past": cache}, features))
    copied[0]["past"].update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    copied[1]["more"] = 1
    assert cache.get_seq_length() == 0
    assert "more" not in features


def test_stopping_gives_the_classes_back() -> None:
    before = PreTrainedModel.eval, PreTrainedModel.__call__
    one = Judge("hit")
    one.start()
    assert PreTrainedModel.eval is not before[0]
    one.stop()
    assert (PreTrainedModel.eval, PreTrainedModel.__call__) == before
    assert "__call__" not in vars(PreTrainedModel)


# -- the verdict -------------------------------------------------------------------------------------------------------


FAILED = result(outcomes={"T::test_a": "failed"}, messages={"T::test_a": "x\nE   AssertionError: no"})
NO_HIT = {"hits": {}, "bypassed": {}, "calls": 1}


@pytest.mark.parametrize(
    ("results", "found"),
    [
        ({"off": result(), "cold": result(), "hit": result()}, []),
        ({"off": result(), "hit": FAILED}, [("test", "T::test_a", "AssertionError: no")]),
        ({"off": result(), "hit": result(outcomes={})}, [("test", "T::test_a", "missing")]),
        # Tests that fail unwrapped, or with repeated calls, do not count.
        ({"off": FAILED, "hit": FAILED}, []),
        ({"off": result(), "hit": FAILED, "twice": FAILED}, []),
        # Classes that the cache does not serve.
        (
            {"off": result(), "hit": result(classes={"M": NO_HIT})},
            [("no hit", "M", "1 calls without gradients; bypassed: none")],
        ),
        (
            {"off": result(), "hit": result(classes={"M": NO_HIT | {"hits": {"exact": 1}, "errors": 2}})},
            [("error", "M", "2 failures were computed around")],
        ),
        ({"off": result(), "hit": result(refused={"M": "no trunk found"})}, [("refused", "M", "no trunk found")]),
    ],
)
def test_what_the_cache_changed_is_found(results: dict[str, Any], found: list[tuple[str, str, str]]) -> None:
    assert find("bert", results) == [Finding("bert", "hit", *one) for one in found]


def test_outputs_are_grouped_by_class_and_place() -> None:
    ones = [
        {"test": f"T::test_{n}", "class": "M", "kind": "plain", "field": f"past.{n}.keys", "most": n, "at_valid": 0.0}
        for n in range(3)
    ]
    (found,) = find("bert", {"off": result(), "hit": result(differences=ones)})
    assert found.where == "M"
    assert found.text.startswith("past.K/V: 3 times, up to 2.0e+00, 0.0e+00 at valid positions; test_0, test_1, test_2")


def test_an_entry_covers_what_all_its_patterns_match() -> None:
    finding = Finding("bert", "hit", "plain", "BertModel", "past.K/V: 3 times")
    entry = Allowed("by design", "plain", where="*Model", text="past.K/V*")
    assert entry.covers(finding)
    assert entry.n_used == 1
    assert not Allowed("by design", "repeat").covers(finding)
    assert not Allowed("by design", "plain", way="cold").covers(finding)


@pytest.mark.parametrize("entry", ['reason = ""\nkind = "test"', 'reason = "x"\nkind = "all"'])
def test_an_entry_needs_a_reason_and_a_kind(tmp_path: Path, entry: str) -> None:
    file = tmp_path / "allowed.toml"
    file.write_text(f"[[allowed]]\n{entry}\n")
    with pytest.raises(ValueError, match="reason"):
        read_allowed(file)
    assert len(read_allowed(archive.HERE / "allowed.toml")) <= 12  # valid and short


def test_the_table_tells_all_ways() -> None:
    told = table("bert", {"off": result(), "cold": result(), "hit": result()})
    assert "off 1, cold 1, hit 1" in told
    assert "exact 3" in told
    assert "gradients 1" in told


# -- plug-in, archive, command -----------------------------------------------------------------------------------------


def test_what_fails_in_any_phase_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(plugin, "_OUTCOMES", seen)
    monkeypatch.setattr(plugin, "_MESSAGES", {})

    def report(when: str, outcome: str, **more: Any) -> Any:
        facts = {"failed": outcome == "failed", "skipped": outcome == "skipped", "longreprtext": "E no"}
        return SimpleNamespace(nodeid="file.py::T::test_a", when=when, **facts, **more)

    plugin.pytest_runtest_logreport(report("call", "skipped", context=None))  # a sub-test
    assert seen == {}
    plugin.pytest_runtest_logreport(report("call", "passed"))
    assert seen == {"T::test_a": "passed"}
    plugin.pytest_runtest_logreport(report("teardown", "failed"))
    assert seen == {"T::test_a": "failed"}


def pack(folder: Path, stem: str, version: str) -> None:
    """Write a source archive."""
    inside = folder / "made" / stem
    inside.mkdir(parents=True)
    (inside / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nVersion: {version}\nName: x\n")
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as packed:
        packed.add(inside, stem)


def test_an_archive_is_unpacked_once_and_refused_in_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive.importlib.metadata, "version", lambda name: "1.2")
    monkeypatch.setattr(archive, "_download", lambda requirement, folder: pack(folder, "some_package-1.2", "1.2"))
    assert archive.fetch("some-package", tmp_path) == tmp_path / "some_package-1.2"
    monkeypatch.setattr(archive, "_download", lambda requirement, folder: pytest.fail("downloaded again"))
    assert archive.fetch("some-package", tmp_path).is_dir()
    monkeypatch.setattr(archive, "_download", lambda requirement, folder: pack(folder, "other-1.2", "1.1"))
    with pytest.raises(RuntimeError, match=r"not version 1\.2"):
        archive.fetch("other", tmp_path)
    assert not (tmp_path / "other-1.2").exists()


def test_what_is_left_out_has_a_reason() -> None:
    assert len(command.FAMILIES) == 13
    assert all(command.LEFT_OUT.values())
