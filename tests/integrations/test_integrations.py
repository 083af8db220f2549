"""docs/integrations.md against the packages themselves: the examples run, give the plain model's results, and hit."""

import json
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from transformers import AutoTokenizer

from llmcache import ConfigError, RequestError
from llmcache.sklearn import Embedder
from tests.examples import DOCS, blocks, save_models, text_of
from tests.serving.served import listening, make_server, write

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of other packages

PAGE = DOCS / "integrations.md"
TEXTS = ["the parcel came late", "the parcel came today", "thank you very much", "where is my parcel"]


@pytest.fixture
def defined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the page's first example defines."""
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, sorted({word for text in TEXTS for word in text.split()}))
    defined: dict[str, Any] = {}
    exec(compile(blocks(PAGE)[0], PAGE.name, "exec"), defined)
    assert defined["texts"] == TEXTS
    yield defined
    defined["cache"].unwrap()


def run(name: str, defined: dict[str, Any]) -> None:
    (example,) = blocks(PAGE, name)
    exec(compile(example, f"{PAGE.name}, {name}", "exec"), defined)


def test_every_heading_has_a_test() -> None:
    headings = set(re.findall(r"^## (.*)$", text_of(PAGE), re.MULTILINE))
    assert headings == {
        *("scikit-learn", "LangChain", "LlamaIndex", "Haystack"),
        *("Over HTTP", "LiteLLM", "FastAPI", "MTEB", "lm-eval"),
    }
    assert len(blocks(PAGE)) == 1 + len(headings)


