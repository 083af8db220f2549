"""The routes of encoders, as in text-embeddings-inference and as in OpenAI's API: fields, shapes, truncation."""

import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from tests.redis_server import wait_until
from tests.serving.served import LABELS, Client, Serve, model_held


@pytest.fixture
def classifier(serve: Serve) -> Client:
    return serve("classifier")


@pytest.fixture
def embedding(serve: Serve) -> Client:
    return serve("embedding")


@pytest.fixture
def reranker(serve: Serve) -> Client:
    return serve("reranker")


def post(client: TestClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


# -- as in text-embeddings-inference -----------------------------------------------------------------------------------


def test_predict_ranks_labels_the_same_computed_or_served(classifier: Client) -> None:
    first, second = (post(classifier, "/predict", inputs="lost my card") for _ in range(2))
    assert first == second and {one["label"] for one in first} == set(LABELS)
    scores = [one["score"] for one in first]
    assert scores == sorted(scores, reverse=True) and sum(scores) == pytest.approx(1)
    raw = post(classifier, "/predict", inputs="lost my card", raw_scores=True)
    shares = torch.tensor([one["score"] for one in raw]).softmax(0)
    assert shares.tolist() == pytest.approx(scores, abs=1e-5)
    assert post(classifier, "/", inputs="lost my card", parameters={}) == [first]  # as on the hub
    asked = {"top_k": 2, "function_to_apply": "none"}
    assert post(classifier, "/", inputs="lost my card", parameters=asked) == [raw[:2]]


def test_predict_takes_a_text_pairs_and_batches(classifier: Client) -> None:
    single = post(classifier, "/predict", inputs="my card")
    assert post(classifier, "/predict", inputs=["my card"]) == single
    (pair,) = post(classifier, "/predict", inputs=[["my card", "lost"]])
    batch = post(classifier, "/predict", inputs=[["my card"], ["my card", "lost"]])
    assert [one["label"] for one in batch[0]] == [one["label"] for one in single]
    assert [one["score"] for one in batch[1]] == pytest.approx([one["score"] for one in pair], abs=1e-5)
    assert [one["score"] for one in pair] != pytest.approx([one["score"] for one in single], abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("classifier", "/predict", {"inputs": "lost my card"}),
        ("embedding", "/embed", {"inputs": ["lost my card", "cash"], "normalize": False}),
        ("embedding", "/similarity", {"inputs": {"source_sentence": "my card", "sentences": ["cash"]}}),
        ("reranker", "/rerank", {"query": "my card", "texts": ["cash", "lost my card"], "return_text": True}),
    ],
)
def test_the_main_route_is_that_of_the_model(serve: Serve, kind: str, path: str, body: dict[str, Any]) -> None:
    known = post(serve(kind), path, **body)
    assert post(serve(kind), "/", **body) == post(serve(kind), "/invocations", **body) == known


def test_embeddings_may_be_raw_or_short_and_of_token_ids(embedding: Client) -> None:
    (one,) = post(embedding, "/embed", inputs="lost my card")
    (raw,) = post(embedding, "/embed", inputs="lost my card", normalize=False)
    assert np.linalg.norm(raw) != pytest.approx(1, abs=1e-2)
    assert np.array(raw) / np.linalg.norm(raw) == pytest.approx(np.array(one), abs=1e-5)
    (short,) = post(embedding, "/embed", inputs="lost my card", dimensions=4)
    assert len(short) == 4 and np.linalg.norm(short) == pytest.approx(1, abs=1e-5)
    ids = [one["id"] for one in post(embedding, "/tokenize", inputs="lost my card")[0]]
    assert post(embedding, "/embed", inputs=[ids, ids]) == [one, one]


def test_rerank_ranks_texts(reranker: Client) -> None:
    texts = ["my card", "the rate", "lost cash"]
    ranks = post(reranker, "/rerank", query="where is my card", texts=texts, return_text=True)
    assert sorted(one["index"] for one in ranks) == [0, 1, 2]
    assert [one["text"] for one in ranks] == [texts[one["index"]] for one in ranks]
    scores = [one["score"] for one in ranks]
    assert scores == sorted(scores, reverse=True)
    raw = post(reranker, "/rerank", query="where is my card", texts=texts, raw_scores=True)
    assert [1 / (1 + np.exp(-one["score"])) for one in raw] == pytest.approx(scores, abs=1e-5)
    assert "text" not in raw[0]


