"""Task `wikitext`: the next token, at each position of windows of text.

Two streams: the windows of the test text in order, without repeats; and a stream in which earlier windows come back
whole, as a prefix that continues differently, or with some tokens changed.

Sizes: N windows, T tokens of a window.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

from experiments.data.made import make_lines
from experiments.data.published import UNK, read_wikitext, unk_rate
from experiments.models.loading import Loaded, check_length, load
from experiments.support.files import Folders
from experiments.support.section import Section
from experiments.tasks.workload import OfficialSettings, Request, Workload
from llmcache import ConfigError


@dataclass(frozen=True, slots=True)
class Read:
    tokens: NDArray[np.int64]  # most likely next token at each position but the last, (T - 1,)
    nll: NDArray[np.float64]  # negative log likelihood of the true next tokens, in nats, (T - 1,)


class Repeats(Section):
    """How often earlier windows come back, as shares of all requests; the rest are new."""

    whole: float = Field(default=0.2, ge=0.0, le=1.0)  # the same window
    prefix: float = Field(default=0.1, ge=0.0, le=1.0)  # its first half, followed by new text
    # The same window with some tokens replaced by others of the text.
    changed: float = Field(default=0.2, ge=0.0, le=1.0)
    share_replaced: float = Field(default=0.1, ge=0.0, le=1.0)  # of the tokens, in a changed window
    seed: int = Field(default=0, ge=0)  # of the draws

    def check(self) -> None:
        if round(self.whole + self.prefix + self.changed, 9) > 1:
            raise ValueError("whole, prefix and changed are shares of all requests: their sum is at most 1")


class Settings(OfficialSettings):
    name: Literal["wikitext"]
    window: int = Field(default=128, ge=4)  # tokens of a window
    repeats: Repeats | None = None  # bring earlier windows back; None: the text in order

    @property
    def title(self) -> str:
        return "wikitext" if self.repeats is None else "wikitext-repeats"

    def build(self, folders: Folders, seed: int) -> "WikiText":
        lines = make_lines(seed) if self.data == "made" else read_wikitext("test", folders.data)
        loaded = load(self.model, "token", folders.models)
        loaded.model.config.use_cache = False  # a window is read once, so its K/V would never be used
        check_length(loaded, self.window)
        return WikiText(loaded, lines, self.window, self.limit, self.repeats)


class WikiText(Workload):
    """Language modelling with a causal model, window by window, no context carried over."""

    def __init__(
        self, loaded: Loaded, lines: Sequence[str], window: int, limit: int | None, repeats: Repeats | None
    ) -> None:
        """Cut the text into windows and keep the first `limit`; without `repeats`, the text in order."""
        self.module = loaded.model
        self.tokenizer = loaded.tokenizer
        text = "\n".join(lines)
        ids = np.array(loaded.tokenizer(text, verbose=False)["input_ids"], dtype=np.int64)
        fresh = ids[: len(ids) // window * window].reshape(-1, window)
        if not len(fresh):
            raise ConfigError(f"wikitext: the text has {len(ids)} tokens, which is less than one window of {window}")
        n = min(limit or len(fresh), len(fresh))
        windows, kinds, sources = fresh[:n], ["new"] * n, list(range(n))
        if repeats is not None:
            windows, kinds, sources = repeat(fresh, repeats, n)
        self._words_per_token = len(text.split()) / len(ids)
        # A tokenizer without such a token splits it into ordinary tokens.
        self._unk = loaded.tokenizer.get_vocab().get(UNK, -1)
        told = zip(windows, kinds, sources, strict=True)
        self.requests = [self._encode(i, *window) for i, window in enumerate(told)]
        self.facts = {
            "unk_rate": unk_rate(list(lines)),
            "words_per_token": self._words_per_token,
            "shares": {kind: kinds.count(kind) / len(kinds) for kind in sorted(set(kinds))},
        }

    def _encode(self, number: int, row: NDArray[np.int64], kind: str, source: int) -> Request:
        ids = torch.from_numpy(row.copy())[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return Request(f"{number}-{kind}", inputs, self.tokenizer.decode(row), row, f"window {source}")

    def answer(self, output: Any, number: int) -> Read:
        """Return the most likely tokens, and the likelihood of this request's own tokens under the output."""
        logits = output.logits[0, :-1].float()
        right = torch.from_numpy(self.requests[number].reference[1:])
        nll = nn.functional.cross_entropy(logits, right, reduction="none")
        return Read(logits.argmax(dim=-1).numpy(), nll.double().numpy())

    def borrowed(self, answer: Read) -> Read:
        """Return the same tokens; the likelihood of this request's own tokens is unknown."""
        return Read(answer.tokens, np.full_like(answer.nll, np.nan))

    def is_changed(self, one: Read, other: Read) -> bool:
        return not np.array_equal(one.tokens, other.tokens)

    def scores(self, answers: Sequence[Read]) -> NDArray[np.float64]:
        """Return the share of next tokens predicted correctly; `<unk>` targets are left out."""
        return np.array([self._share_right(told, i) for i, told in enumerate(answers)])

    def extras(self, answers: Sequence[Read]) -> dict[str, float | None]:
        """Return perplexity per token and per white-space separated word, no `<unk>` targets; None without targets."""
        nll = np.concatenate([told.nll[self._counts(i)] for i, told in enumerate(answers)])
        if not nll.size or np.isnan(nll).any():
            return {"perplexity": None, "word_perplexity": None}
        mean = float(nll.mean())
        return {"perplexity": math.exp(mean), "word_perplexity": math.exp(min(700.0, mean / self._words_per_token))}

    def show(self, answer: Read) -> str:
        """Format the mean negative log likelihood per token; "" if unknown."""
        mean = float(answer.nll.mean())
        return "" if math.isnan(mean) else f"{mean:.4f}"

    def _share_right(self, told: Read, number: int) -> float:
        right = (told.tokens == self.requests[number].reference[1:])[self._counts(number)]
        return float(right.mean()) if right.size else 0.0

    def _counts(self, number: int) -> NDArray[np.bool_]:
        counts: NDArray[np.bool_] = self.requests[number].reference[1:] != self._unk
        return counts


def repeat(fresh: NDArray[np.int64], repeats: Repeats, n: int) -> tuple[NDArray[np.int64], list[str], list[int]]:
    """Return `n` windows drawn from (M, T), their kinds and their sources. A longer stream begins with the shorter."""
    rng = random.Random(repeats.seed)
    shares = (repeats.whole, repeats.prefix, repeats.changed)
    rows: list[NDArray[np.int64]] = []
    kinds: list[str] = []
    sources: list[int] = []
    unused = iter(fresh)
    for number in range(n):
        kind = rng.choices(("whole", "prefix", "changed", "new"), (*shares, max(0.0, 1 - sum(shares))))[0]
        kinds.append(kind if rows else "new")
        earlier = None if kinds[-1] == "new" else rng.randrange(len(rows))
        row = next(unused) if earlier is None else rows[earlier].copy()
        if kinds[-1] == "prefix":
            half = len(row) // 2
            row[half:] = next(unused)[half:]
        elif kinds[-1] == "changed":
            _replace(row, fresh.ravel(), repeats.share_replaced, rng)
        rows.append(row)
        sources.append(number if earlier is None else sources[earlier])
    return np.stack(rows), kinds, sources


def _replace(row: NDArray[np.int64], text: NDArray[np.int64], share: float, rng: random.Random) -> None:
    """Replace a share of the tokens, at least one, by tokens drawn by their frequency in the text."""
    for place in rng.sample(range(len(row)), max(1, round(share * len(row)))):
        row[place] = rng.choice(text[text != row[place]])
