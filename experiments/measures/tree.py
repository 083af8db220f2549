"""Measure `tree`: how many token columns a decoder computes for calls that share beginnings, and how long it takes.

| column | what it counts |
|---|---|
| `plain` | columns of a layer without a cache, padding included, decode steps left out |
| `cached` | the same, wrapped: a new cache in each round |
| `ideal` | different beginnings among the tokens of a case's prompts, each token computed once; one for a repeat |

Prompts are random tokens, since neither columns nor times depend on their content. A round makes the calls of a case
without a cache, and in a new cache, in alternating order. Times are CPU seconds on a CPU, on a GPU by CUDA events.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from experiments.measures.base import Experiment, Outcome
from experiments.measures.bench.latency import BANKS
from experiments.measures.columns import columns_of
from experiments.models.architectures import build
from experiments.models.loading import find
from experiments.support.clock import HOST, Clock, Made
from experiments.support.files import Folders
from llmcache import LLMCache
from llmcache.lab import quiet

Ids = tuple[int, ...]
_FIRST_ID = 100  # ids below may be special


class TreeExperiment(Experiment):
    model: str = Field(min_length=1)  # a causal model: an architecture of the benchmark, a prepared one, or a folder
    rounds: int = Field(default=3, ge=1)
    scale: float = Field(default=1.0, gt=0)  # of all lengths
    cases: tuple[str, ...] = ()  # names of cases; empty: all
    device: str = "cpu"  # torch device
    kept_on: Literal["host", "device"] = "host"  # where K/V is kept; the same on a CPU


@dataclass(frozen=True, slots=True)
class Call:
    """One call: prompts, and how they are asked."""

    rows: Sequence[Ids]
    left: bool = True  # padding on the left
    positions: bool = False  # pass position ids
    n_new: int = 0  # tokens to generate; 0: a forward
    embeds: bool = False  # as sentence-transformers do: one vector a text
    more: Mapping[str, Any] | None = None  # arguments


Case = Callable[["Tokens"], list[Call]]


class Tokens:
    """Draws random tokens."""

    def __init__(self, vocabulary: int, scale: float, seed: int) -> None:
        self._random, self._most, self._scale = random.Random(seed), vocabulary - 1, scale

    def draw(self, n: int, most: int | None = None) -> Ids:
        """Return `n` tokens, or from `n` to `most`, scaled."""
        length = n if most is None else self._random.randint(n, most)
        first = min(_FIRST_ID, self._most // 2)
        return tuple(self._random.randint(first, self._most) for _ in range(max(1, round(length * self._scale))))


def _one_by_one(draw: Tokens) -> list[Call]:
    system = draw.draw(313)
    return [Call([system + draw.draw(10, 18)]) for _ in range(20)]


def _generated(draw: Tokens) -> list[Call]:
    system = draw.draw(313)
    return [Call([system + draw.draw(10, 27) for _ in range(8)], n_new=1) for _ in range(2)]


def _equal(draw: Tokens) -> list[Call]:
    return [Call([draw.draw(500)] * 8)]


def _cold(draw: Tokens, **how: Any) -> list[Call]:
    shared = draw.draw(300)
    return [Call([shared + draw.draw(20) for _ in range(16)], more=how or None)]


def _mixed(draw: Tokens) -> list[Call]:
    known = [draw.draw(280) for _ in range(3)]
    return [*(Call([one]) for one in known), Call([*(one + draw.draw(20) for one in known), draw.draw(300)])]


def _depths(draw: Tokens) -> list[Call]:
    deep, shallow = draw.draw(200), draw.draw(100)
    return [Call([deep]), Call([shallow]), Call([*(deep + draw.draw(100) for _ in range(3)), shallow + draw.draw(200)])]


def _sampled(draw: Tokens) -> list[Call]:
    return [Call([draw.draw(503)], n_new=1, more={"num_return_sequences": 8, "do_sample": True})]


def _beams(draw: Tokens) -> list[Call]:
    return [Call([draw.draw(503)], n_new=1, more={"num_beams": 4})]


def _reranked(draw: Tokens, n: int = 24, n_calls: int = 1, **how: Any) -> list[Call]:
    instruction, question = draw.draw(40), draw.draw(6)
    rows = [instruction + draw.draw(20, 120) + question for _ in range(n)]
    size = n // n_calls
    return [Call(rows[i : i + size], **how) for i in range(0, n, size)]


def _shots(draw: Tokens) -> list[Call]:
    shots, rows = draw.draw(400), []
    for _ in range(4):
        question = shots + draw.draw(40)
        rows += [question + draw.draw(3, 8) for _ in range(4)]
    return [Call(rows), Call(rows)]


def _embedded(draw: Tokens) -> list[Call]:
    instruction = draw.draw(200)
    rows = [instruction + draw.draw(8, 60) for _ in range(24)]
    return [Call(rows, embeds=True), Call(rows[::-1], embeds=True)]


def _block(draw: Tokens) -> list[Call]:
    known = tuple(draw.draw(16) * 16)[:16]  # a block, whatever the scale
    return [Call([known + draw.draw(8)]), Call([known])]


CASES: Mapping[str, Case] = {
    "one system prompt of 313 tokens, 20 questions one after the other": _one_by_one,
    "the same, two batches of 8 in a left-padded generate": _generated,
    "16 rows, 300 shared and 20 own": _cold,
    "the same, without K/V": lambda draw: _cold(draw, use_cache=False),
    "3 rows with a known beginning, 1 wholly new": _mixed,
    "3 rows with 200 known tokens, 1 with 100": _depths,
    "8 equal rows of 500": _equal,
    "num_return_sequences=8": _sampled,
    "num_beams=4": _beams,
    "five-shot, 4 questions of 4 choices, twice": _shots,
    "24 documents, left-padded, all logits": _reranked,
    "24 documents, right-padded, all logits": lambda draw: _reranked(draw, left=False),
    "50 documents, left-padded, all logits": lambda draw: _reranked(draw, 50),
    "50 documents, positions, logits_to_keep=1": lambda draw: _reranked(
        draw, 50, positions=True, more={"logits_to_keep": 1}
    ),
    "50 documents, one a call": lambda draw: _reranked(draw, 50, 50),
    "24 texts embedded after an instruction of 200; again, reversed": _embedded,
    "16 known tokens, block of 16": _block,
    "nothing shared, 8 rows of 200": lambda draw: [Call([draw.draw(200) for _ in range(8)])],
}


def run(experiment: TreeExperiment, folders: Folders) -> Outcome:
    model = build(find(experiment.model, folders.models), experiment.seed, experiment.device, head="token").model
    model.config.use_cache = True
    names = experiment.cases or tuple(CASES)
    rows = [row for name in names for row in _rounds(experiment, model, name)]
    summary = []
    for name in names:
        own = [row for row in rows if row["case"] == name]
        first = {key: own[0][key] for key in ("case", "plain", "cached", "ideal")}
        ratios = [row["plain_s"] / row["cached_s"] for row in own]
        times = {f"{way}_s": median(row[f"{way}_s"] for row in own) for way in ("plain", "cached")}
        largest = {"max_diff": max(row["max_diff"] for row in own), "scale": max(row["scale"] for row in own)}
        summary.append(
            {**first, **times, "cpu_ratio": median(ratios), **largest, "same": all(row["same"] for row in own)}
        )
    return Outcome(rows, {"summary": summary, "threads": torch.get_num_threads()})


def _embedder(model: Any) -> Any:
    """Return a sentence-transformers model of the mean of the trunk's states, where token 5 is written `5`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0} | {str(token): token for token in range(1, model.config.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with TemporaryDirectory() as place, quiet():
        model.base_model.save_pretrained(place)
        PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>").save_pretrained(place)
        parts = [Transformer(place, model_kwargs={"dtype": model.dtype}), Pooling(model.config.hidden_size, "mean")]
        return SentenceTransformer(modules=parts, device=str(model.device)).eval()