def test_tokenize_and_decode(classifier: Client) -> None:
    (pieces,) = post(classifier, "/tokenize", inputs="lost my card")
    assert [one["special"] for one in pieces] == [True, False, False, False, True]
    assert pieces[1] == {"id": 4, "text": "lost", "special": False, "start": 0, "stop": 4}
    ids = [one["id"] for one in pieces]
    assert post(classifier, "/decode", ids=ids) == ["lost my card"]
    assert post(classifier, "/decode", ids=[ids, ids], skip_special_tokens=False)[0].startswith("[CLS]")
    assert len(post(classifier, "/tokenize", inputs=["my", "card"], add_special_tokens=False)[1]) == 1


def test_what_is_too_long_is_cut_at_the_end_that_is_asked_for(classifier: Client, embedding: Client) -> None:
    long = "w1 " * 20 + "card " * 20
    right = post(classifier, "/predict", inputs=long, truncate=True)
    left = post(classifier, "/predict", inputs=long, truncate=True, truncation_direction="Left")
    assert right != left
    assert right == post(classifier, "/predict", inputs="w1 " * 20 + "card " * 10)
    (cut,) = post(embedding, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)["data"]
    assert post(embedding, "/embed", inputs=long, truncate=True)[0] == pytest.approx(cut["embedding"], abs=1e-5)


def test_a_requests_tokens_are_bounded(serve: Serve) -> None:
    """A query is read with each text, and /embed_all returns a vector for each token."""
    client, asked = serve("reranker", payload_limit=1000), {"query": "w1 " * 200, "truncate": True}
    assert post(client, "/rerank", **asked, texts=["my"] * 6)
    assert "query" in post(client, "/rerank", 413, **asked, texts=["my"] * 7)["error"]
    client = serve("embedding", max_batch_tokens=8)
    assert len(post(client, "/embed_all", inputs=["my", "lost my card"])) == 2
    assert len(post(client, "/embed_all", inputs="w1 w2 w3 w4 w5 w6 w7 w8")[0]) == 10
    assert "--max-batch-tokens" in post(client, "/embed_all", 413, inputs=["my card", "lost my card"])["error"]


def test_info(classifier: Client) -> None:
    info = classifier.get("/info").json()
    assert info["served_model_name"] == "classifier"
    assert info["model_type"]["classifier"]["id2label"]["0"] == LABELS[0]
    assert (info["model_dtype"], info["max_input_length"], info["max_client_batch_size"]) == ("float32", 32, 2048)
    assert (info["model_device"], info["engine"], info["draft"]) == ("cpu", "eager", None)
    assert "eager, float32 on cpu" in classifier.get("/").text


# -- as in OpenAI's API, vLLM and Infinity -----------------------------------------------------------------------------


