"""The pages of docs/: examples run, links resolve, and each idea has one name."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import llmcache
from experiments.models.onnx import export
from experiments.report import site
from llmcache import CODECS, FINGERPRINTS, INDEXES, POLICIES, STORES, LLMCache
from llmcache.models.adapters import ADAPTERS
from llmcache.reuse.audit.account import BY_RISK
from llmcache.reuse.audit.alarm import CLOSER, WATCH
from tests.examples import DOCS, ROOT, run, text_of
from tests.fixtures import Patch, Shown
from tests.tiny_models import CLASSIFIERS, build, tokenizer, tokens

PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = {"cli.md", "settings.md"}
WRITTEN = [ROOT / "README.md", *(page for page in PAGES if page.name not in GENERATED)]
REGISTRIES: list[dict[str, Any]] = [POLICIES, STORES, INDEXES, FINGERPRINTS, CODECS, ADAPTERS]

#: Words that docs/glossary.md replaces.
OUT_OF_USE = re.compile(
    r"\b(at the door|shel(f|ves)|step(s|ped)? aside|struck|strikes?|doubt(s|ed)?|go(es)? by the cache|looked into)\b"
)
#: Figures with a unit that prose may contain: settings.
SETTINGS = {"0.5 %", "1 %", "30 %", "99 %", "120 %", "100 ms", "180 s"}


@pytest.fixture
def added() -> Iterator[Callable[[], list[str]]]:
    """A function that returns the names registered by examples; they are removed afterwards."""
    before = [dict(registry) for registry in REGISTRIES]
    yield lambda: [name for registry, known in zip(REGISTRIES, before, strict=True) for name in registry.keys() - known]
    for registry, known in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(known)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("README.md", "howto.md", "onnx.md")),
        "index.md",
        "decoders.md",
        "generation.md",
        "extending.md",
        "stores.md",
    ],
)
def test_examples_run(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: Shown, added: Callable[[], list[str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    caches: list[LLMCache] = []
    wrap = LLMCache.wrap
    monkeypatch.setattr(
        LLMCache, "wrap", lambda *args, **settings: caches.append(wrap(*args, **settings)) or caches[-1]
    )
    compiled = torch.compile  # with "inductor" it takes half a minute: tests/engines have it
    monkeypatch.setattr(torch, "compile", lambda model, **how: compiled(model, **{**how, "backend": "eager"}))
    page = ROOT / name if name == "README.md" else DOCS / name
    model = build(CLASSIFIERS["bert"])
    if name == "onnx.md":
        given = dict(tokenizer()("w1 w2", return_tensors="pt"))
        export(model, {key: given[key] for key in ("input_ids", "attention_mask")}, tmp_path / "model.onnx")
    defined = run(tmp_path, page, model=model, tokenizer=tokenizer(), inputs={"input_ids": tokens(1, 6)})
    told = capsys.readouterr().out
    if name == "README.md":
        assert told == "exact 0.5\n"
    if name == "index.md":
        assert (
            "exact 0.5\n" in told and "{'exact': 2}\n" in told and "requests cannot show a loss of at most 0.01" in told
        )
    if name == "howto.md":
        assert "{'exact': 3}" in told and "\nprefix " in told and "certified" in told
        assert "'training': " in told and re.search(r"onnxruntime.*n_requests=3", told)
    if name == "onnx.md":
        assert "{'exact': 1}\n" in told and defined["cache"].calibration is not None and (tmp_path / "saved").is_dir()
    if name == "decoders.md":
        assert "hits: {'prefix': 2}" in told
    if name == "generation.md":
        assert defined["cache"].stats().n_requests == 2 and defined["turn"].generation.tokens
    if name == "extending.md":
        assert added() == ["random", "shared", "scan", "words", "bf16", "mine"]
        assert {cache.stats().errors for cache in caches} == {0} and caches[-1].stats().n_stored == 1
        assert told == "same_tokens\n"


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *WRITTEN], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)", text_of(page))
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert "://" in link or target.exists(), link
        if anchor:
            headings = [
                re.sub(r"[^\w\s-]", "", line).strip().lower()
                for line in re.findall(r"^#+ (.*)$", text_of(target), re.M)
            ]
            assert anchor in {heading.replace(" ", "-") for heading in headings}, link


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_pages_name_files_that_exist_leave_figures_to_tables_and_have_one_name_for_each_idea(page: Path) -> None:
    named = re.findall(r"`([\w/]+/(?:\w+\.py|\w+/)?|[\w/]+\.py)`", text_of(page))
    roots = [ROOT, ROOT / "llmcache"]
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []
    # A figure that links to its table may be told: test_readme.py compares it.
    told = r"\[[\d.]+ s\]\(docs/results/[^)]*\)"
    prose = re.sub(rf"```.*?```|`[^`]*`|^\|[^\n]*$|{told}", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"\d[\d.,]* (?:%|ms|s|points|times|MB|GB)(?!\w)", prose)) <= SETTINGS
    assert OUT_OF_USE.search(text_of(page)) is None


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            (value,) = entry.values()
            yield from [value] if isinstance(value, str) else pages(value)

    assert sorted(pages(config["nav"])) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_the_api_page_has_every_public_name() -> None:
    text = text_of(DOCS / "api.md")
    errors = {name for name in llmcache.__all__ if name.endswith("Error")}
    shown = set(re.findall(r"^::: llmcache\.(\w+)$", text, re.MULTILINE))
    assert set(llmcache.__all__) - errors <= shown
    assert "::: llmcache.errors" in text


def test_the_site_carries_configurations_and_names_other_files() -> None:
    for source, up in (("a.md", ""), ("results/a.md", "../")):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=source))
        outside = ("[a]({}configs/a.yaml)", "[results/R.md]({}results/R.md)", "[this]({}Makefile)")
        text = ", ".join(one.format(f"{up}../") for one in outside) + f" and [b]({up}b.md#c)"
        made = site.on_page_markdown(text, page)
        assert made == f"[a]({up}configs/a.yaml), `results/R.md`, this (`Makefile`) and [b]({up}b.md#c)"


def test_how_hits_are_drawn_is_what_the_code_says() -> None:
    text = text_of(DOCS / "calibration.md")
    assert f"`audit * (1 + {BY_RISK:g} * share)`" in text
    assert f"`{CLOSER}` times that" in text and f"first `{WATCH}` requests" in text
    told = f"up to {1 + BY_RISK:g} times as high for risky hits, and {CLOSER} times for the first {WATCH} requests"
    assert told in text_of(DOCS / "settings.md")