def _rounds(experiment: TreeExperiment, model: Any, name: str) -> Iterator[dict[str, Any]]:
    asked = _embedder(model) if CASES[name] is _embedded else model
    for number in range(experiment.rounds):
        calls = CASES[name](Tokens(model.config.vocab_size, experiment.scale, experiment.seed + number))
        found: dict[bool, tuple[int, float, list[Tensor]]] = {}
        for is_cached in (False, True) if number % 2 == 0 else (True, False):
            found[is_cached] = _make(asked, calls, BANKS[experiment.kept_on] if is_cached else None)
        plain, cached = found[False], found[True]
        pairs = [(one.float(), other.float()) for one, other in zip(plain[2], cached[2], strict=True)]
        yield {
            "case": name,
            "round": number,
            "plain": plain[0],
            "cached": cached[0],
            "ideal": _ideal(calls),
            "plain_s": plain[1],
            "cached_s": cached[1],
            "max_diff": max(float((one - other).abs().max()) for one, other in pairs),
            "scale": max(float(one.abs().max()) for one, _ in pairs),
            "same": all(torch.equal(one.argmax(-1), other.argmax(-1)) for one, other in pairs),
        }


def _make(model: Any, calls: Sequence[Call], kept_on: str | None) -> tuple[int, float, list[Tensor]]:
    """Make calls, with a cache on `kept_on` if that is given.

    Return columns, seconds, and `_answers` of each call.
    """
    answers, seconds = list[Tensor](), 0.0
    with columns_of(model) as columns, torch.inference_mode():
        # Wrapped once columns are counted: a layer's forward that is replaced later is an edit, and tried again.
        cache = None if kept_on is None else LLMCache.wrap(model, auto_bypass=False, device=kept_on)
        for call in calls:
            inputs = {name: value.to(model.device) for name, value in _inputs(call).items()}
            more = {**inputs, **(call.more or {})}
            if call.embeds:
                asked = partial(model.encode, [" ".join(map(str, row)) for row in call.rows], convert_to_tensor=True)
            elif call.n_new:
                asked = partial(model.generate, max_new_tokens=call.n_new, pad_token_id=0, **more)
            else:
                asked = partial(model, **more)
            torch.manual_seed(0)
            spent, made = _timed(Clock(model.device), asked)
            seconds += spent
            answers.append(_answers(call, inputs["attention_mask"], made, model))
    if cache is not None:
        if cache.stats().errors:
            raise RuntimeError(f"the cache failed: {cache.stats().health}")
        cache.unwrap()
    return columns[0], seconds, answers


