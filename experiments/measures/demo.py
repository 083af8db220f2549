"""The demo, on small real models with settings fixed in advance: savings and cost of reuse; then a decoder.

First act: the support desk's stream, shuffled, with all-MiniLM-L6-v2. The first requests fit a linear head on
mean-pooled states. The others are served in whole passes, back to back, each cache cold at the start:

    the model alone, exact repeats, tau, calibrated at each `max_drop`, the model alone

Where ONNX Runtime is installed, two more settings have it behind the cache: exact repeats, and reuse with an int8 draft
at the smallest `max_drop`. Calibrated reuse learns in its own pass from the first `LEARN` requests that it computes,
and calibrates in a thread while later requests are served. Figures cover the requests after these, the same for every
setting; `whole` covers the stream from its start. Speed-ups are relative to both passes of the model alone.

Second act: users with one system prompt, and the time to each user's first token, from the prompt's token ids, storing
included: the model alone, with `wrap`'s default cache, and alone again. Decoding is greedy.

Sizes: N served requests.
"""

import random
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from experiments.data.labelled import made_requests
from experiments.measures.service import CACHE, Pass, Server
from experiments.methods import NOCACHE
from experiments.methods.base import COMPUTED
from experiments.metrics.metrics import figures_of, percentiles
from experiments.models.heads import fit_logistic
from experiments.models.loading import Loaded
from experiments.support.environment import describe
from experiments.tasks.stream import Stream
from experiments.tasks.workload import Workload
from llmcache import CacheConfig, Calibration, ConfigError, LLMCache
from llmcache.generation import Generation, PromptCache, Sampling, generate

PAPER_TAU = 0.85
MAX_DROPS = (0.005, 0.01, 0.02)
LEARN = 1200  # the smallest `max_drop` needs 1,196
N_FIT = 600
MAX_LENGTH = 128

Taken = tuple[str, Pass, Calibration | None]  # name of a setting, its pass, and the calibration made in it


def ways() -> dict[str, dict[str, Any]]:
    """Return the settings of each cache by row name, in the order of the passes."""
    found: dict[str, dict[str, Any]] = {"exact repeats": {}, f"tau {PAPER_TAU}": {"tau": PAPER_TAU, "layers": "last"}}
    for drop in MAX_DROPS:
        found[f"calibrated, {100 * drop:.1f} %"] = {"answer": "class", "learn": LEARN, "max_drop": drop}
    if all(map(find_spec, ("onnxruntime", "onnx", "onnxscript"))):
        engine = {"engine": "onnxruntime"}
        found["ONNX Runtime, exact repeats"] = engine
        found[f"ONNX Runtime, reuse and draft, {100 * MAX_DROPS[0]:.1f} %"] = {
            **found[f"calibrated, {100 * MAX_DROPS[0]:.1f} %"],
            **engine,
            "draft": "int8",
        }
    return found


def run_demo(loaded: Loaded, n: int, seed: int = 0) -> dict[str, Any]:
    """Measure every setting on `n` requests: `settings` has one mapping per row, the model alone first."""
    if n <= LEARN:
        raise ConfigError(f"n={n}: the first {LEARN} requests are learned from; give more")
    environment = describe(seed)  # before any work, which would count as load
    data = made_requests(N_FIT + n, seed)
    random.Random(seed).shuffle(data)
    stream = data[N_FIT:]
    workload = Stream(
        fit_logistic(loaded, "mean", data[:N_FIT], stream, MAX_LENGTH), stream, MAX_LENGTH, payload="mean"
    )
    base, taken = _passes(workload)
    first = max(_learned_at(served) for name, served, _ in taken if "learn" in ways()[name])
    rows = [_row(workload, base, found, first, seed) for found in taken]
    alone = {
        "name": "no cache",
        "accuracy": float(workload.after(first).scores(base[0].answers[first:]).mean()),
        "latency_ms": percentiles(np.concatenate([one.ms[first:] for one in base])),
        "seconds": [one.seconds for one in base],
    }
    return {
        "settings": [alone, *rows],
        "conclusion": conclude(rows),
        "n": n,
        "n_fit": N_FIT,
        "learn": first,
        "environment": environment,
    }


def _passes(workload: Workload) -> tuple[list[Pass], list[Taken]]:
    """Return both passes of the model alone, and one pass per setting with the calibration made in it."""
    base, taken = [], []
    for number, (name, options) in enumerate(ways().items()):
        server = Server(workload, options, learn=0)
        if number == 0:
            base.append(server.go(NOCACHE, number, "no cache"))
        taken.append((name, server.go(CACHE, number, name), server.cache.calibration))
        server.cache.unwrap()
    base.append(server.go(NOCACHE, number, "no cache"))
    return base, taken


def _learned_at(taken: Pass) -> int:
    """Return the number of requests after which `LEARN` were computed; repeats are served meanwhile."""
    computed = np.flatnonzero(taken.served == COMPUTED)
    if len(computed) < LEARN or computed[LEARN - 1] + 1 == len(taken.served):
        raise ConfigError(
            f"n={len(taken.served)}: {LEARN} requests that differ are learned from, and none would be left; give more"
        )
    return int(computed[LEARN - 1]) + 1


