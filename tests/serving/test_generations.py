"""`/v1/completions` and `/v1/chat/completions`: the model's own tokens, whole or streamed, in OpenAI's shapes.

Generations share decode steps. Equal requests in flight are computed once; requests of disconnected clients are not
computed.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from starlette.testclient import TestClient

from llmcache.generation import Generation, Sampling, generate
from llmcache.serving.keys import add_key
from llmcache.serving.server import Server
from tests.fixtures import Log, Pool
from tests.redis_server import wait_until
from tests.serving.served import (
    CONTEXT,
    Client,
    Serve,
    byte_tokenizer,
    decoder,
    figure,
    listening,
    make_server,
    model_held,
)

PROMPT = "where is my card"
CHAT = [{"role": "system", "content": "the cash"}, {"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "max_tokens": 12}
SAMPLED = {"temperature": 2.0, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2}
DRAWN = {**SAMPLED, "seed": -3, "max_tokens": 12}
LONG = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
BLOCKS = {"prefix": {"block": 8}}
ROUTES = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": CHAT}}
SERVED = {"kind": "decoder", "cache": BLOCKS, "reveal_hits": True}
#: Fields that change nothing, known or not.
IGNORED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"best_of": 1, "echo": False, "suffix": None},
    "/v1/chat/completions": {
        "user": "me",
        "store": True,
        "metadata": {"a": 1},
        "tools": [],
        "tool_choice": "auto",
        "min_p": 0,
        "response_format": {"type": "text"},
        "cache_salt": "x",
        "namespace": "other",
        "documents": [],
        "add_generation_prompt": True,
    },
}


@pytest.fixture(scope="module")
def plain() -> Any:
    """The model without a cache."""
    return decoder()


def ids_of(prompt: Any) -> list[int]:
    if not isinstance(prompt, str):
        prompt = byte_tokenizer().apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return list(byte_tokenizer()(prompt)["input_ids"])


def own(plain: Any, ids: list[int], **sampling: Any) -> Generation:
    return generate(plain, torch.tensor([ids]), Sampling(**{"max_new_tokens": 12, **sampling}))


def text_of(tokens: Any) -> str:
    return str(byte_tokenizer().decode(list(tokens), skip_special_tokens=True))


def ask(client: Any, route: str = "/v1/completions", **body: Any) -> Any:
    answer = client.post(route, json={**ROUTES[route], **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(client: Any, **body: Any) -> str:
    return said(ask(client, **body))


def n_cached(client: Any, **body: Any) -> int:
    """Return how many tokens of the prompt were not computed."""
    return int(ask(client, **body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def said(answer: dict[str, Any]) -> str:
    """Return the text of the first choice of an answer or of a chunk."""
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content", ""))


def streamed(client: Any, route: str, **body: Any) -> list[dict[str, Any]]:
    """Return a stream's chunks; assert that it ends with `[DONE]`."""
    answer = client.post(route, json={**ROUTES[route], **GREEDY, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    *told, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(one.removeprefix("data: ")) for one in told]


@pytest.mark.parametrize("route", ROUTES)
def test_answers_are_the_models_own_cached_or_not_streamed_or_not(
    route: str, client: TestClient, server: Server, plain: Any
) -> None:
    ids = ids_of(CHAT if "chat" in route else PROMPT)
    expected = own(plain, ids)
    n_made, shapes = len(expected.tokens), []
    for n_known in (0, len(ids)):
        chunks = streamed(client, route, stream_options={"include_usage": True})
        *pieces, usage = chunks
        assert "".join(map(said, pieces)) == text_of(expected.tokens)
        reasons = [one["choices"][0]["finish_reason"] for one in pieces]
        assert reasons == [None] * (len(pieces) - 1) + [expected.stopped_by]
        assert usage["choices"] == [] and all(one["usage"] is None for one in pieces)
        assert usage["usage"] == {
            "prompt_tokens": len(ids),
            "completion_tokens": n_made,
            "total_tokens": len(ids) + n_made,
            "prompt_tokens_details": {"cached_tokens": n_known},
        }
        assert len({(one["id"], one["created"], one["model"], one["object"]) for one in chunks}) == 1
        shapes.append([one["choices"] for one in chunks])
    assert shapes[0] == shapes[1]
    told = ask(client, route, **IGNORED[route])
    (choice,) = told["choices"]
    assert (said(told), choice["finish_reason"]) == (text_of(expected.tokens), expected.stopped_by)
    assert told["usage"] == usage["usage"] and told["created"] > 1e9
    kinds = ["chat.completion.chunk", "chat.completion"] if "chat" in route else ["text_completion"] * 2
    assert [chunks[0]["object"], told["object"]] == kinds
    assert re.fullmatch("(chat)?cmpl-[0-9a-f]{32}", told["id"])
    assert "usage" not in streamed(client, route)[-1]
    assert server.cache.stats().errors == 0


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        (DRAWN, {**SAMPLED, "do_sample": True, "seed": 2**63 - 3}),
        ({"temperature": 0.7, "seed": 1}, {"do_sample": True, "temperature": 0.7, "seed": 1}),
        ({"presence_penalty": 2}, {"presence_penalty": 2}),
        ({"frequency_penalty": -1.5}, {"frequency_penalty": -1.5}),
        ({"max_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_tokens": None}, {"max_new_tokens": 16}),
    ],
)
def test_settings_of_a_request(client: TestClient, plain: Any, body: Any, sampling: Any) -> None:
    for _ in range(2):
        assert complete(client, **body) == text_of(own(plain, ids_of(PROMPT), **sampling).tokens)


