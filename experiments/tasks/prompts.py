"""Task `prompts`: a stream of prompts to continue; the answer is the model's first token.

No answer is right or wrong: measured is whether the token stays the same, and when it is ready.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import torch

from experiments.data.made import make_lines
from experiments.data.published import read_wikitext
from experiments.data.source import find_file
from experiments.data.streams.prompts import Pieces, Prompt, StreamSettings, known_tokens, make_stream
from experiments.models.architectures import ARCHITECTURES, Dtype, random_model
from experiments.models.loading import Loaded, check_length, find, load
from experiments.support.files import Folders
from experiments.tasks.workload import Answer, OfficialSettings, Request, Workload
from llmcache import ConfigError
from llmcache.lab import asking, cause

TOKENIZER = ("tokenizers/gpt2/vocab.json", "tokenizers/gpt2/merges.txt")  # files in the data folder


class Settings(OfficialSettings):
    """Settings of the task; the model is a causal language model.

    It may be a key of `ARCHITECTURES` without a folder among the models: then that architecture with random weights,
    and GPT-2's tokenizer.
    """

    makers: ClassVar[Any] = {"stream": make_stream}
    name: Literal["prompts"]
    stream: Any  # settings of the stream; its `name` is a key of `experiments.data.streams.prompts.STREAMS`
    dtype: Dtype = "float32"  # of weights and states

    @property
    def title(self) -> str:
        known: StreamSettings = self.stream
        return known.name

    def build(self, folders: Folders, seed: int) -> "Prompts":
        source = find(self.model, folders.models)
        is_random = source in ARCHITECTURES
        if is_random:
            loaded = Loaded(random_model(source, seed, "token"), _gpt2_tokenizer(folders))
        else:
            loaded = load(self.model, "token", folders.models)
        loaded.model.to(getattr(torch, self.dtype))
        lines = make_lines(seed) if self.data == "made" else read_wikitext("test", folders.data)
        ids = loaded.tokenizer("\n".join(lines), add_special_tokens=False, verbose=False)["input_ids"]
        prompts = self.stream.draw(Pieces(ids, seed), folders, seed)
        return Prompts(loaded, prompts[: self.limit], "random" if is_random else Path(source).name)


def of(settings: Any, folders: Folders, seed: int) -> "Prompts":
    """Build the workload of an experiment that requires this task."""
    if not isinstance(settings, Settings):
        raise ConfigError(f"task.name: this measure asks prompts; give the task prompts (got {settings.name!r})")
    return settings.build(folders, seed)


def _gpt2_tokenizer(folders: Folders) -> Any:
    import transformers

    if folders.data is not None:
        vocabulary, merges = (str(find_file(folders.data, name)) for name in TOKENIZER)
        return transformers.GPT2Tokenizer(vocab=vocabulary, merges=merges)
    try:
        with asking("gpt2"):
            return transformers.AutoTokenizer.from_pretrained("gpt2")  # GPT2Tokenizer would make an empty one
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data: GPT-2's tokenizer could not be loaded from the hub ({cause(error)}); "
            f"give a folder that holds {' and '.join(TOKENIZER)} with --data-dir or LLMCACHE_DATA"
        ) from error


class Prompts(Workload):
    """Prefill, prompt by prompt, each with its own K/V cache."""

    metric = "none"

    def __init__(self, loaded: Loaded, prompts: Sequence[Prompt], weights: str) -> None:
        """Use the given prompts; `weights` is `random` for an untrained model."""
        check_length(loaded, max(map(len, prompts)))
        self.module = loaded.model
        self.module.config.use_cache = True  # K/V is needed to continue a prompt
        self.tokenizer = loaded.tokenizer
        self.known = known_tokens(prompts)  # for each prompt, in whole blocks
        self.requests = [self._request(number, prompt) for number, prompt in enumerate(prompts)]
        n_tokens = sum(map(len, prompts))
        share = sum(self.known) / n_tokens
        self.facts = {
            "weights": weights,
            "n_tokens": n_tokens,
            "n_longest": max(map(len, prompts)),
            "share_known": share,
            "ceiling": 1 / (1 - share),
        }

    def _request(self, number: int, prompt: Prompt) -> Request:
        # Generation needs only the last position's logits.
        inputs = {"input_ids": torch.tensor([prompt]), "logits_to_keep": torch.tensor([-1])}
        return Request(str(number), inputs, self.tokenizer.decode(prompt), None)

    def answer(self, output: Any, number: int) -> int:
        return int(output.logits[0, -1].argmax())

    def scores(self, answers: Sequence[Answer]) -> NoReturn:
        raise ConfigError("task.name: prompts have no right answers; take a measure that needs none: prefix, parity")
