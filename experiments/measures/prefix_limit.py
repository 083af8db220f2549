"""Measure `prefix_limit`: time to first token with a share of the prompt known, beside the least possible time.

| way | what it does with a prompt |
|---|---|
| `plain` | computes all of it |
| `llmcache` | computes what its blocks do not serve, and stores that |
| `limit` | computes the rest on a ready `DynamicCache` of the known tokens, without lookup or copying |
| `batching` | transformers' continuous batching with prefix sharing, one request at a time; None if it fails |

In each round, every way gets a new prompt, in rotating order. `copy_ms` is the time to copy the ready cache; the limit
does not include it. Prompts are random tokens, since time does not depend on their content.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from experiments.measures.base import Experiment, Outcome
from experiments.measures.bench.latency import BANKS
from experiments.measures.harness import interleaved
from experiments.metrics.metrics import percentiles
from experiments.models.architectures import Requests, build, check
from experiments.models.loading import find
from experiments.support.clock import Clock
from experiments.support.files import Folders
from experiments.support.section import ONE_OR_MORE
from llmcache import LLMCache
from llmcache.lab import CACHE, PrefixOptions

BLOCK = PrefixOptions().block
MAX_BYTES = 4_000_000_000
#: It needs room for one token more than the prompt, which some models lack.
NO_TOKEN = "continuous batching returned no token"

#: Names of the timed ways, by the prefix of their figures.
WAYS = {"plain": "plain", "cache": "llmcache", "limit": "limit", "batching": "batching", "copy": "copy"}

#: Ids (1, T) -> first token, None if there is none, and its logits (V,), if available.
Way = Callable[[Tensor], tuple[int | None, Tensor | None]]


class PrefixLimit(Experiment):
    # Causal models: architectures of the benchmark with random weights, prepared models, or folders.
    models: tuple[str, ...] = Field(min_length=1)
    lengths: Annotated[tuple[PositiveInt, ...], ONE_OR_MORE] = Field(default=(512, 2048), min_length=1)
    shares: Annotated[tuple[float, ...], ONE_OR_MORE] = Field(default=(0.5, 0.75, 0.9, 0.97), min_length=1)
    rounds: int = Field(default=5, ge=1)  # prompts for each way, after one that is not counted
    batching: bool = True  # also measure transformers' continuous batching
    device: str = "cpu"  # torch device
    kept_on: Literal["host", "device"] = "host"  # where K/V is kept; the same on a CPU

    def check(self) -> None:
        for length in self.lengths:
            for share in self.shares:
                if not BLOCK <= n_known(length, share) < length:
                    raise ValueError(f"shares: {share} of {length} tokens are no whole blocks of {BLOCK}, or all of it")


def n_known(length: int, share: float) -> int:
    return int(length * share) // BLOCK * BLOCK


def run(experiment: PrefixLimit, folders: Folders) -> Outcome:
    rows = []
    for model in experiment.models:
        for length in experiment.lengths:
            name = find(model, folders.models)
            try:
                check(name, length, head="token")
            except ValueError as error:
                rows.append(_row(model, length, None) | {"not_run": str(error)})
                continue
            module = build(name, experiment.seed, experiment.device, head="token").model
            module.config.use_cache = True
            for share in experiment.shares:
                rows.append(_row(model, length, share) | _measure(experiment, module, length, share))
    shown = [{name: value for name, value in row.items() if name != "times"} for row in rows]
    return Outcome(shown, {"ways": rows, "summary": shown, "threads": torch.get_num_threads()})


def _row(model: str, length: int, share: float | None) -> dict[str, Any]:
    empty = ("n_known", *(f"{name}_ms" for name in WAYS), "of_limit", "n_same", "max_diff")
    return {"model": model, "length": length, "share": share, **dict.fromkeys(empty), "not_run": ""}


def _measure(experiment: PrefixLimit, module: Any, length: int, share: float) -> dict[str, Any]:
    """Return the figures for one length and share; times in ms, `of_limit` is a median over rounds."""
    known = n_known(length, share)
    requests = Requests(module.config, 1, length, experiment.seed, experiment.device)
    first = requests.fresh()[:, :known].to(experiment.device)
    wrapped = copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})
    cache = LLMCache.wrap(wrapped, auto_bypass=False, max_bytes=MAX_BYTES, device=BANKS[experiment.kept_on])
    clock = Clock(experiment.device)
    prompts: list[Tensor] = []  # one a round
    copies: list[float] = []
    served: list[int] = []
    with torch.inference_mode(), _batching(module, length, experiment.batching) as (batching, trouble):
        ready = module(first, logits_to_keep=1)[CACHE]
        ways: dict[str, Way] = {
            "plain": lambda ids: _first(module(ids, logits_to_keep=1)),
            "llmcache": lambda ids: _first(wrapped(ids, logits_to_keep=1)),
            "limit": lambda ids: _first(module(ids[:, known:], **{CACHE: _hand(ready)}, logits_to_keep=1)),
            **({} if batching is None else {"batching": batching}),
        }

        def draw() -> Iterator[int]:
            for number in range(experiment.rounds + 1):  # the first round stores the shared prefix
                prompts.append(torch.cat([first, requests.fresh()[:, known:].to(first.device)], dim=1))
                yield number

        def call(way: str, number: int) -> tuple[float, Any]:
            spent, told = clock.time(partial(ways[way], prompts[number]))
            return spent.ms, told

        def end(made: object) -> None:
            copies.append(clock.time(partial(copy.deepcopy, ready))[0].ms)
            served.append(cache.last[0].n_prefix)

        rounds = {way: some[1:] for way, some in interleaved(list(ways), draw(), call, end=end).items()}
    cache.unwrap()
    if min(served[1:]) < known:
        raise RuntimeError(f"{min(served[1:])} of {known} known tokens were served")
    if any(token is None for _, (token, _) in rounds.get("batching", ())):
        trouble = NO_TOKEN
        del rounds["batching"]
    times = {way: [ms for ms, _ in some] for way, some in rounds.items()} | {"copy": copies[1:]}
    told = [[answer for _, answer in some] for some in zip(*rounds.values(), strict=True)]
    medians = {way: float(np.median(values)) for way, values in times.items()}
    return {
        "n_known": known,
        **{f"{name}_ms": medians.get(way) for name, way in WAYS.items()},
        "of_limit": float(np.median(np.array(times["limit"]) / np.array(times["llmcache"]))),
        "n_same": sum(len({token for token, _ in some}) == 1 for some in told),
        "max_diff": max(float((plain - cached).abs().max()) for (_, plain), (_, cached), *_ in told),
        "not_run": trouble,
        "times": {name: percentiles(values) for name, values in times.items()},
    }


def _first(output: Any) -> tuple[int, Tensor]:
    logits = output.logits[0, -1]
    return int(logits.argmax()), logits


def _hand(ready: Any) -> Any:
    """Return a cache over the tensors of another one. They stay unchanged: a cache grows by making new tensors."""
    handed = copy.copy(ready)
    handed.layers = [copy.copy(layer) for layer in ready.layers]
    return handed


@contextmanager
def _batching(module: Any, length: int, is_asked: bool) -> Iterator[tuple[Way | None, str]]:
    """Yield continuous batching on a copy of the model and "", or None and the reason it is unavailable."""
    if not is_asked:
        yield None, ""
        return
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # Page size as llmcache's block size, and room for eight prompts.
    options: Mapping[str, Any] = {
        "page_size": BLOCK,
        "num_blocks": 8 * (length // BLOCK + 2),
        "max_batch_tokens": length,
        "max_requests_per_batch": 1,
        "max_blocks_per_request": 0,
    }
    twin = copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})
    generation = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        manager = twin.init_continuous_batching(
            generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**options)
        )
        manager.start()
    except (ImportError, RuntimeError, ValueError, AttributeError, TypeError) as error:
        yield None, f"continuous batching: {error}"
        return

    new_tokens = [2]  # for the first prompt: blocks of a request that ends with its prefill are not shared

    def ask(ids: Tensor) -> tuple[int | None, None]:
        number = manager.add_request(ids[0].tolist(), max_new_tokens=new_tokens.pop() if new_tokens else 1)
        for result in manager.request_id_iter(number):
            if result.is_finished():
                return int(result.generated_tokens[0]), None
        return None, None

    try:
        yield ask, ""
    finally:
        manager.stop(block=True)
