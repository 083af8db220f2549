"""OpenAI's routes for encoders, called in process and by OpenAI's, Hugging Face's and Cohere's clients."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.redis_server import wait_until
from tests.serving.served import LABELS, client_of, listening, make_server, model_held


@pytest.fixture
def embedding(models: Path) -> Iterator[TestClient]:
    with client_of(make_server(models / "embedding")) as client:
        yield client


def test_embeddings_as_floats_and_packed(embedding: TestClient) -> None:
    body = {"model": "embedding", "input": ["lost my card", "cash"]}
    told = embedding.post("/v1/embeddings", json=body).json()
    assert [one["index"] for one in told["data"]] == [0, 1]
    assert told["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    packed = embedding.post("/v1/embeddings", json={**body, "encoding_format": "base64", "strange": 1}).json()
    for one, other in zip(told["data"], packed["data"], strict=True):
        raw = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert raw == pytest.approx(np.array(one["embedding"]), abs=1e-6)


@pytest.mark.hostile("fields of the dialects")
def test_errors_have_openais_shape(embedding: TestClient) -> None:
    unknown = embedding.post("/v1/embeddings", json={"model": "gpt-9", "input": "a"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["param"] == "model"
    wrong = embedding.post("/v1/classify", json={"input": "a"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"] == "this route needs a classifier; embedding is an embedding model"


@pytest.mark.hostile("fields of the dialects")
@pytest.mark.parametrize(
    ("kind", "path", "body", "named", "param"),
    [
        ("embedding", "/v1/embeddings", {"input": "w1 " * 40}, "`input` must", "input"),
        ("embedding", "/v1/embeddings", {"input": ["my", "w1 " * 40]}, "`input[1]` must", "input"),
        ("classifier", "/v1/classify", {"input": ["w1 " * 40, "my"]}, "`input[0]` must", "input"),
        (
            "reranker",
            "/v1/rerank",
            {"query": "a", "documents": ["w1 " * 40]},
            "`documents[0]` with `query` m",
            "documents",
        ),
        ("embedding", "/v1/embeddings", {"input": []}, "`input` cannot be empty", "input"),
        ("reranker", "/v2/rerank", {"query": "a", "documents": []}, "`documents` cannot be empty", "documents"),
    ],
)
def test_errors_name_fields_of_the_dialect(
    models: Path, kind: str, path: str, body: dict[str, Any], named: str, param: str
) -> None:
    with client_of(make_server(models / kind)) as client:
        answer = client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(named)
        if "must" in named:
            assert error["message"].endswith("shorten it, or set `truncate_prompt_tokens` to -1")
            assert client.post(path, json=body | {"truncate_prompt_tokens": -1}).status_code == 200


def test_classify(models: Path) -> None:
    with client_of(make_server(models / "classifier")) as client:
        told = client.post("/v1/classify", json={"input": ["my card", "cash"]}).json()
    assert [one["num_classes"] for one in told["data"]] == [5, 5]
    assert told["data"][0]["label"] in LABELS
    assert sum(told["data"][1]["probs"]) == pytest.approx(1)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_token_ids_need_leave(models: Path, embedding: TestClient, path: str) -> None:
    """LangChain's default is to send OpenAI's ids, which are other words here."""
    ids = [one["id"] for one in embedding.post("/tokenize", json={"inputs": "lost my card"}).json()[0]]
    for given in (ids, [ids, ids]):
        error = embedding.post(path, json={"input": given}).json()["error"]
        assert (error["code"], error["param"]) == (400, "input")
        assert "check_embedding_ctx_length=False" in error["message"] and "--allow-token-ids" in error["message"]
    (known,) = embedding.post(path, json={"input": "lost my card"}).json()["data"]
    with client_of(make_server(models / "embedding", allow_token_ids=True)) as client:
        assert client.post(path, json={"input": ids}).json()["data"] == [known]


TEXTS = [f"w{i % 64} w{i // 64}" for i in range(2048)]


@pytest.mark.slow
def test_a_long_list_is_answered_as_its_parts_are(models: Path, embedding: TestClient) -> None:
    """Clients send a hundred texts and more: the list is refused above OpenAI's limit."""
    assert embedding.get("/info").json()["max_client_batch_size"] == 2048
    made = embedding.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]
    assert [one["index"] for one in made] == list(range(2048))
    with client_of(make_server(models / "embedding")) as client:
        for i in (0, 63, 64, 2047):
            (alone,) = client.post("/v1/embeddings", json={"input": TEXTS[i]}).json()["data"]
            assert made[i]["embedding"] == pytest.approx(alone["embedding"], abs=1e-5)
    assert embedding.post("/v1/embeddings", json={"input": [*TEXTS, "a"]}).status_code == 413
    wrong = embedding.post("/v1/embeddings", json={"input": [*TEXTS[:100], "w1 " * 40, *TEXTS[:100]]})
    assert wrong.json()["error"]["message"].startswith("`input[100]` must have at most")


