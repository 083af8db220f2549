"""Encoder requests: hits never wait, misses are batched and computed once, failures spoil no other input."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from llmcache.cache import LLMCache
from llmcache.serving.server import Server
from tests.fixtures import Log, Patch, Pool
from tests.redis_server import wait_until
from tests.serving.served import LABELS, Serve, figure, is_computing, model_held, tokenizer

TEXTS = [f"lost my card w{i}" for i in range(8)]


SERVED = {"kind": "classifier", "reveal_hits": True}


def ask(client: TestClient, *texts: str, **more: Any) -> Any:
    """Post texts, each as one input; return the response."""
    return client.post("/predict", json={"inputs": [[text] for text in texts], "raw_scores": True, **more})


def check(server: Server, texts: list[str], answer: Any) -> None:
    """Compare a response with the model's own answer to each text alone."""
    assert answer.status_code == 200, answer.text
    for text, found in zip(texts, answer.json(), strict=True):
        with torch.inference_mode(), server.cache.disabled():
            own = server.model(**tokenizer()(text, return_tensors="pt")).logits[0].numpy()
        scores = {one["label"]: one["score"] for one in found}
        np.testing.assert_allclose([scores[label] for label in LABELS], own, atol=1e-5)


def test_answers_are_the_models_own_and_only_new_inputs_are_computed(client: TestClient, server: Server) -> None:
    mixed = [*TEXTS[:4], "where is my cash w1 w2 w3 w4 w5 w6 w7 w8 w9", *TEXTS[4:]]
    for texts, hit, n_new in ((TEXTS, "MISS", 8), (TEXTS, "HIT", 0), (mixed, "PARTIAL", 1)):
        before = server.cache.stats()
        answer = ask(client, *texts)
        after = server.cache.stats()
        check(server, texts, answer)
        assert answer.headers["x-cache"] == hit and after.errors == 0
        assert (after.n_misses - before.n_misses, after.n_requests - before.n_requests) == (n_new, len(texts))
    assert ask(client, *TEXTS).headers["x-cache-rung"] == "exact"


def test_a_hit_waits_neither_for_the_model_nor_for_a_long_text(
    client: TestClient, server: Server, pool: Pool, monkeypatch: Patch
) -> None:
    long, encode = "my card " * 2000, server.tokenizing.encode
    before = figure(server, "request_tokenization_duration_count")
    is_held, release = threading.Event(), threading.Event()

    def blocked(items: Any, *args: Any) -> Any:
        if long in items:
            is_held.set()
            release.wait(20)
        return encode(items, *args)

    ask(client, TEXTS[0])
    monkeypatch.setattr(server.tokenizing, "encode", blocked)
    with model_held(server):
        miss = pool.submit(ask, client, "change please")
        waiting = pool.submit(ask, client, long, truncate=True)
        assert is_held.wait(20) and ask(client, TEXTS[0]).headers["x-cache"] == "HIT"
        assert not (miss.done() or waiting.done())
        release.set()
    assert miss.result().status_code == waiting.result().status_code == 200
    assert figure(server, "request_tokenization_duration_count") == before + 4


def test_the_same_text_ten_times_at_once_is_computed_once_with_others_in_its_batch(
    client: TestClient, server: Server, pool: Pool
) -> None:
    before, n_batches = server.cache.stats().n_misses, figure(server, "batch_next_size_count")
    with model_held(server):
        pool.submit(ask, client, "my card")  # the first batch
        wait_until(lambda: is_computing(server))
        asked = [pool.submit(ask, client, text) for text in ["where is cash"] * 9 + ["where is my rate"]]
        wait_until(lambda: is_computing(server, n_waiting=2))
        wait_until(lambda: figure(server, "concurrent_requests") == 11)
        time.sleep(0.2)  # meanwhile the last requests are looked up
    answers = [one.result().json() for one in asked]
    assert server.cache.stats().n_misses - before == 3
    assert all(one == answers[0] for one in answers[:9]) and answers[9] != answers[0]
    assert figure(server, "batch_next_size_count") == n_batches + 2  # the two others share one batch


def test_what_fails_spoils_no_other_and_quotes_nothing(client: TestClient, server: Server, caplog: Log) -> None:
    cash = tokenizer().convert_tokens_to_ids("cash")

    def fails_on_cash(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if (inputs["input_ids"] == cash).any():
            raise RuntimeError("cannot cash")

    handle = server.model.register_forward_pre_hook(fails_on_cash, with_kwargs=True)
    failed = ask(client, "my card", "my cash")
    handle.remove()
    assert failed.status_code == 424 and failed.json()["error"] == "the model failed on this input: `inputs[1]`"
    assert "the model failed on an input: RuntimeError" in caplog.text and "cash" not in caplog.text
    assert ask(client, "my card").headers["x-cache"] == "HIT"  # computed and stored beside the other
    check(server, ["my card", "my cash"], ask(client, "my card", "my cash"))


@pytest.mark.parametrize("what", ["served", "looked up", "not finite"])
def test_what_cannot_be_served_is_computed(
    what: str, client: TestClient, server: Server, monkeypatch: Patch, caplog: Log
) -> None:
    ask(client, TEXTS[0])
    failing = iter((True,))

    def fails_once(module: Any, args: Any, inputs: Any, output: Any) -> None:
        if what != "looked up" and next(failing, False):
            if what == "served":
                raise RuntimeError("of what was asked")
            output.logits.fill_(torch.nan)

    def fails(*_: Any) -> Any:
        raise ValueError("of what was asked")

    if what == "looked up":
        monkeypatch.setattr(LLMCache, "only_if_cached", fails)
    handle = server.model.register_forward_hook(fails_once, with_kwargs=True)
    answer = ask(client, TEXTS[0])
    handle.remove()
    check(server, TEXTS[:1], answer)
    assert ("are computed" in caplog.text) == (what != "not finite") and "asked" not in caplog.text


def test_a_queue_that_is_too_slow_refuses(serve: Serve, pool: Pool) -> None:
    client = serve("classifier", max_queue_s=0.05)
    with model_held(client.server):
        first = pool.submit(ask, client, "my card")
        wait_until(lambda: is_computing(client.server))
        late = pool.submit(ask, client, "my cash")
        wait_until(lambda: client.server.n_waiting == 1 or late.done())  # a busy machine may have refused it already
        time.sleep(0.1)
    assert first.result().status_code == 200
    assert (late.result().status_code, late.result().headers["retry-after"]) == (429, "1")


def test_batches_are_of_about_one_length_and_within_the_tokens(serve: Serve) -> None:
    client = serve("classifier", max_batch_tokens=40)
    client.server.is_disabled = True
    texts = [" ".join(["w1"] * n + [f"w{i}"]) for i, n in enumerate((2, 25, 3, 24, 2, 3, 2, 3))]
    shapes: list[tuple[int, ...]] = []
    client.server.model.register_forward_pre_hook(
        lambda module, args, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    assert ask(client, *texts).status_code == 200
    assert sum(n_rows for n_rows, _ in shapes) == len(texts) and max(n_rows for n_rows, _ in shapes) >= 5
    assert all(n_rows * length <= 40 or n_rows == 1 for n_rows, length in shapes)
    assert {length for n_rows, length in shapes if n_rows > 1} <= {5, 6}