def test_several_prompts_and_answers(client: TestClient, plain: Any) -> None:
    texts = [PROMPT, "the cash"]
    ids = list(map(ids_of, texts))
    expected = [text_of(own(plain, one).tokens) for one in ids]
    for prompt in (texts, ids):
        told = ask(client, prompt=prompt)
        assert [(one["index"], one["text"]) for one in told["choices"]] == [*enumerate(expected)]
        assert told["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert complete(client, prompt=ids[1]) == expected[1]
    alone = [complete(client, prompt=one, **{**DRAWN, "seed": seed}) for one in texts for seed in (5, 6)]
    told = ask(client, prompt=texts, **{**DRAWN, "seed": 5}, n=2)
    assert [one["text"] for one in told["choices"]] == alone
    assert told["usage"]["prompt_tokens"] == sum(map(len, ids))
    chunks = streamed(client, "/v1/completions", prompt=PROMPT, **{**DRAWN, "seed": 5}, n=2)
    for index in range(2):
        assert "".join(said(one) for one in chunks if one["choices"][0]["index"] == index) == alone[index]
    assert len({complete(client, temperature=None) for _ in range(5)}) == 5  # sampled: different each time


def test_a_chat_goes_on_to_the_end_of_the_context_unless_told(client: TestClient) -> None:
    def n_made(**body: Any) -> int:
        return int(ask(client, "/v1/chat/completions", **body)["usage"]["completion_tokens"])

    assert n_made(max_tokens=None, ignore_eos=True) == CONTEXT - len(ids_of(CHAT))
    assert n_made(max_tokens=5, max_completion_tokens=4, ignore_eos=True) == 4
    parts = [{"role": "user", "content": [{"type": "text", "text": one} for one in "ab"], "name": "me"}]
    told = ask(client, "/v1/chat/completions", messages=parts)
    assert told["usage"]["prompt_tokens"] == len(ids_of([{"role": "user", "content": "a\nb"}]))


@pytest.mark.parametrize("route", ROUTES)
def test_stop_texts_and_tokens_end_an_answer_wherever_tokens_begin(route: str, client: TestClient, plain: Any) -> None:
    def told(**body: Any) -> tuple[str, str]:
        asked = {"max_tokens": 40, "ignore_eos": True, **body}
        whole, chunks = ask(client, route, **asked), streamed(client, route, **asked)
        assert said(whole) == "".join(map(said, chunks))
        reason = whole["choices"][0]["finish_reason"]
        assert chunks[-1]["choices"][0]["finish_reason"] == reason
        return said(whole), reason

    whole, reason = told()
    assert reason == "length"
    for at in (5, 10):
        stop = whole[at : at + 4]
        assert told(stop=[stop, "never there"]) == (whole[: whole.index(stop)], "stop")
    tokens = own(plain, ids_of(CHAT if "chat" in route else PROMPT), stop_ids=()).tokens
    assert told(stop_token_ids=[tokens[6]]) == (text_of(tokens[: tokens.index(tokens[6])]), "stop")


def test_log_probabilities(client: TestClient, plain: Any) -> None:
    more: dict[str, Any] = {"ignore_eos": True}
    expected = own(plain, ids_of(PROMPT), n_logprobs=4, stop_ids=())
    found = ask(client, logprobs=4, **more)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert found["tokens"] == [byte_tokenizer().decode([one]) for one in expected.tokens]
    assert [max(top.values()) for top in found["top_logprobs"]] == pytest.approx(found["token_logprobs"])
    chunks = [one["choices"][0]["logprobs"] for one in streamed(client, "/v1/completions", logprobs=4, **more)]
    for name in ("tokens", "text_offset"):
        assert [one for chunk in chunks for one in chunk[name]] == found[name]
    route = "/v1/chat/completions"
    more |= {"logprobs": True, "top_logprobs": 4}
    expected = own(plain, ids_of(CHAT), n_logprobs=4, stop_ids=())
    content = ask(client, route, **more)["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == pytest.approx(expected.logprobs, abs=1e-4)
    assert [len(one["top_logprobs"]) for one in content] == [4] * 12
    text = b"".join(bytes(one["bytes"]) for one in content)
    assert text.decode(errors="replace") == byte_tokenizer().decode(expected.tokens)
    chunks = [one["choices"][0]["logprobs"] for one in streamed(client, route, **more)[1:]]
    assert [one for chunk in chunks for one in chunk["content"]] == content


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("is_text", [True, False], ids=["text", "ids"])
def test_an_echo_begins_with_the_prompt_and_its_log_probabilities(
    client: TestClient, plain: Any, max_tokens: int, is_text: bool
) -> None:
    ids, made = ids_of(PROMPT), own(plain, ids_of(PROMPT), max_new_tokens=max_tokens or 1, stop_ids=())
    with torch.no_grad():
        logprobs = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
    answers = [*ids, *made.tokens[:max_tokens]]
    asked: dict[str, Any] = {"prompt": PROMPT if is_text else ids, "max_tokens": max_tokens, "ignore_eos": True}
    for n_hit in (0, len(ids)):  # the second time from the cache
        body = ask(client, **asked, echo=True, logprobs=1)
        choice, usage = body["choices"][0], body["usage"]
        assert choice["text"] == PROMPT + text_of(made.tokens[:max_tokens]) and choice["finish_reason"] == "length"
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), max_tokens)
        assert usage["prompt_tokens_details"]["cached_tokens"] == n_hit
        found = choice["logprobs"]
        assert found["tokens"] == [byte_tokenizer().decode([one]) for one in answers]
        assert found["text_offset"][:2] == [0, len(found["tokens"][0])]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        expected = [float(row[token]) for row, token in zip(logprobs, ids[1:], strict=False)]
        assert found["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        best = logprobs[: len(ids) - 1].max(-1).values.tolist()
        assert [max(top.values()) for top in found["top_logprobs"][1 : len(ids)]] == pytest.approx(best, abs=1e-4)
    chunks = streamed(client, "/v1/completions", **asked, echo=True, logprobs=1)
    assert "".join(map(said, chunks)) == choice["text"]
    assert ask(client, **asked, echo=True)["choices"][0] == choice | {"logprobs": None}


def test_several_prompts_are_echoed_in_order(client: TestClient) -> None:
    prompts = [ids_of(PROMPT), ids_of("the cash is there"), ids_of(PROMPT)]
    choices = ask(client, prompt=prompts, echo=True, max_tokens=0, n=2)["choices"]
    assert [one["text"] for one in choices] == [PROMPT] * 2 + ["the cash is there"] * 2 + [PROMPT] * 2


def test_calls_of_tools_are_written_by_the_chat_template(models: Path) -> None:
    call = {"id": "a", "function": {"name": "find", "arguments": '{"what": "my card"}'}}
    asked = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    server = make_server(models / "decoder")
    server.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
        "{% for c in m.get('tool_calls', []) %}<{{ c['function']['name'] }}"
        "{% for k, v in c['function']['arguments'] | items %} {{ k }}={{ v }}{% endfor %}>{% endfor %}{% endfor %}"
    )
    with Client(server) as client:

        def n_prompt(*messages: dict[str, Any]) -> int:
            return int(ask(client, "/v1/chat/completions", messages=messages)["usage"]["prompt_tokens"])

        with_call, without = n_prompt(*asked), n_prompt(*CHAT, {"role": "assistant", "content": None})
        assert with_call == without + len(byte_tokenizer()("<find what=my card>")["input_ids"])
        assert n_prompt(*asked, {"role": "tool", "tool_call_id": "a", "content": "my card"}) > with_call