def test_a_long_list_does_not_hold_up_others(models: Path, pool: ThreadPoolExecutor) -> None:
    """Other requests wait for a part of it, and only that part is queued."""
    server = make_server(models / "embedding")
    with client_of(server) as client:
        assert server.encoder is not None
        with model_held(server):
            long = pool.submit(client.post, "/v1/embeddings", json={"input": TEXTS[:100]})
            wait_until(lambda: len(server.encoder or ()) == 64)
            short = pool.submit(client.post, "/v1/embeddings", json={"input": "lost my card"})
            wait_until(lambda: len(server.encoder or ()) == 65)
        assert short.result().status_code == long.result().status_code == 200


def test_models(embedding: TestClient) -> None:
    (one,) = embedding.get("/v1/models").json()["data"]
    assert (one["id"], one["object"], one["max_model_len"]) == ("embedding", "model", 32)
    assert embedding.get("/v1/models/embedding").json() == one
    assert embedding.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("embedding", "/v1/embeddings", {"input": "my card"}),
        ("embedding", "/embeddings", {"input": "my card"}),
        ("classifier", "/v1/classify", {"input": "my card"}),
        ("reranker", "/v1/rerank", {"query": "my", "documents": ["card"]}),
        ("reranker", "/rerank", {"query": "my", "documents": ["card"]}),
        ("reranker", "/v1/score", {"text_1": "my", "text_2": "card"}),
        ("decoder", "/v1/completions", {"prompt": "the", "max_tokens": 1}),
        ("decoder", "/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}], "max_tokens": 1}),
    ],
)
def test_a_model_may_have_more_names(models: Path, kind: str, path: str, body: dict[str, Any]) -> None:
    names = ("text-embedding-3-small", "a/b")
    with client_of(make_server(models / kind, model_alias=names)) as client:
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == [kind, *names]
        assert client.get("/v1/models/a/b").json()["root"] == kind
        statuses = [client.post(path, json=body | {"model": name}).status_code for name in (kind, *names, "other")]
        assert statuses == [200, 200, 200, 404]


@pytest.mark.slow
def test_the_openai_client(models: Path) -> None:
    openai = pytest.importorskip("openai")
    with (
        listening(make_server(models / "embedding")) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client,
    ):
        made = client.embeddings.create(model="embedding", input=["lost my card", "cash"])  # base64 by default
        assert len(made.data) == 2
        assert np.linalg.norm(made.data[0].embedding) == pytest.approx(1, abs=1e-5)
        assert [one.id for one in client.models.list()] == ["embedding"]
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="a")
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
            client.embeddings.create(model="embedding", input=[[15, 16], [17]])


