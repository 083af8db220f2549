"""Task `prompts`: its data and model, and the tokens known from earlier prompts."""

from typing import Any

import torch

from experiments.data.streams.prompts import BLOCK, known_tokens
from experiments.measures.base import serve_once
from experiments.methods import MethodSettings
from experiments.methods.cached import Cached
from experiments.support.files import Folders
from experiments.tasks import build, make_task
from experiments.tasks.prompts import Prompts

STREAM = {"name": "system_prompt", "n": 12, "system": 64, "shortest": 4, "longest": 20}


def built(prompts: Folders, seed: int = 0, **changes: Any) -> Prompts:
    task = make_task({"name": "prompts", "model": "tiny", "stream": STREAM, **changes})
    workload: Any = build(task, prompts, seed)
    return workload


def test_prompts_are_of_the_text_and_say_what_is_known(prompts: Folders) -> None:
    workload = built(prompts, stream={"name": "mooncake", "n": 8, "blocks": 4})
    asked = [request.inputs["input_ids"][0].tolist() for request in workload.requests]
    assert workload.known == known_tokens(asked) and sum(workload.known) == 16 * 16
    n_tokens = sum(map(len, asked))
    share = sum(workload.known) / n_tokens
    assert workload.facts == {
        "weights": "tiny",
        "n_tokens": n_tokens,
        "n_longest": 64,
        "share_known": share,
        "ceiling": 1 / (1 - share),
    }
    assert "train in winter" in " ".join(request.text for request in workload.requests)
    assert len(built(prompts, limit=5).requests) == 5


def test_the_answer_is_the_first_token(prompts: Folders) -> None:
    workload = built(prompts)
    ids = workload.requests[3].inputs["input_ids"]
    with torch.inference_mode():
        told = workload.answer(workload.module(**workload.requests[3].inputs), 3)
        assert told == int(workload.module(ids).logits[0, -1].argmax())
        generated = workload.module.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
    assert told == int(generated[0, -1])


def test_known_tokens_are_those_that_are_served(prompts: Folders) -> None:
    workload = built(prompts)
    method = Cached(workload, {})
    answers, notes = serve_once(method, range(12))
    plain, _ = serve_once(MethodSettings.make({"method": "nocache"}).build(workload), range(12))
    more = [note.n_prefix - known for note, known in zip(notes, workload.known, strict=True)]
    assert all(0 <= n < BLOCK for n in more)  # tokens of a partly known block are served, not counted
    assert [note.by for note in notes] == ["computed", *["prefix"] * 11]
    assert answers == plain and len(set(plain)) > 3
    assert method.nbytes is not None and method.nbytes == method.stats.prefix_nbytes + method.stats.nbytes
    assert method.stats.prefix_nbytes > 0


def test_blocks_that_leave_are_told(prompts: Folders) -> None:
    method = Cached(built(prompts, stream={**STREAM, "shortest": 64, "longest": 64}), {"max_bytes": 400_000})
    _, notes = serve_once(method, range(12))
    assert method.stats.n_blocks_evicted > 0 and sum(method.stats.n_evicted.values()) == 0
    assert not notes[0].is_evicting and notes[-1].is_evicting
