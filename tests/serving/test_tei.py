"""The routes of text-embeddings-inference: its fields, shapes, truncation and errors."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from tests.serving.served import LABELS, client_of, make_server


@pytest.fixture(scope="module")
def clients(models: Path) -> Iterator[dict[str, TestClient]]:
    """A client for each kind of model."""
    with ExitStack() as stack:
        kinds = ("classifier", "reranker", "embedding")
        servers = {kind: make_server(models / kind, max_client_batch_size=4) for kind in kinds}
        yield {kind: stack.enter_context(client_of(server)) for kind, server in servers.items()}


@pytest.fixture
def classifier(clients: dict[str, TestClient]) -> TestClient:
    return clients["classifier"]


@pytest.fixture
def embedding(clients: dict[str, TestClient]) -> TestClient:
    return clients["embedding"]


def _post(client: TestClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_predict_ranks_labels_the_same_computed_or_served(classifier: TestClient) -> None:
    first, second = (_post(classifier, "/predict", inputs="lost my card") for _ in range(2))
    assert first == second
    assert {one["label"] for one in first} == set(LABELS)
    scores = [one["score"] for one in first]
    assert scores == sorted(scores, reverse=True)
    assert sum(scores) == pytest.approx(1)
    raw = _post(classifier, "/predict", inputs="lost my card", raw_scores=True)
    shares = torch.tensor([one["score"] for one in raw]).softmax(0)
    assert shares.tolist() == pytest.approx(scores, abs=1e-5)


def test_predict_takes_a_text_pairs_and_batches(classifier: TestClient) -> None:
    single = _post(classifier, "/predict", inputs="my card")
    assert _post(classifier, "/predict", inputs=["my card"]) == single
    (pair,) = _post(classifier, "/predict", inputs=[["my card", "lost"]])
    batch = _post(classifier, "/predict", inputs=[["my card"], ["my card", "lost"]])
    assert [one["label"] for one in batch[0]] == [one["label"] for one in single]
    assert [one["score"] for one in batch[1]] == pytest.approx([one["score"] for one in pair], abs=1e-5)
    assert [one["score"] for one in pair] != pytest.approx([one["score"] for one in single], abs=1e-5)


@pytest.mark.parametrize("texts", [["my card", "lost"], ["my", "lost", "card"]])
def test_predict_refuses_what_may_be_a_pair_or_a_batch(classifier: TestClient, texts: list[str]) -> None:
    told = _post(classifier, "/predict", 422, inputs=texts)
    assert told["error_type"] == "Validation"
    assert '[["a", "b"]] is a pair, [["a"], ["b"]] are two texts' in told["error"]


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("classifier", "/predict", {"inputs": "lost my card"}),
        ("embedding", "/embed", {"inputs": ["lost my card", "cash"], "normalize": False}),
        ("embedding", "/similarity", {"inputs": {"source_sentence": "my card", "sentences": ["cash"]}}),
        ("reranker", "/rerank", {"query": "my card", "texts": ["cash", "lost my card"], "return_text": True}),
    ],
)
def test_the_main_route_is_that_of_the_model(
    clients: dict[str, TestClient], kind: str, path: str, body: dict[str, Any]
) -> None:
    known = _post(clients[kind], path, **body)
    assert _post(clients[kind], "/", **body) == _post(clients[kind], "/invocations", **body) == known


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        ("classifier", {"inputs": 3}, "inputs"),
        ("classifier", {}, "inputs: Field required"),
        ("embedding", {"inputs": {"source_sentence": "my card"}}, "inputs.sentences: Field required"),
        ("embedding", {"inputs": {}}, "inputs.source_sentence: Field required"),
        ("reranker", {"inputs": "my card"}, "query: Field required; texts: Field required"),
        ("classifier", {"inputs": "my", "parameters": {"top_k": 0}}, "parameters.top_k"),
        ("classifier", {"inputs": "my", "parameters": {"function_to_apply": "sigmoid"}}, "has softmax"),
    ],
)
def test_the_main_route_names_what_is_wrong(
    clients: dict[str, TestClient], kind: str, body: dict[str, Any], named: str
) -> None:
    assert named in _post(clients[kind], "/", 422, **body)["error"]


def test_a_classification_of_the_hub_has_parameters(classifier: TestClient) -> None:
    known = _post(classifier, "/predict", inputs="lost my card")
    assert _post(classifier, "/", inputs="lost my card", parameters={}) == [known]
    (two,) = _post(classifier, "/", inputs="lost my card", parameters={"top_k": 2, "function_to_apply": "none"})
    assert two == _post(classifier, "/predict", inputs="lost my card", raw_scores=True)[:2]


def test_embeddings_are_of_norm_1_unless_they_are_not_to_be(embedding: TestClient) -> None:
    (one,) = _post(embedding, "/embed", inputs="lost my card")
    (raw,) = _post(embedding, "/embed", inputs="lost my card", normalize=False)
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
    assert np.linalg.norm(raw) != pytest.approx(1, abs=1e-2)
    assert np.array(raw) / np.linalg.norm(raw) == pytest.approx(np.array(one), abs=1e-5)
    (short,) = _post(embedding, "/embed", inputs="lost my card", dimensions=4)
    assert np.linalg.norm(short) == pytest.approx(1, abs=1e-5)
    assert len(short) == 4
    assert _post(embedding, "/embed", 422, inputs="my card", dimensions=4000)["error_type"] == "Validation"


def test_embed_takes_texts_and_token_ids(embedding: TestClient) -> None:
    ids = [one["id"] for one in _post(embedding, "/tokenize", inputs="lost my card")[0]]
    (by_text,) = _post(embedding, "/embed", inputs="lost my card")
    assert _post(embedding, "/embed", inputs=ids) == [by_text]
    two = _post(embedding, "/embed", inputs=["lost my card", "my cash"])
    assert len(two) == 2
    assert two[0] == pytest.approx(by_text, abs=1e-5)
    assert len(_post(embedding, "/embed", inputs=[ids, ids])) == 2
    assert "from 0 to" in _post(embedding, "/embed", 422, inputs=[5, 10**6])["error"]


def test_embed_all_gives_every_token_its_own_vector(embedding: TestClient) -> None:
    _post(embedding, "/embed", inputs="lost my card")  # stored as one vector, which must not serve token states
    (rows,) = _post(embedding, "/embed_all", inputs="lost my card")
    assert len(rows) == 5
    assert len({tuple(row) for row in rows}) == 5
    (raw,) = _post(embedding, "/embed", inputs="lost my card", normalize=False)
    assert np.mean(rows, axis=0) == pytest.approx(np.array(raw), abs=1e-5)


def test_similarity_is_the_cosine(embedding: TestClient) -> None:
    same, other = _post(
        embedding, "/similarity", inputs={"source_sentence": "my card", "sentences": ["my card", "the rate"]}
    )
    assert same == pytest.approx(1, abs=1e-5)
    assert other < 1


def test_rerank_ranks_texts(clients: dict[str, TestClient]) -> None:
    reranker = clients["reranker"]
    texts = ["my card", "the rate", "lost cash"]
    ranks = _post(reranker, "/rerank", query="where is my card", texts=texts, return_text=True)
    assert sorted(one["index"] for one in ranks) == [0, 1, 2]
    assert [one["text"] for one in ranks] == [texts[one["index"]] for one in ranks]
    scores = [one["score"] for one in ranks]
    assert scores == sorted(scores, reverse=True)
    raw = _post(reranker, "/rerank", query="where is my card", texts=texts, raw_scores=True)
    assert [1 / (1 + np.exp(-one["score"])) for one in raw] == pytest.approx(scores, abs=1e-5)
    assert "text" not in raw[0]


def test_tokenize_and_decode(classifier: TestClient) -> None:
    (pieces,) = _post(classifier, "/tokenize", inputs="lost my card")
    assert [one["special"] for one in pieces] == [True, False, False, False, True]
    assert pieces[1] == {"id": 4, "text": "lost", "special": False, "start": 0, "stop": 4}
    ids = [one["id"] for one in pieces]
    assert _post(classifier, "/decode", ids=ids) == ["lost my card"]
    assert _post(classifier, "/decode", ids=[ids, ids], skip_special_tokens=False)[0].startswith("[CLS]")
    assert len(_post(classifier, "/tokenize", inputs=["my", "card"], add_special_tokens=False)[1]) == 1


def test_what_is_too_long_is_cut_only_if_that_is_wanted(classifier: TestClient) -> None:
    long = "w1 " * 20 + "card " * 20
    refused = _post(classifier, "/predict", 422, inputs=long)
    assert refused == {
        "error": "`inputs` must have at most 32 tokens. Given: 42; shorten it, or set `truncate`",
        "error_type": "Validation",
    }
    right = _post(classifier, "/predict", inputs=long, truncate=True)
    left = _post(classifier, "/predict", inputs=long, truncate=True, truncation_direction="Left")
    assert right != left
    assert right == _post(classifier, "/predict", inputs="w1 " * 20 + "card " * 10)


def test_a_requests_tokens_are_bounded(models: Path) -> None:
    """A query is read with each text, and /embed_all returns a vector for each token."""
    with client_of(make_server(models / "reranker", payload_limit=1000)) as client:
        asked = {"query": "w1 " * 200, "truncate": True}
        assert _post(client, "/rerank", **asked, texts=["my"] * 6)
        assert "query" in _post(client, "/rerank", 413, **asked, texts=["my"] * 7)["error"]
    with client_of(make_server(models / "embedding", max_batch_tokens=8)) as client:
        assert len(_post(client, "/embed_all", inputs=["my", "lost my card"])) == 2
        assert len(_post(client, "/embed_all", inputs="w1 w2 w3 w4 w5 w6 w7 w8")[0]) == 10
        assert "--max-batch-tokens" in _post(client, "/embed_all", 413, inputs=["my card", "lost my card"])["error"]


LONG = "w1 " * 40
CUT = "`%s` must have at most 32 tokens. Given: 4%d; shorten it, or set `%s`"


@pytest.mark.hostile("fields of the dialects")
@pytest.mark.parametrize(
    ("kind", "path", "body", "told"),
    [
        ("classifier", "/predict", {"inputs": [["my"], [LONG]]}, CUT % ("inputs[1]", 2, "truncate")),
        ("embedding", "/embed", {"inputs": LONG}, CUT % ("inputs", 2, "truncate")),
        ("embedding", "/embed", {"inputs": ["my", "card", LONG]}, CUT % ("inputs[2]", 2, "truncate")),
        ("embedding", "/embed", {"inputs": [[1, 2], [1, 9999]]}, "`inputs[1]` has token ids that are not from 0 to 95"),
        ("embedding", "/embed_all", {"inputs": ["my", LONG]}, CUT % ("inputs[1]", 2, "truncate")),
        ("embedding", "/decode", {"ids": [1, -1]}, "`ids` has token ids that are not from 0 to 95"),
        ("embedding", "/decode", {"ids": [[1], [9999]]}, "`ids[1]` has token ids that are not from 0 to 95"),
        (
            "embedding",
            "/similarity",
            {"inputs": {"source_sentence": LONG, "sentences": ["my"]}},
            CUT % ("inputs.source_sentence", 2, "parameters.truncate"),
        ),
        (
            "embedding",
            "/similarity",
            {"inputs": {"source_sentence": "my", "sentences": ["my", LONG]}},
            CUT % ("inputs.sentences[1]", 2, "parameters.truncate"),
        ),
        (
            "reranker",
            "/rerank",
            {"query": "my", "texts": ["card", LONG]},
            "`texts[1]` with `query` must have at most 32 tokens. Given: 44; shorten it, or set `truncate`",
        ),
    ],
)
def test_an_error_names_the_input_that_was_wrong(
    clients: dict[str, TestClient], kind: str, path: str, body: dict[str, Any], told: str
) -> None:
    assert _post(clients[kind], path, 422, **body)["error"] == told


def test_info_and_health(classifier: TestClient) -> None:
    info = classifier.get("/info").json()
    assert info["served_model_name"] == "classifier"
    assert info["model_type"]["classifier"]["id2label"]["0"] == LABELS[0]
    assert (info["model_dtype"], info["max_input_length"], info["max_client_batch_size"]) == ("float32", 32, 4)
    assert (info["model_device"], info["engine"], info["draft"]) == ("cpu", "eager", None)
    assert "eager, float32 on cpu" in classifier.get("/").text
    assert classifier.get("/health").status_code == classifier.get("/healthz").status_code == 200


@pytest.mark.hostile("fields of the dialects")
@pytest.mark.parametrize("inputs", ["", ["a"] * 3, [["a", "b", "c"]], [[]], 5, None, {"a": 1}, [1.5], [True]])
def test_wrong_inputs_are_told(classifier: TestClient, inputs: Any) -> None:
    answer = classifier.post("/predict", json={"inputs": inputs})
    if inputs == "":  # special tokens alone are a valid input
        assert answer.status_code == 200
        return
    assert answer.status_code == 422
    assert answer.json()["error_type"] == "Validation"


@pytest.mark.hostile("fields of the dialects")
def test_no_inputs_and_too_many_have_statuses_of_their_own(classifier: TestClient) -> None:
    assert _post(classifier, "/predict", 400, inputs=[]) == {"error": "`inputs` cannot be empty", "error_type": "Empty"}
    refused = _post(classifier, "/predict", 413, inputs=[["a"]] * 5)
    assert refused["error"] == "batch size 5 > maximum allowed batch size 4 (--max-client-batch-size)"


@pytest.mark.hostile("fields of the dialects")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "my card"}),
        ("/embed_all", {"inputs": "my card"}),
        ("/rerank", {"query": "my", "texts": ["card"]}),
        ("/similarity", {"inputs": {"source_sentence": "my", "sentences": ["card"]}}),
    ],
)
def test_a_route_of_another_kind_of_model_says_which(classifier: TestClient, path: str, body: dict[str, Any]) -> None:
    refused = _post(classifier, path, 424, **body)
    assert refused["error"].startswith("this route needs a")
    assert refused["error"].endswith("classifier is a classifier")
    assert refused["error_type"] == "Backend"


def test_headers_tell_of_hits_only_where_the_operator_wants_it(models: Path, classifier: TestClient) -> None:
    _post(classifier, "/predict", inputs="my card")
    quiet = classifier.post("/predict", json={"inputs": "my card"}).headers
    assert not [name for name in quiet if name.startswith("x-") and name != "x-request-id"]
    with client_of(make_server(models / "classifier", reveal_hits=True)) as client:
        seen = [client.post("/predict", json={"inputs": "my card"}).headers["X-Cache"] for _ in range(2)]
        assert seen == ["MISS", "HIT"]
