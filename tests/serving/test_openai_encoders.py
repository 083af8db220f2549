"""OpenAI's routes for encoders, called in process and by OpenAI's, Hugging Face's and Cohere's clients."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.serving.served import LABELS, client_of, listening, make_server


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


def test_models(embedding: TestClient) -> None:
    (one,) = embedding.get("/v1/models").json()["data"]
    assert (one["id"], one["object"], one["max_model_len"]) == ("embedding", "model", 32)
    assert embedding.get("/v1/models/embedding").json() == one
    assert embedding.get("/v1/models/other").status_code == 404


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