#: By heading: the package, what the example prints, and a second pass over the texts.
FRAMEWORKS: dict[str, tuple[str, str, Callable[[dict[str, Any]], Any]]] = {
    "scikit-learn": ("sklearn", "4", lambda defined: defined["embed"].transform(TEXTS)),
    "LangChain": (
        "langchain_core",
        "where is my parcel",
        lambda defined: defined["CachedEmbeddings"]().embed_documents(TEXTS),
    ),
    "LlamaIndex": (
        "llama_index.core",
        "where is my parcel",
        lambda defined: defined["CachedEmbedding"]().get_text_embedding_batch(TEXTS),
    ),
    "Haystack": (
        "haystack",
        "32",
        lambda defined: [
            one.embedding for one in defined["CachedEmbedder"]().run(documents=defined["documents"])["documents"]
        ],
    ),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_second_pass_is_served(name: str, defined: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    package, told, again = FRAMEWORKS[name]
    pytest.importorskip(package)
    run(name, defined)
    assert capsys.readouterr().out == f"{told}\n"
    before = defined["cache"].stats()
    assert before.n_misses == len(TEXTS)  # the query of a search is one of the texts
    vectors = again(defined)
    assert defined["cache"].stats().hits["exact"] == before.n_hits + len(TEXTS)
    with defined["cache"].disabled():
        assert np.allclose(vectors, defined["embedder"].encode(TEXTS), atol=1e-6)


def test_an_embedder_loads_shares_and_refuses(defined: dict[str, Any]) -> None:
    made = Embedder("sentence-transformers/all-MiniLM-L6-v2", normalize=True, settings={"max_entries": 3})
    other = clone(made)
    assert other is not made and other.get_params() == made.get_params()
    vectors = made.fit_transform(TEXTS[:2])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert np.allclose(other.transform(np.array(TEXTS[:2] * 2)), [*vectors, *vectors], atol=1e-6)
    assert other.cache is made.cache and made.cache.stats().n_misses == 2
    assert made.cache.config.max_entries == 3
    assert other.set_params(settings=None).cache is not made.cache
    assert made.transform([]).shape == (0, vectors.shape[1])
    table = np.array([["a"], ["b"]])
    for wrong in ("a text", [1, 2], [["a"], ["b"]], {"text": ["a"]}, table):
        with pytest.raises(RequestError, match="give a list, array or series of texts"):
            made.transform(wrong)
    for one in (made, other):
        one.cache.unwrap()


def test_an_embedder_goes_to_another_process_by_its_name(defined: dict[str, Any]) -> None:
    made = Embedder("sentence-transformers/all-MiniLM-L6-v2", normalize=True)
    made.transform(TEXTS[:1])
    other = pickle.loads(pickle.dumps(made))
    assert other.get_params() == made.get_params() and other.cache is not made.cache
    with pytest.raises(ConfigError, match="give the model's name or folder"):
        pickle.dumps(Embedder(defined["cache"]))
    for one in (made, other):
        one.cache.unwrap()


def test_clients_of_openai(defined: dict[str, Any], tmp_path: Path) -> None:
    for package in ("langchain_openai", "llama_index.embeddings.openai_like", "openai"):
        pytest.importorskip(package)
    write(tmp_path / "served", "embedding")
    server = make_server(tmp_path / "served" / "embedding", model="minilm")
    with listening(server) as (_, address):
        defined |= {"address": address, "texts": ["lost my card", "where is my cash", "the rate", "change please"]}
        run("Over HTTP", defined)
        assert server.cache.stats().hits == {"exact": 8} and server.cache.stats().n_misses == 4


def test_litellm(defined: dict[str, Any], tmp_path: Path) -> None:
    litellm, models = pytest.importorskip("litellm"), tmp_path / "served"
    for kind in ("embedding", "reranker", "decoder"):
        write(models, kind)
    server = make_server(models / "embedding", model="minilm")
    with listening(server) as (_, address):
        defined |= {"address": address, "texts": ["lost my card", "where is my cash", "the rate", "change please"]}
        run("LiteLLM", defined)
        assert server.cache.stats().hits == {"exact": 4}  # the second protocol
        made = litellm.embedding("infinity/minilm", input=TEXTS[:1], api_base=address)
        assert np.linalg.norm(made.data[0]["embedding"]) == pytest.approx(1, abs=1e-5)
    with listening(make_server(models / "reranker")) as (_, address):
        asked = {"query": "my card", "documents": ["cash", "lost my card"], "top_n": 1}
        found = litellm.rerank("infinity/reranker", **asked, api_base=address)
        assert len(found.results) == 1 and 0 <= found.results[0]["relevance_score"] <= 1
    with listening(make_server(models / "decoder")) as (_, address):
        said = [{"role": "user", "content": "where is my card"}]
        more = {"api_base": f"{address}/v1", "api_key": "-", "max_tokens": 4}
        assert litellm.completion("openai/decoder", messages=said, **more).usage.completion_tokens <= 4


def test_fastapi(defined: dict[str, Any]) -> None:
    from starlette.testclient import TestClient

    run("FastAPI", defined)
    with TestClient(defined["app"]) as client:
        first, again = (client.get("/check", params={"text": TEXTS[0]}).json() for _ in range(2))
    assert first == again and 0 <= first["blocked"] <= 1
    assert defined["guard"].stats().hits == {"exact": 1}


def test_mteb(defined: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    mteb, datasets = pytest.importorskip("mteb"), pytest.importorskip("datasets")

    class Parcels(mteb.abstasks.AbsTaskClassification):  # type: ignore[misc,name-defined]
        metadata = mteb.TaskMetadata(
            name="Parcels",
            description="Whether a text is about a parcel.",
            dataset={"path": "none", "revision": "1"},
            type="Classification",
            category="t2c",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="accuracy",
        )
        samples_per_label = 4
        n_experiments = 3

        def load_data(self, *args: Any, **kwargs: Any) -> None:
            rows = {"text": TEXTS * 4, "label": [1, 1, 0, 1] * 4}
            self.dataset = datasets.DatasetDict({name: datasets.Dataset.from_dict(rows) for name in ("train", "test")})
            self.data_loaded = True

    defined["tasks"] = [Parcels()]
    run("MTEB", defined)
    cached = defined["report"].task_results[0].get_score()
    stats = defined["cache"].stats()
    assert stats.hits["exact"] > stats.n_misses  # the training texts of each experiment, and the test's
    run("MTEB", defined)
    assert defined["cache"].stats().n_misses == stats.n_misses
    with defined["cache"].disabled():
        run("MTEB", defined)
    assert defined["report"].task_results[0].get_score() == cached


def test_lm_eval(defined: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = pytest.importorskip("lm_eval.evaluator")
    # Its own thousands of tasks take a third of a minute to list.
    monkeypatch.setattr(evaluator, "TaskManager", partial(evaluator.TaskManager, include_defaults=False))
    chat = "HuggingFaceTB/SmolLM2-135M-Instruct"
    known = AutoTokenizer.from_pretrained(chat)
    known.eos_token = known.sep_token  # it begins a text without a context
    known.save_pretrained(chat)
    rows = [{"question": text, "choices": ["late", "today"], "answer": 0} for text in TEXTS]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "parcels",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    defined["tasks"] = [task]
    run("lm-eval", defined)
    cache, evaluate = defined["chat_cache"], defined["lm_eval"].simple_evaluate
    n_asked = cache.stats().n_requests
    assert n_asked > 0 and evaluate(defined["evaluated"], tasks=[task])["results"] == defined["scores"]
    assert cache.stats().hits["exact"] >= n_asked
    cache.unwrap()
    assert evaluate(defined["evaluated"], tasks=[task])["results"] == defined["scores"]
