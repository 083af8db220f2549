"""`/v1/completions` and `/v1/chat/completions`: the model's own tokens, whole or streamed, and OpenAI's shapes."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from llmcache.generation import Generation, Sampling, generate
from llmcache.serving.app import create_app
from llmcache.serving.openai_answers import ChatChunk, ChatCompletion, Completion, CompletionChunk
from llmcache.serving.openai_decoders import unless_gone
from llmcache.serving.refusals import Refusal
from tests.generation.test_detokenizer import after, spaced_tokenizer
from tests.generation.test_prompt_cache import Counted
from tests.serving.decoders import CONTEXT, NAME, Stub, application, chunks_of, listening, model, row, tokenizer
from tests.serving.served import make_server

PROMPT = "where is my card"
CHAT = [{"role": "system", "content": "the cash"}, {"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "max_tokens": 12}
BLOCKS = {"prefix_block": 8, "auto_bypass": False}
DRAWN = {"temperature": 2.0, "top_p": 0.9, "top_k": 40, "seed": -3, "repetition_penalty": 1.2, "max_tokens": 12}

Post = Callable[..., Any]


@pytest.fixture(scope="module")
def shared() -> Iterator[Stub]:
    made = Stub(reveal_hits=True)
    yield made
    made.close()


@pytest.fixture
def stub(shared: Stub) -> Stub:
    """With nothing stored."""
    shared.cache.clear()
    return shared


@pytest.fixture
def client(stub: Stub) -> Iterator[TestClient]:
    with TestClient(application(stub)) as made:
        yield made


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    told = client.post("/v1/completions", json={"model": NAME, "prompt": PROMPT, **GREEDY, **body})
    assert told.status_code == 200, told.text
    Completion.model_validate_json(told.text, strict=True)
    return dict(told.json())


def chat(client: TestClient, **body: Any) -> dict[str, Any]:
    told = client.post("/v1/chat/completions", json={"model": NAME, "messages": CHAT, **GREEDY, **body})
    assert told.status_code == 200, told.text
    ChatCompletion.model_validate_json(told.text, strict=True)
    return dict(told.json())


def streamed(client: TestClient, route: str, **body: Any) -> list[dict[str, Any]]:
    """Chunks of a stream, which ends as it should."""
    told = client.post(route, json={**GREEDY, **body, "stream": True})
    assert told.status_code == 200, told.text
    assert told.headers["content-type"].startswith("text/event-stream")
    assert told.headers["cache-control"] == "no-cache"
    return chunks_of(told.text, ChatChunk if "chat" in route else CompletionChunk)


def own(stub: Stub, ids: Any, sampling: Sampling) -> Generation:
    return generate(stub.plain, row(tuple(ids)), sampling)


def text_of(tokens: Any) -> str:
    return str(tokenizer().decode(list(tokens), skip_special_tokens=True))


def ids_of(messages: Any = CHAT) -> list[int]:
    text = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer()(text)["input_ids"])


def test_a_completion_is_the_models_own_cached_or_not(client: TestClient, stub: Stub) -> None:
    ids = tokenizer()(PROMPT)["input_ids"]
    expected = own(stub, ids, Sampling(max_new_tokens=12))
    for n_cached in (0, len(ids)):
        told = complete(client)
        (choice,) = told["choices"]
        assert choice == {
            "index": 0,
            "text": text_of(expected.tokens),
            "logprobs": None,
            "finish_reason": expected.stopped_by,
        }
        n_made = len(expected.tokens)
        assert told["usage"] == {
            "prompt_tokens": len(ids),
            "completion_tokens": n_made,
            "total_tokens": len(ids) + n_made,
            "prompt_tokens_details": {"cached_tokens": n_cached},
        }
        assert (told["object"], told["model"]) == ("text_completion", NAME)
        assert re.fullmatch("cmpl-[0-9a-f]{32}", told["id"]) and told["created"] > 1e9


def test_the_space_after_a_prompt_is_told_streamed_or_not_and_ends_an_answer() -> None:
    made = spaced_tokenizer()
    stub = Stub(made_by=made)
    body = {"temperature": 0, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    with TestClient(application(stub)) as client:
        for prompt in ([1, one, two] for one in range(260, len(made)) for two in range(260, len(made))):
            answer = list(own(stub, prompt, Sampling(max_new_tokens=6, stop_ids=())).tokens)
            if after(made, prompt, answer).startswith(" ") and max(answer) < len(made):
                break
        expected = after(made, prompt, answer)
        (choice,) = complete(client, prompt=prompt, **body)["choices"]
        assert choice["text"] == expected
        assert choice["logprobs"]["tokens"][0].startswith(" ")
        chunks = streamed(client, "/v1/completions", prompt=prompt, **body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        (stopped,) = complete(client, prompt=prompt, **body, stop=[expected[:2]])["choices"]
        assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")
    stub.close()


def test_draws_are_seeded_as_asked(client: TestClient, stub: Stub) -> None:
    settings = {name: value for name, value in DRAWN.items() if name not in ("seed", "max_tokens")}
    sampling = Sampling(do_sample=True, seed=2**63 - 3, max_new_tokens=12, **settings)  # type: ignore[arg-type]
    expected = own(stub, tokenizer()(PROMPT)["input_ids"], sampling)
    assert complete(client, **DRAWN)["choices"][0]["text"] == text_of(expected.tokens)
    cool = own(
        stub, tokenizer()(PROMPT)["input_ids"], Sampling(do_sample=True, temperature=0.7, seed=1, max_new_tokens=12)
    )
    assert complete(client, temperature=0.7, seed=1)["choices"][0]["text"] == text_of(cool.tokens)
    assert len({complete(client, temperature=None)["choices"][0]["text"] for _ in range(9)}) == 9  # and not without


def test_penalties(client: TestClient, stub: Stub) -> None:
    ids = tokenizer()(PROMPT)["input_ids"]
    for penalties in ({"presence_penalty": 2}, {"frequency_penalty": -1.5}):
        expected = own(stub, ids, Sampling(max_new_tokens=12, **penalties))  # type: ignore[arg-type]
        assert complete(client, **penalties)["choices"][0]["text"] == text_of(expected.tokens)


def test_prompts_of_all_kinds(client: TestClient, stub: Stub) -> None:
    texts = [PROMPT, "the cash"]
    ids = [tokenizer()(text)["input_ids"] for text in texts]
    expected = [text_of(own(stub, one, Sampling(max_new_tokens=12)).tokens) for one in ids]
    for prompt in (texts, ids):
        told = complete(client, prompt=prompt)
        assert [choice["text"] for choice in told["choices"]] == expected
        assert [choice["index"] for choice in told["choices"]] == [0, 1]
        assert told["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert complete(client, prompt=ids[1])["choices"][0]["text"] == expected[1]
    assert len(complete(client, max_tokens=None)["choices"][0]["text"]) <= 16 * 8


def test_several_answers(client: TestClient, stub: Stub) -> None:
    told = complete(client, prompt=[PROMPT, "the"], **{**DRAWN, "seed": 5}, n=2)
    alone = [
        complete(client, prompt=prompt, **{**DRAWN, "seed": seed})["choices"][0]["text"]
        for prompt in (PROMPT, "the")
        for seed in (5, 6)
    ]
    assert [choice["text"] for choice in told["choices"]] == alone
    assert told["usage"]["prompt_tokens"] == len(tokenizer()(PROMPT)["input_ids"]) + len(
        tokenizer()("the")["input_ids"]
    )
    chunks = streamed(client, "/v1/completions", prompt=PROMPT, **{**DRAWN, "seed": 5}, n=2)
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == alone[index]
        assert [choice["finish_reason"] is None for choice in mine] == [True] * (len(mine) - 1) + [False]


def test_a_chat_is_the_models_own_cached_or_not_streamed_or_not(client: TestClient, stub: Stub) -> None:
    expected = own(stub, ids_of(), Sampling(max_new_tokens=12))
    shapes = []
    for n_cached in (0, len(ids_of())):
        stub.cache.clear() if not n_cached else None
        chunks = streamed(client, "/v1/chat/completions", messages=CHAT, stream_options={"include_usage": True})
        first, *pieces, usage = chunks
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in pieces) == text_of(expected.tokens)
        reasons = [one["choices"][0]["finish_reason"] for one in pieces]
        assert reasons == [None] * (len(pieces) - 1) + [expected.stopped_by]
        assert all(one["choices"][0]["delta"].get("content") for one in pieces[:-1])
        assert usage["choices"] == [] and all(one["usage"] is None for one in chunks[:-1])
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": n_cached}
        assert usage["usage"]["completion_tokens"] == len(expected.tokens)
        assert len({(one["id"], one["created"], one["model"], one["object"]) for one in chunks}) == 1
        assert chunks[0]["object"] == "chat.completion.chunk"
        shapes.append([one["choices"] for one in chunks])
    assert shapes[0] == shapes[1]
    told = chat(client)
    assert told["object"] == "chat.completion" and told["usage"] == usage["usage"]
    assert told["choices"][0]["message"]["content"] == text_of(expected.tokens)
    assert told["choices"][0]["message"]["role"] == "assistant"
    assert "usage" not in streamed(client, "/v1/chat/completions", messages=CHAT)[-1]


def test_a_chat_goes_on_to_the_end_of_the_context_unless_told(client: TestClient) -> None:
    n_prompt = len(ids_of())
    for asked, n_made in (({"max_tokens": None, "ignore_eos": True}, CONTEXT - n_prompt), ({"max_tokens": 3}, 3)):
        assert chat(client, **asked)["usage"]["completion_tokens"] == n_made
    assert chat(client, max_tokens=5, max_completion_tokens=4)["usage"]["completion_tokens"] == 4


def test_parts_of_a_message_are_its_lines(client: TestClient) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    told = chat(client, messages=[{"role": "user", "content": parts, "name": "me"}])
    assert told["usage"]["prompt_tokens"] == len(ids_of([{"role": "user", "content": "a\nb"}]))


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_stop_texts_end_an_answer_wherever_tokens_begin(client: TestClient, route: str) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT} if route == "/v1/completions" else {"messages": CHAT}

    def told(**body: Any) -> tuple[str, str, int]:
        (choice,) = client.post(route, json={**asked, **GREEDY, "max_tokens": 60, **body}).json()["choices"]
        chunks = streamed(client, route, **asked, **{**GREEDY, "max_tokens": 60}, **body)
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        pieces = [one["choices"][0] for one in chunks]
        assert text == "".join(one.get("text") or one.get("delta", {}).get("content", "") for one in pieces)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        return text, choice["finish_reason"], len(chunks)

    whole, reason, _ = told(ignore_eos=True)
    assert reason == "length"
    for at in range(5, 30, 5):
        stop = whole[at : at + 4]
        text, reason, _ = told(stop=[stop, "never there"], ignore_eos=True)
        assert (text, reason) == (whole[: whole.index(stop)], "stop")
    assert told(stop=whole[3])[0] == whole[: whole.index(whole[3])]


def test_stop_tokens_are_not_told(client: TestClient, stub: Stub) -> None:
    ids = tokenizer()(PROMPT)["input_ids"]
    whole = own(stub, ids, Sampling(max_new_tokens=12, stop_ids=())).tokens
    told = complete(client, stop_token_ids=[whole[6]], ignore_eos=True)
    n_before = whole.index(whole[6])
    assert told["choices"][0]["text"] == text_of(whole[:n_before])
    assert told["choices"][0]["finish_reason"] == "stop"
    assert told["usage"]["completion_tokens"] == n_before + 1


def test_log_probabilities(client: TestClient, stub: Stub) -> None:
    n = 4
    asked = Sampling(max_new_tokens=12, n_logprobs=n, stop_ids=())
    body = {"ignore_eos": True}
    expected = own(stub, tokenizer()(PROMPT)["input_ids"], asked)
    found = complete(client, logprobs=n, **body)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert found["tokens"] == [tokenizer().decode([one]) for one in expected.tokens]
    assert found["text_offset"][1] == len(found["tokens"][0])
    assert [max(top.values()) for top in found["top_logprobs"]] == pytest.approx(found["token_logprobs"])
    chunks = streamed(client, "/v1/completions", prompt=PROMPT, logprobs=n, **body)
    assert [one for chunk in chunks for one in chunk["choices"][0]["logprobs"]["tokens"]] == found["tokens"]
    assert [one for chunk in chunks for one in chunk["choices"][0]["logprobs"]["text_offset"]] == found["text_offset"]

    expected = own(stub, ids_of(), asked)
    content = chat(client, logprobs=True, top_logprobs=n, **body)["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == pytest.approx(expected.logprobs, abs=1e-4)
    assert [len(one["top_logprobs"]) for one in content] == [n] * 12
    text = b"".join(bytes(one["bytes"]) for one in content)
    assert text.decode(errors="replace") == tokenizer().decode(expected.tokens)
    chunks = streamed(client, "/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=n, **body)
    assert [one for chunk in chunks[1:] for one in chunk["choices"][0]["logprobs"]["content"]] == content
    assert chat(client, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_what_served_it_is_told_where_the_operator_wants_it(client: TestClient) -> None:
    asked = {"prompt": PROMPT, **GREEDY}
    for hit, rung in (("MISS", "none"), ("HIT", "exact")):
        headers = client.post("/v1/completions", json=asked).headers
        assert (headers["x-cache"], headers["x-cache-rung"]) == (hit, rung)
    assert client.post("/v1/completions", json={**asked, "stream": True}).headers["x-cache"] == "HIT"
    other = client.post("/v1/completions", json=asked, headers={"x-tenant": "other"})
    assert other.headers["x-cache"] == "MISS"
    assert other.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    "more", [{}, {"stream": True, "stream_options": {"include_usage": True}}], ids=["whole", "stream"]
)
def test_hits_are_told_nowhere_else(more: dict[str, Any]) -> None:
    stub = Stub()
    seen = []
    try:
        with TestClient(application(stub)) as client:
            for _ in range(2):
                answer = client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, **more})
                assert answer.status_code == 200 and "usage" in answer.text and "details" not in answer.text
                seen.append((dict(answer.headers), re.sub(r'"(id|created)": ?("[^"]*"|\d+)', "", answer.text)))
        assert seen[0] == seen[1] and stub.noted.served_by[1][0] == "exact"
    finally:
        stub.close()


def test_a_prompt_far_over_the_context_is_refused_without_all_of_it_tokenised(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(tokenizer())
    monkeypatch.setattr(stub.running, "_tokenizer", counted)
    with TestClient(application(stub)) as client:
        told = client.post("/v1/completions", json={"prompt": "card " * 10_000, **GREEDY})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "prompt")
    assert "more than the 256 tokens" in told.json()["error"]["message"]
    assert not counted.asked


@pytest.mark.hostile("fields of the dialects")
@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"model": "gpt-9"}, "model", 404),
        ({"prompt": ""}, "prompt", 400),
        ({"prompt": []}, "prompt", 400),
        ({"prompt": [[]]}, "prompt", 400),
        ({"prompt": [PROMPT, ""]}, "prompt", 400),
        ({"prompt": [10**9]}, "prompt", 400),
        ({"prompt": "card " * CONTEXT}, "prompt", 400),
        ({"max_tokens": CONTEXT}, "max_tokens", 400),
        ({"max_tokens": 0}, "max_tokens", 400),
        ({"max_tokens": -1}, "max_tokens", 400),
        ({"max_tokens": True}, "max_tokens", 400),
        ({"temperature": -0.1}, "temperature", 400),
        ({"temperature": "1"}, "temperature", 400),
        ({"top_p": 0}, "top_p", 400),
        ({"top_k": -2}, "top_k", 400),
        ({"presence_penalty": 2.1}, "presence_penalty", 400),
        ({"repetition_penalty": 0}, "repetition_penalty", 400),
        ({"repetition_penalty": 5e-324}, "repetition_penalty", 400),  # logits divided by it would not be finite
        ({"repetition_penalty": 1e308}, "repetition_penalty", 400),
        ({"n": 33}, "n", 413),
        ({"logprobs": 21}, "logprobs", 400),
        ({"stop": ["a"] * 5}, "stop", 400),
        ({"stop": ""}, "stop", 400),
        ({"stop_token_ids": [10**9]}, "stop_token_ids", 400),
        ({"stream_options": {"include_usage": True}}, "stream_options", 400),
        ({"echo": True}, "echo", 400),
        ({"suffix": "b"}, "suffix", 400),
        ({"best_of": 3}, "best_of", 400),
        ({"logit_bias": {"5": 1}}, "logit_bias", 400),
        ({"response_format": {"type": "json_object"}}, "response_format", 400),
    ],
)
def test_completions_that_are_refused(client: TestClient, body: dict[str, Any], param: str, status: int) -> None:
    told = client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, **body})
    assert told.status_code == status, told.text
    error = told.json()["error"]
    assert error["param"].startswith(param) and error["code"] == status and error["message"]


@pytest.mark.hostile("fields of the dialects")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "odd", "content": "secret"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "card " * CONTEXT}]}, "messages"),
        ({"max_completion_tokens": CONTEXT}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
    ],
)
def test_chats_that_are_refused(client: TestClient, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        told = client.post("/v1/chat/completions", json={"messages": CHAT, **GREEDY, "stream": stream, **body})
        assert told.status_code == 400, told.text
        assert told.json()["error"]["param"] == param and "secret" not in told.text


@pytest.mark.hostile("fields of the dialects")
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999"])
def test_what_is_no_number_is_refused(client: TestClient, number: str) -> None:
    for name in ("temperature", "top_p", "presence_penalty", "repetition_penalty"):
        told = client.post(
            "/v1/completions",
            content=f'{{"prompt": "a", "{name}": {number}}}',
            headers={"content-type": "application/json"},
        )
        assert told.status_code == 400 and told.json()["error"]["param"] == name


def test_fields_that_are_not_known_are_accepted(client: TestClient) -> None:
    more = {"user": "me", "store": True, "metadata": {"a": 1}, "tools": [], "tool_choice": "auto", "min_p": 0}
    assert chat(client, **more, response_format={"type": "text"}, cache_salt="x", namespace="other")["choices"]
    harmless = {"continue_final_message": False, "add_special_tokens": False, "add_generation_prompt": True}
    assert chat(client, **harmless, chat_template_kwargs={}, documents=[], n=1, stop=["a"] * 4)["choices"]
    assert complete(client, best_of=1, echo=False, suffix=None)["choices"]


def test_a_model_of_another_kind_says_so(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub, "decoder", None)
    told = TestClient(application(stub)).post("/v1/completions", json={"prompt": "a"})
    assert told.status_code == 400 and "needs a causal language model" in told.json()["error"]["message"]


def test_what_fails_after_the_first_byte_is_told_in_the_stream(client: TestClient, stub: Stub) -> None:
    calls = 0

    def failed(module: Any, args: Any, inputs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise RuntimeError("of what was asked")

    handle = stub.cache.model.register_forward_pre_hook(failed, with_kwargs=True)
    try:
        body = {"prompt": PROMPT, **GREEDY, "max_tokens": 40, "ignore_eos": True, "stream": True}
        told = client.post("/v1/completions", json=body)
        calls = 8
        refused = client.post("/v1/completions", json=body)
    finally:
        handle.remove()
    *_, last, rest = told.text.split("\n\n")
    kind, data = last.split("\n")
    assert (kind, rest, told.status_code) == ("event: error", "", 200)
    error = json.loads(data.removeprefix("data: "))["error"]
    assert error["message"] == "the model failed on this request" and error["code"] == 500
    assert refused.status_code == 500 and refused.json()["error"] == error  # before it


def test_a_client_that_has_gone_is_not_computed_for(stub: Stub) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    before = stub.noted.n_cancelled

    async def ask(stream: bool, n_chunks: int) -> list[dict[str, Any]]:
        sent, content = [], json.dumps({**body, "stream": stream}).encode()
        gone = asyncio.Event()
        asked = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def receive() -> Any:
            if (message := next(asked, None)) is not None:
                return message
            if n_chunks:
                await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > n_chunks:
                gone.set()

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await application(stub)({**scope, "asgi": {"version": "3.0"}}, receive, send)
        async with asyncio.timeout(20):
            while stub.running.n_running:
                await asyncio.sleep(0.001)
        return sent

    n_before = stub.noted.n_generated
    assert asyncio.run(ask(False, 0))[0]["status"] == 499
    assert asyncio.run(ask(True, 0))[0]["status"] == 499
    assert len(asyncio.run(ask(True, 3))) < 20
    assert stub.noted.n_cancelled == before + 3
    assert stub.noted.n_generated - n_before < 60


def test_work_ends_with_the_one_who_has_it_done() -> None:
    class Request:
        async def receive(self) -> Any:
            await asyncio.sleep(60)

    async def fails() -> None:
        raise Refusal("invalid", "no")

    async def main() -> None:
        assert await unless_gone(Request(), asyncio.sleep(0, 5)) == 5  # type: ignore[arg-type]
        with pytest.raises(Refusal, match="no"):
            await unless_gone(Request(), fails())  # type: ignore[arg-type]
        work = asyncio.create_task(asyncio.sleep(60))
        outer = asyncio.create_task(unless_gone(Request(), work))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert work.cancelled()

    asyncio.run(main())


@pytest.mark.slow
def test_through_the_whole_application(models: Path) -> None:
    server = make_server(models / NAME, BLOCKS, reveal_hits=True)
    expected = text_of(generate(model(), row(tuple(ids_of())), Sampling(max_new_tokens=12)).tokens)
    with TestClient(create_app(server)) as client:
        for n_cached in (0, len(ids_of())):
            told = chat(client)
            assert told["choices"][0]["message"]["content"] == expected
            assert told["usage"]["prompt_tokens_details"] == {"cached_tokens": n_cached}
        chunks = streamed(client, "/v1/chat/completions", messages=CHAT)
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == expected
        wrong = client.post("/v1/completions", json={"prompt": ["secret", 1] * 1000})
        assert wrong.status_code == 400 and "prompt" in wrong.json()["error"]["param"] and "secret" not in wrong.text
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 400


@pytest.mark.parametrize("forget", [("purge", {"namespace": "default"}), ("clear", None)], ids=lambda one: one[0])
def test_what_an_operator_has_forgotten_is_computed_anew(models: Path, forget: tuple[str, Any]) -> None:
    server = make_server(models / NAME, BLOCKS, reveal_hits=True)
    counted = Counted(server.tokenizer)
    assert server.decoder is not None
    server.decoder._tokenizer = counted

    def n_cached() -> int:
        return int(chat(client)["usage"]["prompt_tokens_details"]["cached_tokens"])

    with TestClient(create_app(server)) as client:
        assert [n_cached(), n_cached()] == [0, len(ids_of())]
        n_tokenised = counted.asked["tokens"]
        client.post(f"/admin/{forget[0]}", json=forget[1]).raise_for_status()
        assert n_cached() == 0 and counted.asked["tokens"] == n_tokenised + 1


@pytest.mark.slow
def test_the_openai_client() -> None:
    openai = pytest.importorskip("openai")
    stub = Stub(reveal_hits=True)
    expected = own(stub, ids_of(), Sampling(max_new_tokens=12))
    asked = {"model": NAME, "messages": CHAT, "temperature": 0, "max_tokens": 12}
    try:
        with listening(stub) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            whole = client.chat.completions.create(**asked)
            assert whole.choices[0].message.content == text_of(expected.tokens)
            assert whole.usage.prompt_tokens_details.cached_tokens == 0
            chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
            told = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
            assert told == text_of(expected.tokens)
            assert chunks[-1].usage.prompt_tokens_details.cached_tokens == len(ids_of())
            with client.chat.completions.stream(**asked) as events:
                assert "".join(event.delta for event in events if event.type == "content.delta") == told
            completion = client.completions.create(model=NAME, prompt=[PROMPT, "the"], logprobs=2, temperature=0)
            assert len(completion.choices) == 2 and completion.choices[0].logprobs.tokens
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="gpt-9", prompt="a")
            with pytest.raises(openai.BadRequestError, match="context"):
                client.completions.create(model=NAME, prompt="card " * CONTEXT)
            long = client.completions.create(
                model=NAME, prompt="the", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            next(long)
            long.close()
            while stub.running.n_running:
                pass
            assert stub.noted.n_cancelled == 1
    finally:
        stub.close()
