"""What is wrong in a request is told in the dialect of its route, with the field and the way out."""

import json
from typing import Any

import pytest

from tests.serving.served import CONTEXT, Serve

LONG = "w1 " * 40
CUT = "`%s` must have at most 32 tokens. Given: 42; shorten it, or set `%s`"
CUT_SIMILAR = "`inputs.%s` must have at most 32 tokens. Given: 42; shorten it, or set `parameters.truncate`"
NEEDS = "this route needs %s; classifier is a classifier"
FLAT = '`inputs`: a flat list may be a pair or a batch: [["a", "b"]] is a pair, [["a"], ["b"]] are two texts'
SIMILAR = {"source_sentence": "my", "sentences": ["card"]}
IDS = "`%s` has token ids that are not from 0 to 95"
#: Path of a route, body, status, beginning of the message.
TEI: dict[str, list[tuple[str, Any, int, str]]] = {
    "classifier": [
        ("/predict", {"inputs": [["my"], [LONG]]}, 422, CUT % ("inputs[1]", "truncate")),
        ("/predict", {"inputs": []}, 400, "`inputs` cannot be empty"),
        ("/predict", {"inputs": [["a"]] * 5}, 413, "batch size 5 > maximum allowed batch size 4 (--max-client-batch-s"),
        ("/predict", {"inputs": ["a", "b"]}, 422, FLAT),
        ("/predict", {"inputs": ["a", "b", "c"]}, 422, FLAT),
        *(("/predict", {"inputs": one}, 422, "inputs") for one in ([["a", "b", "c"]], [[]], 5, None, {"a": 1}, [True])),
        ("/embed", {"inputs": "my"}, 424, NEEDS % "an embedding model"),
        ("/embed_all", {"inputs": "my"}, 424, NEEDS % "an embedding model"),
        ("/similarity", {"inputs": SIMILAR}, 424, NEEDS % "an embedding model"),
        ("/rerank", {"query": "my", "texts": ["card"]}, 424, NEEDS % "a reranker"),
        ("/", {}, 422, "inputs: Field required"),
        ("/", {"inputs": "my", "parameters": {"top_k": 0}}, 422, "parameters.top_k"),
        ("/", {"inputs": "my", "parameters": {"function_to_apply": "sigmoid"}}, 422, "`parameters.function_to_"),
        ("/nothing", {}, 404, "there is no such route"),
        ("/info", {}, 405, "this route does not take this method"),
        *(("/admin/purge", one, 422, "") for one in ({}, [], {"namespace": 1}, {"namespace": "\ud800"})),
        ("/admin/forget", {"inputs": []}, 400, "`inputs` cannot be empty"),
        ("/admin/forget", {"inputs": [1, 2]}, 422, "inputs"),
        ("/admin/forget", {"inputs": [["my"]] * 5}, 413, "batch size 5"),
        ("/admin/forget", {"inputs": [["my"], [LONG]]}, 422, CUT % ("inputs[1]", "truncate")),
    ],
    "embedding": [
        ("/embed", {"inputs": LONG}, 422, CUT % ("inputs", "truncate")),
        ("/embed", {"inputs": ["my", "card", LONG]}, 422, CUT % ("inputs[2]", "truncate")),
        ("/embed", {"inputs": [[1, 2], [1, 9999]]}, 422, IDS % "inputs[1]"),
        ("/admin/forget", {"inputs": [["my"]]}, 422, "inputs"),
        ("/embed", {"inputs": "my", "dimensions": 4000}, 422, ""),
        ("/embed_all", {"inputs": ["my", LONG]}, 422, CUT % ("inputs[1]", "truncate")),
        ("/decode", {"ids": [1, -1]}, 422, IDS % "ids"),
        ("/decode", {"ids": [[1], [9999]]}, 422, IDS % "ids[1]"),
        ("/similarity", {"inputs": SIMILAR | {"source_sentence": LONG}}, 422, CUT_SIMILAR % "source_sentence"),
        ("/similarity", {"inputs": SIMILAR | {"sentences": ["my", LONG]}}, 422, CUT_SIMILAR % "sentences[1]"),
        ("/", {"inputs": {"source_sentence": "my card"}}, 422, "inputs.sentences: Field required"),
    ],
    "reranker": [
        ("/rerank", {"query": "my", "texts": ["card", LONG]}, 422, "`texts[1]` with `query` must have at most 32"),
        ("/rerank", {"query": "a", "texts": [], "documents": []}, 422, "body: give `texts` (as TEI) or `documents` (a"),
        ("/rerank", {"query": "my card"}, 422, "texts: Field required"),
        ("/rerank", {"query": "my card", "documents": ["cash", 3]}, 422, "documents[1]"),
        ("/rerank", {"query": "my card", "documents": []}, 400, "`documents` cannot be empty"),
        ("/rerank", [1], 422, "body"),
        ("/", {"inputs": "my card"}, 422, "query: Field required; texts: Field required"),
    ],
}
CHAT = {"role": "user", "content": "my"}
LANGCHAIN = "`input`: give texts (LangChain's OpenAIEmbeddings does with check_embedding_ctx_length=False)"
NOT_HELD = f"the prompt has %d tokens, and the model's context of {CONTEXT} holds prompt and answer: shorten it"
ROOM = f"max_tokens to {CONTEXT - 6} at most"
#: Wrong values by field of a completion.
WRONG: dict[str, list[Any]] = {
    "model": ["gpt-9"],
    "prompt": ["", [], [[]], ["my", ""], [10**9]],
    "max_tokens": [0, -1, True],
    "temperature": [-0.1, 2.1, "1", float("nan"), float("inf")],
    "top_p": [0],
    "top_k": [-2],
    "presence_penalty": [2.1],
    "repetition_penalty": [0, 5e-324, 1e308],
    "n": [33],
    "logprobs": [21],
    "stop": [""],
    "stop_token_ids": [[10**9]],
    "echo": [1],
    "suffix": ["b"],
    "best_of": [3],
    "response_format": [{"type": "json_object"}],
}
#: Wrong messages of a chat, by the field that is named.
MESSAGES: dict[str, list[Any]] = {
    "messages": [
        {"role": "user", "content": "odd secret"},
        {"role": "user", "content": "card " * CONTEXT},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": "{"}}]},
    ],
    "messages[0].role": [{"content": "a"}, {"content": "a", "role": "odd"}],
    "messages[0].content": [{"role": "user", "content": [{"type": "image_url"}]}],
    "messages[0].tool_calls[0]": [{"role": "assistant", "tool_calls": [3]}],
    "messages[0].function_call": [{"role": "assistant", "function_call": {"name": "find"}}],
}
#: Path of a route, body, wrong field, beginning of the message.
OPENAI: dict[str, list[tuple[str, Any, str | None, str]]] = {
    "embedding": [
        ("embeddings", {"model": "gpt-9", "input": "a"}, "model", "this server has one model: embedding"),
        ("embeddings", {"input": []}, "input", "`input` cannot be empty"),
        ("embeddings", {"input": LONG}, "input", CUT % ("input", "truncate_prompt_tokens") + " to -1"),
        ("embeddings", {"input": ["my", LONG]}, "input", CUT % ("input[1]", "truncate_prompt_tokens") + " to -1"),
        *(("embeddings", {"input": one}, "input", LANGCHAIN) for one in ([5, 6], [[5], [6]])),
        ("classify", {"input": "a"}, None, "this route needs a classifier; embedding is an embedding model"),
    ],
    "classifier": [("classify", {"input": [LONG, "my"]}, "input", "`input[0]` must have at most 32 tokens")],
    "reranker": [
        ("rerank", {"query": "a", "documents": [LONG]}, "documents", "`documents[0]` with `query` must have at"),
        ("rerank", {"query": "a", "documents": []}, "documents", "`documents` cannot be empty"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "`text_1`: give one text, or as many"),
        *(("score", {"text_1": one, "text_2": []}, "text_2", "`text_2` cannot be empty") for one in ("a", [])),
        ("score", {"text_1": 1, "text_2": "a"}, "text_1", "text_1"),
        ("score", {}, "text_1", "text_1: Field required"),
    ],
    "decoder": [
        ("completions", {"prompt": [5] * CONTEXT}, "prompt", NOT_HELD % CONTEXT),
        ("completions", {"prompt": [5] * CONTEXT, "max_tokens": 2}, "prompt", NOT_HELD % CONTEXT),  # there is no room
        ("completions", {"prompt": [5] * 6, "max_tokens": 999}, "max_tokens", NOT_HELD % 6 + f", or set {ROOM}"),
        ("completions", {"stream_options": {}}, "stream_options", "stream_options needs stream=true"),
        ("completions", {"stop": ["a"] * 5}, "stop", "stop: give at most 4 texts"),
        ("completions", {"logit_bias": {"5": 1}}, "logit_bias", "logit_bias: this server does not support it"),
        *(("completions", {name: one}, name, "") for name, values in WRONG.items() for one in values),
        ("chat/completions", {"messages": []}, "messages", ""),
        ("chat/completions", {"messages": [CHAT], "top_logprobs": 2}, "top_logprobs", ""),
        ("chat/completions", {"messages": [CHAT], "tools": [{"type": "function"}]}, "tools", ""),
        *(("chat/completions", {"messages": [one]}, param, "") for param, values in MESSAGES.items() for one in values),
    ],
}

pytestmark = pytest.mark.hostile("fields of the dialects")


def refused(serve: Serve, kind: str, path: str, body: Any) -> tuple[int, Any]:
    """Return the status and the error of a refused request."""
    client = serve(kind, max_client_batch_size=4)
    answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code >= 400 and "secret" not in answer.text, answer.text
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("kind", "path", "body", "status", "told"), [(kind, *one) for kind, rows in TEI.items() for one in rows]
)
def test_in_the_dialect_of_tei(serve: Serve, kind: str, path: str, body: Any, status: int, told: str) -> None:
    found, answer = refused(serve, kind, path, body)
    types = {400: "Empty", 424: "Backend"}
    assert found == status and answer["error_type"] == types.get(status, "Validation")
    assert answer["error"] and answer["error"].startswith(told)


@pytest.mark.parametrize(
    ("kind", "path", "body", "param", "told"), [(kind, *one) for kind, rows in OPENAI.items() for one in rows]
)
def test_in_the_dialect_of_openai(serve: Serve, kind: str, path: str, body: Any, param: str | None, told: str) -> None:
    whole = {"prompt": "my", "max_tokens": 2, **body} if kind == "decoder" else body
    status, answer = refused(serve, kind, f"/v1/{path}", whole)
    error = answer["error"]
    assert status == error["code"] == {"model": 404, "n": 413}.get(str(param), 400)
    assert error["message"] and error["message"].startswith(told)
    assert error["param"] == param or error["param"].startswith(param)
    assert error["type"] == {404: "not_found_error"}.get(status, "invalid_request_error")