def test_embeddings_as_floats_and_packed(embedding: Client) -> None:
    body = {"model": "embedding", "input": ["lost my card", "cash"]}
    told = post(embedding, "/v1/embeddings", **body)
    assert [one["index"] for one in told["data"]] == [0, 1]
    assert told["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    assert post(embedding, "/embeddings", **body) == told  # Infinity has no /v1
    packed = post(embedding, "/v1/embeddings", **body, encoding_format="base64", strange=1)
    for one, other in zip(told["data"], packed["data"], strict=True):
        raw = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert raw == pytest.approx(np.array(one["embedding"]), abs=1e-6)


def test_token_ids_may_be_allowed(serve: Serve, embedding: Client) -> None:
    ids = [one["id"] for one in post(embedding, "/tokenize", inputs="lost my card")[0]]
    known = post(embedding, "/v1/embeddings", input="lost my card")["data"]
    assert post(serve("embedding", allow_token_ids=True), "/v1/embeddings", input=ids)["data"] == known


def test_classify(classifier: Client) -> None:
    told = post(classifier, "/v1/classify", input=["my card", "cash"])["data"]
    assert [one["num_classes"] for one in told] == [5, 5] and sum(told[1]["probs"]) == pytest.approx(1)
    assert told[0]["label"] == post(classifier, "/predict", inputs="my card")[0]["label"]


TEXTS = [f"w{i % 64} w{i // 64}" for i in range(2048)]


@pytest.mark.slow
def test_a_long_list_is_answered_as_its_parts_are(serve: Serve, embedding: Client) -> None:
    """Clients send a hundred texts and more: the list is refused above OpenAI's limit."""
    made = post(embedding, "/v1/embeddings", input=TEXTS)["data"]
    assert [one["index"] for one in made] == list(range(2048))
    for i in (0, 63, 64, 2047):
        (alone,) = post(serve("embedding", warmup_tokens=0), "/v1/embeddings", input=TEXTS[i])["data"]
        assert made[i]["embedding"] == pytest.approx(alone["embedding"], abs=1e-5)
    post(embedding, "/v1/embeddings", 413, input=[*TEXTS, "a"])
    wrong = post(embedding, "/v1/embeddings", 400, input=[*TEXTS[:100], "w1 " * 40, *TEXTS[:100]])
    assert wrong["error"]["message"].startswith("`input[100]` must have at most")


def test_a_long_list_does_not_hold_up_others(serve: Serve, pool: ThreadPoolExecutor) -> None:
    """Other requests wait for a part of it, and only that part is queued."""
    client = serve("embedding", warmup_tokens=0)
    with model_held(client.server):
        long = pool.submit(post, client, "/v1/embeddings", input=TEXTS[100:200])
        wait_until(lambda: len(client.server.encoder or ()) == 64)
        short = pool.submit(post, client, "/v1/embeddings", input="lost my card")
        wait_until(lambda: len(client.server.encoder or ()) == 65)
    assert short.result() and long.result()


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("embedding", "/v1/embeddings", {"input": "my card"}),
        ("classifier", "/v1/classify", {"input": "my card"}),
        ("reranker", "/v1/rerank", {"query": "my", "documents": ["card"]}),
        ("reranker", "/rerank", {"query": "my", "documents": ["card"]}),
        ("reranker", "/v1/score", {"text_1": "my", "text_2": "card"}),
        ("decoder", "/v1/completions", {"prompt": "the", "max_tokens": 1}),
        ("decoder", "/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}], "max_tokens": 1}),
    ],
)
def test_a_model_may_have_more_names(serve: Serve, kind: str, path: str, body: dict[str, Any]) -> None:
    names = ("text-embedding-3-small", "a/b")
    client = serve(kind, model_alias=names)
    listed = client.get("/v1/models").json()
    assert client.get("/models").json() == listed and listed["data"][0]["object"] == "model"
    assert [one["id"] for one in listed["data"]] == [kind, *names]
    assert client.get("/v1/models/a/b").json()["root"] == kind
    assert client.get("/v1/models/other").status_code == 404
    statuses = [client.post(path, json=body | {"model": name}).status_code for name in (kind, *names, "other")]
    assert statuses == [200, 200, 200, 404]


def test_rerank_takes_the_shape_of_tei_or_of_infinity(reranker: Client) -> None:
    asked = {"query": "my card", "documents": ["cash", {"text": "lost my card"}], "top_n": 1, "model": "reranker"}
    made, known, second = (post(reranker, path, **asked) for path in ("/rerank", "/v1/rerank", "/v2/rerank"))
    assert known["results"] == second["results"]
    assert [one.pop("document") for one in known["results"]] == [{"text": "lost my card"}]
    assert made["results"] == known["results"] and len(made["results"]) == 1
    told = post(reranker, "/rerank", **asked, return_documents=True)["results"]
    assert [one["document"] for one in told] == ["lost my card"]
    ranks = post(reranker, "/rerank", query="my card", texts=["cash", "lost my card"])
    assert ranks[0]["score"] == pytest.approx(made["results"][0]["relevance_score"], abs=1e-5)


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items")])
def test_scores_are_those_of_rerank(reranker: Client, names: tuple[str, str]) -> None:
    def scores(first: Any, second: Any, path: str = "/v1/score", **more: Any) -> list[float]:
        told = post(reranker, path, **dict(zip(names, (first, second), strict=True)), **more)
        assert (told["object"], told["model"]) == ("list", "reranker") and told["usage"]["total_tokens"] > 0
        assert [(row["index"], row["object"]) for row in told["data"]] == [
            (i, "score") for i in range(len(told["data"]))
        ]
        return [row["score"] for row in told["data"]]

    def ranks(**more: Any) -> list[float]:
        found = post(reranker, "/v1/rerank", query="my card", documents=documents, **more)["results"]
        return [row["relevance_score"] for row in sorted(found, key=lambda row: row["index"])]

    documents = ["cash", "lost my card"]
    known = pytest.approx(ranks(), abs=1e-5)
    assert scores("my card", documents) == scores(["my card"], documents, "/score") == known
    assert scores(["my card", "my card"], documents) == known and scores("my card", "cash") == known.expected[:1]
    logits = np.array(scores("my card", documents, use_activation=False))
    assert ranks(use_activation=False) == pytest.approx(logits, abs=1e-5)
    assert list(1 / (1 + np.exp(-logits))) == known
