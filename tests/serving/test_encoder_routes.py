"""The routes of encoders, as in text-embeddings-inference and as in OpenAI's API: fields, shapes, truncation."""

import base64
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures import Pool
from tests.redis_server import wait_until
from tests.serving.served import LABELS, Client, Serve, model_held

TEXT = "lost my card"


@pytest.fixture
def classifier(serve: Serve) -> Client:
    return serve("classifier")


@pytest.fixture
def embedding(serve: Serve) -> Client:
    return serve("embedding")


@pytest.fixture
def reranker(serve: Serve) -> Client:
    return serve("reranker")


def post(client: Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def near(values: Any) -> Any:
    return pytest.approx(np.array(values), abs=1e-5)


def test_predictions_are_ranked_labels_of_a_text_of_pairs_and_of_batches(classifier: Client) -> None:
    def of(inputs: Any, **more: Any) -> Any:
        return post(classifier, "/predict", inputs=inputs, **more)

    def scores(ranks: Any) -> list[float]:
        return [one["score"] for one in ranks]

    first = of(TEXT)
    assert first == of(TEXT) == of([TEXT]) and {one["label"] for one in first} == set(LABELS)
    assert scores(first) == sorted(scores(first), reverse=True) and sum(scores(first)) == pytest.approx(1)
    raw = of(TEXT, raw_scores=True)
    assert torch.tensor(scores(raw)).softmax(0).tolist() == near(scores(first))
    assert post(classifier, "/", inputs=TEXT, parameters={}) == [first]  # as on the hub
    asked = {"top_k": 2, "function_to_apply": "none"}
    assert post(classifier, "/", inputs=TEXT, parameters=asked) == [raw[:2]]
    (pair,) = of([[TEXT, "cash"]])
    batch = of([[TEXT], [TEXT, "cash"]])
    assert [scores(one) for one in batch] == [near(scores(first)), near(scores(pair))] and scores(pair) != scores(first)
    told = post(classifier, "/v1/classify", input=[TEXT, "cash"])["data"]
    assert [one["num_classes"] for one in told] == [5, 5] and sum(told[1]["probs"]) == pytest.approx(1)
    assert told[0]["label"] == first[0]["label"]


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("classifier", "/predict", {"inputs": TEXT}),
        ("embedding", "/embed", {"inputs": [TEXT, "cash"], "normalize": False}),
        ("embedding", "/similarity", {"inputs": {"source_sentence": "my card", "sentences": ["cash"]}}),
        ("reranker", "/rerank", {"query": "my card", "texts": ["cash", TEXT], "return_text": True}),
    ],
)
def test_the_main_route_is_that_of_the_model(serve: Serve, kind: str, path: str, body: dict[str, Any]) -> None:
    known = post(serve(kind), path, **body)
    assert post(serve(kind), "/", **body) == post(serve(kind), "/invocations", **body) == known