def _answers(call: Call, mask: Tensor, made: Any, model: Any) -> Tensor:
    """Return the logits of each row's last token, the new ids as one-hot rows, or the vectors."""
    if call.embeds:
        return cast(Tensor, made)
    if call.n_new:
        return torch.nn.functional.one_hot(made, model.config.vocab_size)
    logits: Tensor = made.logits
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    return logits[range(len(last)), last - (mask.shape[1] - logits.shape[1])].clone()


def _timed(clock: Clock, call: Callable[[], Made]) -> tuple[float, Made]:
    """Return the seconds of a call, and what it returned."""
    if clock.name != HOST:
        spent, made = clock.time(call)
        return spent.ms / 1e3, made
    begun = process_time()
    made = call()
    return process_time() - begun, made


def _inputs(call: Call) -> dict[str, Tensor]:
    n_tokens = max(map(len, call.rows))
    ids = torch.zeros(len(call.rows), n_tokens, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(call.rows):
        where = slice(n_tokens - len(row), n_tokens) if call.left else slice(0, len(row))
        ids[number, where], mask[number, where] = torch.tensor(row), 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    return {**inputs, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if call.positions else inputs


def _ideal(calls: Sequence[Call]) -> int:
    """Return the number of different beginnings of all prompts; one for a prompt that only began others."""
    seen, whole, n = set[Ids](), set[Ids](), 0
    for call in calls:
        n_before = n
        known = set(seen)
        for row in call.rows:
            new = {row[:end] for end in range(1, len(row) + 1)} - seen
            n += len(new)
            seen |= new
        n += n == n_before and any(row in known and row not in whole for row in call.rows)
        whole.update(call.rows)
    return n