def test_what_fails_is_told_in_the_stream_once_it_has_begun(client: TestClient, server: Server, caplog: Log) -> None:
    calls, before = 0, figure(server, "model_failures_total")

    def fails(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise RuntimeError("of what was asked")

    handle = server.cache.model.register_forward_pre_hook(fails)
    try:
        body = {"prompt": PROMPT, **LONG, "stream": True}
        begun = client.post("/v1/completions", json=body)
        calls = 8
        refused = client.post("/v1/completions", json=body)
    finally:
        handle.remove()
    kind, data = begun.text.split("\n\n")[-2].split("\n")
    error = json.loads(data.removeprefix("data: "))["error"]
    assert (kind, begun.status_code) == ("event: error", 200)
    assert error["message"] == "the model failed on this request" and error["code"] == 500
    assert refused.status_code == 500 and refused.json()["error"] == error
    assert "of what was asked" not in caplog.text and "a generation failed: RuntimeError at" in caplog.text
    assert figure(server, "model_failures_total") == before + 2


def test_equal_requests_in_flight_are_computed_once(client: TestClient, server: Server, plain: Any, pool: Pool) -> None:
    before, n_before = figure(server, "generation_tokens_total"), figure(server, "requests_total", rung="in_flight")
    with model_held(server):
        asked = [pool.submit(complete, client, ignore_eos=True) for _ in range(4)]
        wait_until(lambda: figure(server, "concurrent_requests") == 4)
        time.sleep(0.2)  # meanwhile the last requests are read
    expected = text_of(own(plain, ids_of(PROMPT), stop_ids=()).tokens)
    assert {one.result() for one in asked} == {expected}
    assert figure(server, "generation_tokens_total") - before == 12
    assert figure(server, "requests_total", rung="in_flight") - n_before == 3


@pytest.mark.parametrize("chunk", [0, 7])
def test_many_at_once_with_prompts_in_chunks(chunk: int, serve: Serve, plain: Any, pool: Pool) -> None:
    long = [20 + i % 200 for i in range(150)]
    prompts = [[30 + i, *long[: 30 * i + 5]] for i in range(5)] + [long, long, [*long, 50, 51, 52]]
    client = serve("decoder", BLOCKS, max_streams=3, prefill_chunk=chunk)
    answers = list(pool.map(lambda one: complete(client, prompt=one, ignore_eos=True), prompts))
    assert answers == [text_of(own(plain, one, stop_ids=()).tokens) for one in prompts]
    assert complete(client, prompt=[*long, 60], ignore_eos=True)
    stats = client.server.cache.stats()
    assert stats.errors == 0 and stats.n_prefix_tokens > 0
    assert figure(client.server, "num_requests_running") == 0 and client.server.n_waiting == 0


def test_a_short_request_is_not_held_up_by_a_long_one(client: TestClient, server: Server, pool: Pool) -> None:
    before = figure(server, "generation_tokens_total")
    long = pool.submit(complete, client, **LONG)
    wait_until(lambda: figure(server, "generation_tokens_total") > before)
    complete(client, prompt="the cash")
    assert not long.done()
    long.result()


def test_streams_are_decoded_in_one_forward_with_their_own_tokens(serve: Serve, plain: Any, pool: Pool) -> None:
    client = serve("decoder", BLOCKS, prefill_chunk=7)
    drawn = {"temperature": 2.0, "top_p": 0.9, "seed": 3}
    bodies = [{"prompt": [20 + i] * (3 * i + 1), "max_tokens": 30 + i, **(drawn if i % 2 else {})} for i in range(4)]
    rows = list[int]()
    model = client.server.cache.model
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    with model_held(client.server):
        asked = [pool.submit(complete, client, ignore_eos=True, **body) for body in bodies]
        wait_until(lambda: figure(client.server, "num_requests_running") == 4)
    answers = [one.result() for one in asked]
    handle.remove()
    for i, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
        sampling = {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "seed": 3} if i % 2 else {}
        expected = own(plain, body["prompt"], max_new_tokens=30 + i, stop_ids=(), **sampling)
        assert answer == text_of(expected.tokens)
    assert max(rows) == 4


def test_prompts_that_begin_alike_are_computed_once_though_they_come_together(serve: Serve, pool: Pool) -> None:
    client = serve("decoder", BLOCKS, prefill_chunk=16, reveal_hits=True)
    system = [20 + i % 200 for i in range(96)]
    with model_held(client.server):
        asked = [pool.submit(n_cached, client, prompt=[*system, 30 + i, 40]) for i in range(4)]
        wait_until(lambda: figure(client.server, "num_requests_running") == 4)
    assert sorted(one.result() for one in asked) == [0, 96, 96, 96]


def test_an_error_in_a_joint_step_ends_its_streams_and_no_later_one(
    client: TestClient, server: Server, plain: Any, pool: Pool
) -> None:
    before = figure(server, "model_failures_total")

    def fails(module: Any, args: Any, kwargs: Any) -> None:
        if len(kwargs["input_ids"]) == 3:
            raise RuntimeError

    handle = server.cache.model.register_forward_pre_hook(fails, with_kwargs=True)
    try:
        with model_held(server):
            asked = [
                pool.submit(client.post, "/v1/completions", json={"prompt": [one], **LONG}) for one in (20, 21, 22)
            ]
            wait_until(lambda: figure(server, "num_requests_running") == 3)
        assert {one.result().status_code for one in asked} == {500}
    finally:
        handle.remove()
    assert figure(server, "model_failures_total") == before + 3
    assert complete(client) == text_of(own(plain, ids_of(PROMPT)).tokens)
    assert figure(server, "num_requests_running") == 0


def test_who_waits_too_long_is_refused_and_who_has_gone_takes_no_place(models: Path, plain: Any, pool: Pool) -> None:
    server = make_server(models / "decoder", max_streams=1, max_queue_s=0.2)
    with listening(server) as (_, url), httpx2.Client(base_url=url, timeout=20) as client:
        with model_held(server):
            first = pool.submit(complete, client)
            wait_until(lambda: figure(server, "num_requests_running") == 1)
            late = client.post("/v1/completions", json={"prompt": "the", **GREEDY})
            assert late.status_code == 429 and late.headers["retry-after"] == "1"
            assert "answering 1 requests" in late.text
            with pytest.raises(httpx2.TimeoutException):
                client.post("/v1/completions", json={"prompt": "is", **GREEDY}, timeout=0.05)
            wait_until(lambda: server.n_waiting == 0)
        assert first.result() == text_of(own(plain, ids_of(PROMPT)).tokens)
        for more in ({}, {"stream": True}):
            n_made = figure(server, "generation_tokens_total")
            with pytest.raises(httpx2.TimeoutException), model_held(server):
                client.post("/v1/completions", json={"prompt": "my", **LONG, **more}, timeout=0.1)
            wait_until(lambda: figure(server, "num_requests_running") == 0)
            assert figure(server, "generation_tokens_total") - n_made < 100
        assert complete(client) == first.result()
        assert figure(server, "requests_cancelled_total") >= 2


def test_a_public_prefix_serves_all_and_nothing_else_does(models: Path, tmp_path: Path, plain: Any) -> None:
    path = tmp_path / "keys.yaml"
    of = {name: f"Bearer {add_key(path, name, name, ('infer',))}" for name in ("a", "b")}
    of["public"] = f"Bearer {add_key(path, 'boss', 'public', ('infer', 'admin'))}"
    known = [*range(20, 36)]
    longer, mine = [*known, *range(50, 58)], [*known, 60]
    server = make_server(models / "decoder", BLOCKS, reveal_hits=True, keys=path)
    found = []
    with Client(server) as client:
        asked = (("public", known), ("a", longer), ("b", longer), ("b", longer), ("public", mine), ("a", mine))
        for name, prompt in asked:
            client.headers["Authorization"] = of[name]
            told = ask(client, prompt=prompt)
            assert told["choices"][0]["text"] == text_of(own(plain, prompt).tokens)
            found.append(told["usage"]["prompt_tokens_details"]["cached_tokens"])
        client.headers["Authorization"] = of["public"]
        done = client.post("/admin/purge", json={"namespace": "public"}).json()
    assert found == [0, 16, 16, 24, 16, 16]  # 24: it was computed before, after the public prefix
    assert done["purged"] >= 1 and "copies" in done["note"]


@pytest.mark.parametrize("route", ["forget", "purge"])
def test_a_generation_under_way_does_not_bring_its_prompt_back(serve: Serve, route: str, pool: Pool) -> None:
    client = serve("decoder", BLOCKS, reveal_hits=True, prefill_chunk=16, max_streams=1)
    prompt = text_of(range(20, 84))
    body = {"purge": {"namespace": "default"}, "forget": {"prompt": prompt}}[route]
    with model_held(client.server):
        # In chunks; the second waits for a slot.
        under_way = [pool.submit(n_cached, client, prompt=prompt, max_tokens=n) for n in (2, 3)]
        wait_until(lambda: client.server.n_waiting == 1)
        forgetting = pool.submit(client.post, f"/admin/{route}", json=body)
        time.sleep(0.05)
    assert forgetting.result().status_code == 200
    assert [one.result() for one in under_way] == [0, 0] and n_cached(client, prompt=prompt, max_tokens=4) == 0


def test_what_is_forgotten_is_not_kept_as_a_tokenised_prompt(client: Client) -> None:
    assert client.post("/admin/forget", json={"prompt": PROMPT}).json() == {"forgotten": 0}
    for body in ({"prompt": "the card " * 200}, {"messages": []}, {"prompt": ""}):
        assert client.post("/admin/forget", json=body).status_code == 422
    assert client.server.decoder is not None and not client.server.decoder._prompts