def test_embeddings_may_be_raw_or_short_packed_and_of_token_ids(serve: Serve, embedding: Client) -> None:
    (one,) = post(embedding, "/embed", inputs=TEXT)
    (raw,) = post(embedding, "/embed", inputs=TEXT, normalize=False)
    assert np.linalg.norm(raw) != pytest.approx(1, abs=1e-2) and np.array(raw) / np.linalg.norm(raw) == near(one)
    (short,) = post(embedding, "/embed", inputs=TEXT, dimensions=4)
    assert len(short) == 4 and np.linalg.norm(short) == pytest.approx(1, abs=1e-5)
    body = {"model": "embedding", "input": [TEXT, "cash"]}
    told = post(embedding, "/v1/embeddings", **body)
    assert [row["index"] for row in told["data"]] == [0, 1] and told["data"][0]["embedding"] == near(one)
    assert told["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    assert post(embedding, "/embeddings", **body) == told  # Infinity has no /v1
    packed = post(embedding, "/v1/embeddings", **body, encoding_format="base64", strange=1)
    for row, other in zip(told["data"], packed["data"], strict=True):
        assert np.frombuffer(base64.b64decode(other["embedding"]), "<f4") == near(row["embedding"])
    ids = [piece["id"] for piece in post(embedding, "/tokenize", inputs=TEXT)[0]]
    assert post(embedding, "/embed", inputs=[ids, ids]) == [one, one]
    assert post(serve("embedding", allow_token_ids=True), "/v1/embeddings", input=ids)["data"][0] == told["data"][0]


def test_rerankers_rank_and_score_alike_in_every_dialect(reranker: Client) -> None:
    """TEI's and Infinity's `/rerank`, Jina's `/v1/rerank` and vLLM's `/v1/score`."""
    query, texts = "where is my card", ["my card", "the rate", "lost cash"]
    ranks = post(reranker, "/rerank", query=query, texts=texts, return_text=True)
    assert sorted(one["index"] for one in ranks) == [0, 1, 2]
    assert [one["text"] for one in ranks] == [texts[one["index"]] for one in ranks]
    scores = [one["score"] for one in ranks]
    assert scores == sorted(scores, reverse=True)
    raw = post(reranker, "/rerank", query=query, texts=texts, raw_scores=True)
    assert [1 / (1 + np.exp(-one["score"])) for one in raw] == near(scores) and "text" not in raw[0]
    asked = {"query": query, "documents": [texts[0], {"text": texts[1]}, texts[2]], "top_n": 2, "model": "reranker"}
    made, known, second = (post(reranker, path, **asked)["results"] for path in ("/rerank", "/v1/rerank", "/v2/rerank"))
    assert [one["relevance_score"] for one in made] == near(scores[:2]) and known == second
    assert [one.pop("document") for one in known] == [{"text": one["text"]} for one in ranks[:2]] and made == known
    told = post(reranker, "/rerank", **asked, return_documents=True)["results"]
    assert [one["document"] for one in told] == [one["text"] for one in ranks[:2]]
    logits = post(reranker, "/v1/rerank", query=query, documents=texts, use_activation=False)["results"]
    assert [one["relevance_score"] for one in logits] == near([one["score"] for one in raw])
    in_order = [one["score"] for one in sorted(ranks, key=lambda one: one["index"])]
    for path, first, second in (
        ("/v1/score", "text_1", "text_2"),
        ("/score", "queries", "documents"),
        ("/v1/score", "queries", "items"),
    ):
        for one, other in ((query, texts), ([query], texts), ([query] * 3, texts), (query, texts[0])):
            told = post(reranker, path, **{first: one, second: other})
            expected = in_order if isinstance(other, list) else in_order[:1]
            assert (told["object"], told["model"]) == ("list", "reranker") and told["usage"]["total_tokens"] > 0
            assert {row["object"] for row in told["data"]} == {"score"}
            assert [row["index"] for row in told["data"]] == list(range(len(expected)))
            assert [row["score"] for row in told["data"]] == near(expected)
        told = post(reranker, path, **{first: query, second: texts}, use_activation=False)
        assert [1 / (1 + np.exp(-row["score"])) for row in told["data"]] == near(in_order)


def test_tokenize_and_decode(classifier: Client) -> None:
    (pieces,) = post(classifier, "/tokenize", inputs=TEXT)
    assert [one["special"] for one in pieces] == [True, False, False, False, True]
    assert pieces[1] == {"id": 5, "text": "lost", "special": False, "start": 0, "stop": 4}
    ids = [one["id"] for one in pieces]
    assert post(classifier, "/decode", ids=ids) == [TEXT]
    assert post(classifier, "/decode", ids=[ids, ids], skip_special_tokens=False)[0].startswith("[CLS]")
    assert len(post(classifier, "/tokenize", inputs=["my", "card"], add_special_tokens=False)[1]) == 1


def test_what_is_too_long_is_cut_at_the_end_that_is_asked_for(classifier: Client, embedding: Client) -> None:
    long = "w1 " * 20 + "card " * 20
    right = post(classifier, "/predict", inputs=long, truncate=True)
    assert right != post(classifier, "/predict", inputs=long, truncate=True, truncation_direction="Left")
    assert right == post(classifier, "/predict", inputs="w1 " * 20 + "card " * 10)
    (cut,) = post(embedding, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)["data"]
    assert post(embedding, "/embed", inputs=long, truncate=True)[0] == near(cut["embedding"])


def test_a_requests_tokens_are_bounded(serve: Serve) -> None:
    """A query is read with each text, and /embed_all returns a vector for each token."""
    client, asked = serve("reranker", payload_limit=1000), {"query": "w1 " * 200, "truncate": True}
    assert post(client, "/rerank", **asked, texts=["my"] * 6)
    assert "query" in post(client, "/rerank", 413, **asked, texts=["my"] * 7)["error"]
    client = serve("embedding", max_batch_tokens=8)
    assert len(post(client, "/embed_all", inputs=["my", TEXT])) == 2
    assert len(post(client, "/embed_all", inputs="w1 w2 w3 w4 w5 w6 w7 w8")[0]) == 10
    assert "--max-batch-tokens" in post(client, "/embed_all", 413, inputs=["my card", TEXT])["error"]


def test_info(classifier: Client) -> None:
    info = classifier.get("/info").json()
    assert (info["served_model_name"], info["model_type"]["classifier"]["id2label"]["0"]) == ("classifier", LABELS[0])
    assert (info["model_dtype"], info["max_input_length"], info["max_client_batch_size"]) == ("float32", 32, 2048)
    assert (info["model_device"], info["engine"], info["draft"]) == ("cpu", "eager", None)
    assert "eager, float32 on cpu" in classifier.get("/").text


TEXTS = [f"w{i % 64} w{i // 64}" for i in range(2048)]


@pytest.mark.slow
def test_a_long_list_is_answered_as_its_parts_are(serve: Serve, embedding: Client) -> None:
    """Clients send a hundred texts and more: the list is refused above OpenAI's limit."""
    made = post(embedding, "/v1/embeddings", input=TEXTS)["data"]
    assert [one["index"] for one in made] == list(range(2048))
    for i in (0, 63, 64, 2047):
        (alone,) = post(serve("embedding", warmup_tokens=0), "/v1/embeddings", input=TEXTS[i])["data"]
        assert made[i]["embedding"] == near(alone["embedding"])
    post(embedding, "/v1/embeddings", 413, input=[*TEXTS, "a"])
    wrong = post(embedding, "/v1/embeddings", 400, input=[*TEXTS[:100], "w1 " * 40, *TEXTS[:100]])
    assert wrong["error"]["message"].startswith("`input[100]` must have at most")


def test_a_long_list_does_not_hold_up_others(serve: Serve, pool: Pool) -> None:
    """Other requests wait for a part of it, and only that part is queued."""
    client = serve("embedding", warmup_tokens=0)
    with model_held(client.server):
        long = pool.submit(post, client, "/v1/embeddings", input=TEXTS[100:200])
        wait_until(lambda: len(client.server.encoder or ()) == 64)
        short = pool.submit(post, client, "/v1/embeddings", input=TEXT)
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