def _row(workload: Workload, base: Sequence[Pass], found: Taken, first: int, seed: int) -> dict[str, Any]:
    """Return one row with a cache; `bound` is the calibration's bound on changed answers, None without one."""
    name, taken, calibration = found
    chosen = None if calibration is None else calibration.chosen
    saved = np.cumsum(np.mean([one.ms for one in base], axis=0) - taken.ms)
    owed = np.flatnonzero(saved < 0)
    after = owed[-1] + 2 if len(owed) else 0  # from this request on, the whole pass has saved time
    return {
        "name": name,
        "options": ways()[name],
        **figures_of(workload.after(first), base[0].answers[first:], taken.answers[first:], taken.served[first:], seed),
        "bound": None if chosen is None else chosen.bound,
        "limit": None if chosen is None else chosen.limit,
        "calibration_s": None if calibration is None else calibration.seconds,
        "latency_ms": percentiles(taken.ms[first:]),
        **_speedup(base, taken, first),
        "whole": _speedup(base, taken, 0),
        "paid_back_at": int(after) if calibration is not None and first < after <= len(saved) else None,
        "seconds": taken.seconds,
    }


def _speedup(base: Sequence[Pass], taken: Pass, first: int) -> dict[str, float]:
    """Return the speed-up over the passes of the model alone, for requests from `first` on."""
    alone, own = [_seconds(one, first) for one in base], _seconds(taken, first)
    return {
        "speedup": float(np.mean(alone)) / own,
        "speedup_min": min(alone) / own,
        "speedup_max": max(alone) / own,
    }


def _seconds(one: Pass, first: int) -> float:
    """Return the seconds for requests from `first` on, including the time to drain the queues."""
    return float(one.ms[first:].sum()) / 1e3 + one.drained_s


def conclude(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Summarise the rows with a cache in sentences, the default claim first."""
    default = CacheConfig.make(None).max_drop
    said = []
    for row in rows:
        options, changed = row["options"], f"{row['changed_answers']:.2%} of the answers changed"
        if "draft" in options:
            said.append(
                f"With ONNX Runtime and an int8 draft, at most {options['max_drop']:.1%} changed answers: "
                f"{row['hit_rate']:.0%} not computed, {row['speedup']:.2f} times as fast; {changed}."
            )
        elif options.get("max_drop") == default:
            said.append(
                f"By default at most {default:.1%} of all answers may change: after the learning phase "
                f"{row['hit_rate']:.0%} hits, {row['speedup']:.2f} times as fast; {changed}."
            )
        elif "tau" in options:
            said.append(
                f"tau {options['tau']} is the paper's threshold and carries no bound: {row['hit_rate']:.0%} hits, "
                f"{row['speedup']:.2f} times as fast; {changed}."
            )
        if row["bound"] is not None and row["changed_answers"] > row["bound"]:
            said.append(f"{row['name']}: {changed}, more than its bound, which holds with a probability of 95 %.")
    return said


_TEXTS: Mapping[str, list[str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SYSTEM, QUESTIONS = "\n".join(_TEXTS["system"]), tuple(_TEXTS["questions"])
MAX_NEW_TOKENS = 12


def run_shared_prompt(loaded: Loaded) -> dict[str, Any]:
    """Put every question to the model, without and with the cache; `speedup` covers the users after the first."""
    prompts = PromptCache(loaded.tokenizer)
    system = {"role": "system", "content": SYSTEM}
    chats = [[system, {"role": "user", "content": question}] for question in QUESTIONS]
    asked = [torch.tensor([prompts.encode(chat).ids]) for chat in chats]
    generate(loaded.model, asked[0][:, :16], Sampling(max_new_tokens=2))  # the first call allocates memory
    before = _answers(loaded, asked)
    with LLMCache.wrap(loaded.model, tokenizer=loaded.tokenizer):
        cached = _answers(loaded, asked)
    plain = list(zip(before, _answers(loaded, asked), strict=True))
    users = [
        {
            "question": question,
            "answer": loaded.tokenizer.decode(with_cache.tokens, skip_special_tokens=True).strip(),
            "n_prompt": with_cache.n_prompt,
            "n_prefix": with_cache.n_prefix,
            "plain_ms": sum(map(_ttft_ms, without)) / len(without),
            "cache_ms": _ttft_ms(with_cache),
            "is_same": all(one.tokens == with_cache.tokens for one in without),
        }
        for question, without, with_cache in zip(QUESTIONS, plain, cached, strict=True)
    ]
    later = users[1:]
    return {
        "users": users,
        "speedup": sum(user["plain_ms"] for user in later) / sum(user["cache_ms"] for user in later),
        "n_same": sum(user["is_same"] for user in users),
    }


def _answers(loaded: Loaded, asked: list[Tensor]) -> list[Generation]:
    return [generate(loaded.model, ids, Sampling(max_new_tokens=MAX_NEW_TOKENS)) for ids in asked]


def _ttft_ms(generation: Generation) -> float:
    assert generation.times is not None
    return generation.times.ttft_s * 1e3
