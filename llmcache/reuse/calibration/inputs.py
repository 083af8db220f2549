"""The requests and labels of a calibration, checked before the model computes any.

Sizes: N rows of all requests together, T tokens, C classes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.errors import CalibrationError, ConfigError
from llmcache.models.adapters import Trunk, device_of
from llmcache.reuse.answers import Answers

Requests = Iterable[Mapping[str, Any] | str]

_POSITION_TABLES = ("position_embeddings", "wpe", "embed_positions")
_BATCH = 32  # texts in a call
_NO_LENGTH = 10**9  # tokenizers without a longest length report some huge one


class Tokenised(dict[str, Tensor]):
    """Inputs that `tokenised` made of one text: they may be computed in a batch."""


def batches(inputs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[int], Mapping[str, Any]]]:
    """Batch requests: texts with the same number of tokens together, others as given.

    Yields:
        The numbers of the requests, ascending, and their inputs; no row is padded.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, request in enumerate(inputs):
        is_text = isinstance(request, Tokenised)
        kind = tuple((name, tuple(tensor.shape)) for name, tensor in request.items()) if is_text else (number,)
        alike.setdefault(kind, []).append(number)
    for numbers in alike.values():
        for first in range(0, len(numbers), _BATCH):
            some = numbers[first : first + _BATCH]
            if len(some) == 1:
                yield some, inputs[some[0]]
            else:
                yield some, {name: torch.cat([inputs[number][name] for number in some]) for name in inputs[some[0]]}


def tokenised(requests: Requests, tokenizer: Any, trunk: Trunk) -> Iterator[Mapping[str, Any]]:
    """Yield the model's inputs for each request; refuse a request that the model cannot take."""
    if isinstance(requests, str | bytes | Mapping) or not isinstance(requests, Iterable):
        raise CalibrationError(f"requests: give a list of tokenised inputs or of texts (got {type(requests).__name__})")
    most, most_of_text = longest_input(trunk) if _has_position_table(trunk) else None, longest_input(trunk, tokenizer)
    cut = {} if most_of_text is None else {"truncation": True, "max_length": most_of_text}
    for number, request in enumerate(requests):
        if isinstance(request, Mapping):
            inputs, longest = request, most
        elif not isinstance(request, str):
            raise CalibrationError(f"request {number} is a {type(request).__name__}: give tokenised inputs or a text")
        elif tokenizer is None:
            raise CalibrationError("texts need the tokenizer: give it to wrap(), or give tokenised inputs")
        elif not request.strip():
            raise CalibrationError(f"request {number} is a blank text ({request!r}): leave it out")
        else:
            made = tokenizer(request, return_tensors="pt", **cut)
            inputs = Tokenised((name, tensor.to(device_of(trunk.module))) for name, tensor in made.items())
            longest = None  # cut, as in `encoded`
        _check_ids(number, inputs, longest, getattr(trunk.config, "vocab_size", None))
        yield inputs


def is_text(given: Any) -> bool:
    """Whether an argument is a text or a list of texts."""
    return isinstance(given, str) or (
        isinstance(given, list) and bool(given) and all(isinstance(t, str) for t in given)
    )


def encoded(texts: str | list[str], tokenizer: Any, trunk: Trunk) -> dict[str, Tensor]:
    """Return the model's inputs for texts: padded to the longest, and cut at the most tokens that the model takes.

    Raises:
        ConfigError: There is no tokenizer.
    """
    if tokenizer is None:
        raise ConfigError(
            "a text needs the tokenizer: give it to wrap(), tokenizer=..., or call the cache with tokenised inputs, "
            "cache(**tokenizer(text, return_tensors='pt'))"
        )
    longest = longest_input(trunk, tokenizer)
    made = tokenizer(
        [texts] if isinstance(texts, str) else texts,
        return_tensors="pt",
        padding=not isinstance(texts, str),
        truncation=longest is not None,
        max_length=longest,
    )
    return {name: tensor.to(device_of(trunk.module)) for name, tensor in made.items()}