@pytest.mark.slow
def test_the_client_of_hugging_face(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import InferenceClient, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # it blocks local servers too
    with listening(make_server(models / "embedding")) as (_, url):
        client = InferenceClient(base_url=url)
        made = client.feature_extraction("lost my card")
        assert np.linalg.norm(made) == pytest.approx(1, abs=1e-5)
        assert InferenceClient(base_url=f"{url}/embed").feature_extraction("lost my card").tolist() == made.tolist()
        near, far = client.sentence_similarity("lost my card", other_sentences=["lost my card", "cash"])
        assert near == pytest.approx(1, abs=1e-5) and far < near
    with listening(make_server(models / "classifier")) as (_, url):
        best, second = InferenceClient(base_url=url).text_classification("lost my card", top_k=2)
        assert best.label in LABELS and best.score >= second.score


def test_infinity_has_its_routes_without_v1(embedding: TestClient) -> None:
    asked = {"input": ["lost my card"], "model": "embedding"}
    assert embedding.post("/embeddings", json=asked).json() == embedding.post("/v1/embeddings", json=asked).json()
    assert embedding.get("/models").json() == embedding.get("/v1/models").json()
    assert embedding.post("/embeddings", json={"input": []}).json()["error"]["type"] == "invalid_request_error"


def test_rerank_takes_the_shape_of_tei_or_of_infinity(models: Path) -> None:
    asked = {"query": "my card", "documents": ["cash", {"text": "lost my card"}], "top_n": 1, "model": "reranker"}
    with client_of(make_server(models / "reranker")) as client:
        made, known = (client.post(path, json=asked).json() for path in ("/rerank", "/v1/rerank"))
        assert [one.pop("document") for one in known["results"]] == [{"text": "lost my card"}]
        assert made["results"] == known["results"] and len(made["results"]) == 1
        told = client.post("/rerank", json=asked | {"return_documents": True}).json()["results"]
        assert [one["document"] for one in told] == ["lost my card"]
        ranks = client.post("/rerank", json={"query": "my card", "texts": ["cash", "lost my card"]}).json()
        assert ranks[0]["score"] == pytest.approx(made["results"][0]["relevance_score"], abs=1e-5)
        for wrong, told in (
            (asked | {"texts": ["cash"]}, "not both"),
            ({"query": "my card"}, "texts: Field required"),
            (asked | {"documents": ["cash", 3]}, "documents[1]"),
            (asked | {"documents": []}, "cannot be empty"),
            ([1], "body"),
        ):
            answer = client.post("/rerank", json=wrong)
            assert answer.status_code in (400, 422) and told in answer.json()["error"], answer.text


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items")])
def test_scores_are_those_of_rerank(models: Path, names: tuple[str, str]) -> None:
    one, two = names
    with client_of(make_server(models / "reranker")) as client:

        def scores(first: Any, second: Any, path: str = "/v1/score", **more: Any) -> list[float]:
            told = client.post(path, json={one: first, two: second, **more}).json()
            assert (told["object"], told["model"]) == ("list", "reranker") and told["usage"]["total_tokens"] > 0
            assert [(row["index"], row["object"]) for row in told["data"]] == [
                (i, "score") for i in range(len(told["data"]))
            ]
            return [row["score"] for row in told["data"]]

        documents = ["cash", "lost my card"]
        ranks = client.post("/v1/rerank", json={"query": "my card", "documents": documents}).json()["results"]
        known = pytest.approx([row["relevance_score"] for row in sorted(ranks, key=lambda row: row["index"])], abs=1e-5)
        assert scores("my card", documents) == scores(["my card"], documents, "/score") == known
        assert scores(["my card", "my card"], documents) == known and scores("my card", "cash") == known.expected[:1]
        logits = np.array(scores("my card", documents, use_activation=False))
        asked = {"query": "my card", "documents": documents, "use_activation": False}
        ranks = client.post("/v1/rerank", json=asked).json()["results"]
        assert [row["relevance_score"] for row in ranks] == pytest.approx(sorted(logits, reverse=True), abs=1e-5)
        assert list(1 / (1 + np.exp(-logits))) == known
        for path in ("/score", "/v1/score"):
            for wrong in (
                {one: ["a", "b"], two: ["a"]},
                {one: [], two: ["a"]},
                {one: "a", two: []},
                {one: 1, two: "a"},
                {},
            ):
                answer = client.post(path, json=wrong)
                assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.slow
def test_the_client_of_cohere(models: Path) -> None:
    cohere, httpx = pytest.importorskip("cohere"), pytest.importorskip("httpx")
    with (
        listening(make_server(models / "reranker")) as (_, url),
        httpx.Client() as connections,
    ):  # Cohere's client never closes its own
        client: Any = cohere.ClientV2(api_key="-", base_url=url, httpx_client=connections)
        ranks = client.rerank(model="reranker", query="my card", documents=["cash", "lost my card"], top_n=1)
        assert len(ranks.results) == 1
        assert 0 <= ranks.results[0].relevance_score <= 1