def prompts_of(given: Any, tokenizer: Any) -> list[list[int]]:
    """Return token ids of prompts: of a text, token ids, messages for the chat template, or a list of these.

    Raises:
        ConfigError: There are no tokens, or no tokenizer for a text or messages.
    """
    given = given.tolist() if isinstance(given, Tensor) else given
    is_one = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int | Mapping))
    return [_ids_of_prompt(one, tokenizer) for one in ([given] if is_one else given)]


def _ids_of_prompt(prompt: Any, tokenizer: Any) -> list[int]:
    prompt = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if len(prompt) == 0:
        raise ConfigError("a prompt is empty: give at least one token")
    if isinstance(prompt[0], int):
        return [int(token) for token in prompt]
    if tokenizer is None:
        raise ConfigError("a text or a chat needs the tokenizer: give it to wrap(), tokenizer=..., or give token ids")
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(tokenizer.apply_chat_template(list(prompt), tokenize=True, return_dict=False))


def _check_ids(number: int, inputs: Mapping[str, Any], longest: int | None, n_words: int | None) -> None:
    """Refuse token ids that the model cannot take, and inputs without token ids."""
    ids = inputs.get("input_ids")
    if ids is None:
        raise CalibrationError(f"request {number} has no input_ids, which its key is made of: give them")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
        got = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise CalibrationError(
            f"request {number}: input_ids must be a tensor (rows, tokens) that is not empty, as "
            f"tokenizer(text, return_tensors='pt') makes it (got {got})"
        )
    if longest is not None and ids.shape[1] > longest:
        raise CalibrationError(
            f"request {number} has {ids.shape[1]} tokens, and model or tokenizer take {longest}: shorten it, or "
            f"tokenise with truncation=True, max_length={longest}, as in service"
        )
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or (n_words is not None and most >= n_words):
        end = "" if n_words is None else f" to {n_words - 1}"
        raise CalibrationError(
            f"request {number}: token id {least if least < 0 else most} is not in the model's vocabulary, 0{end}: "
            "tokenise with the model's own tokenizer"
        )


def longest_input(trunk: Trunk, tokenizer: Any = None) -> int | None:
    """Return the most tokens that a model takes, None if neither its config nor its tokenizer says."""
    positions = getattr(trunk.config, "max_position_embeddings", None)
    # RoBERTa's positions begin after its padding id.
    before = getattr(getattr(trunk.module, "embeddings", None), "padding_idx", None)
    given = (
        positions and positions - (0 if before is None else before + 1),
        getattr(tokenizer, "model_max_length", None),
    )
    return min((length for length in given if length and length < _NO_LENGTH), default=None)


def _has_position_table(trunk: Trunk) -> bool:
    """Whether positions come from a table, and so end with its last row; computed positions have no end."""
    names = (name for name, module in trunk.module.named_modules() if isinstance(module, nn.Embedding))
    return any(name.rpartition(".")[2] in _POSITION_TABLES for name in names)


def n_rows(inputs: Mapping[str, Any]) -> int:
    return len(inputs["input_ids"])


def numbered(labels: Iterable[Any] | None, n: int, model: Any) -> list[Any]:
    """Return a label for each of `n` rows, None if none are given; class names become numbers by the model's config."""
    if labels is None:
        return [None] * n
    given = list(labels)
    if len(given) != n:
        raise CalibrationError(f"{len(given)} labels for {n} requests: give one each")
    numbers = getattr(getattr(model, "config", None), "label2id", None) or {}
    return [numbers.get(label, label) if isinstance(label, str) else label for label in given]


def check_labels(labels: Sequence[Any], n_classes: int, answers: Answers) -> None:
    """Refuse labels (N,) that are not classes of the head, and models that do not answer with a class."""
    if answers.name != "class":
        raise CalibrationError(
            f"metric 'accuracy' compares classes, and this model answers with kind {answers.name!r}: give a Metric"
        )
    known = range(n_classes)
    if strange := [number for number, label in enumerate(labels) if label not in known]:
        names = sorted({repr(labels[number]) for number in strange})
        raise CalibrationError(
            f"labels that the head does not know: {', '.join(names[:5])} (the first is that of row {strange[0]}); it "
            f"answers with classes 0 to {known[-1]}: give their numbers, or their names in the model's config"
        )
