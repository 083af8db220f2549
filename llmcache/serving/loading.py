"""Loads a model by name for serving: detects its kind and how to call it."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llmcache.errors import ConfigError
from llmcache.models.adapters import locate
from llmcache.models.loading import (
    MINILM,
    asking,
    cause,
    load_causal,
    load_pretrained,
    quiet,
    source_of,
)
from llmcache.reuse.answers import Reading, read_logits

logger = logging.getLogger("llmcache")

Kind = Literal["embedding", "classifier", "reranker", "decoder"]

#: Name of each kind in messages.
NAMES: Mapping[Kind, str] = {
    "embedding": "an embedding model",
    "classifier": "a classifier",
    "reranker": "a reranker",
    "decoder": "a causal language model",
}
_DTYPES = ("float32", "float16", "bfloat16")
_POOLINGS = ("mean", "cls", "last-token")  # as text-embeddings-inference names them
_AUTO = "auto"
#: Runs the model on padded rows.
Run = Callable[[dict[str, Tensor]], Tensor]

_SAMPLE = "Where is my CARD?"
_NO_LIMIT = 10**6  # tokens; a tokenizer without a configured maximum length reports more than this


def _not_supported(inputs: dict[str, Tensor]) -> Tensor:
    raise AssertionError("this kind of model does not support this call")


@dataclass(frozen=True, slots=True)
class Served:
    """A model in eval mode, with what the server needs to run it."""

    kind: Kind
    model: nn.Module  # of transformers or sentence-transformers
    tokenizer: Any
    max_length: int  # tokens of the longest input
    forward: Run = _not_supported  # inputs (B, T) to outputs (B, O); not for decoders
    states: Run = _not_supported  # inputs (B, T) to the last hidden states (B, T, D); embedding models only
    answer_of: Reading = read_logits  # finds the answer in the model's output
    labels: tuple[str, ...] = ()  # labels of a classifier, by index
    is_multi_label: bool = False  # labels are independent: any number may hold
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts to prepend to an input, by name
    default_prompt: str | None = None  # name of the prompt for inputs without one
    is_prompt_pooled: bool = True  # pooling includes the prompt's tokens
    dimensions: int | None = None  # default length of an embedding; None: all of the model's dimensions

    @property
    def answer(self) -> str:
        """The setting `answer` of its cache: a sentence-transformers classifier does not show that it is one."""
        return ("labels" if self.is_multi_label else "class") if self.kind == "classifier" else "auto"

    @property
    def config(self) -> Any:
        """Config of the transformers model inside."""
        return locate(self.model).config


def load_served(
    name: str,
    models_dir: Path | None = None,
    *,
    device: str = _AUTO,
    dtype: str | None = None,
    revision: str | None = None,
    pooling: str | None = None,
) -> Served:
    """Load a model by name: a folder (in `models_dir` first), `minilm` (packaged), or a hub name.

    The architecture in its config decides the kind: `...ForCausalLM` is a decoder, unless it is a
    sentence-transformers model; `...ForSequenceClassification` is a classifier, or a reranker if it has one label;
    others are embedding models. A sentence-transformers model that ends in a `Dense` with as many outputs as its config
    has labels is also a classifier.

    Options are those of `llmcache serve`; None leaves the model as it was saved and trained. `ConfigError` if the model
    cannot be loaded, cannot be served, or does not take them.
    """
    source = source_of(name, models_dir)
    if revision is not None and Path(source).is_dir():
        raise ConfigError(f"revision: {name!r} is a folder; only names on the hub have revisions")
    for option, value, known in (("dtype", dtype, _DTYPES), ("pooling", pooling, _POOLINGS)):
        if value not in (None, *known):
            raise ConfigError(f"{option}: {value!r} is not one of {', '.join(known)}")
    place = _device(device)
    at: dict[str, Any] = {} if revision is None else {"revision": revision}
    of_model: dict[str, Any] = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    config = _config(name, source, at)
    architecture = next(iter(config.architectures or ("",)))
    if architecture.endswith(("ForCausalLM", "LMHeadModel")) and _find(source, "modules.json", at) is None:
        served = _decoder(name, models_dir, at | of_model)
    elif architecture.endswith("ForSequenceClassification"):
        served = _classifier(name, source, config, at, of_model)
    else:
        served = _sentence_transformer(name, source, at, of_model, pooling)
    if pooling is not None and served.kind != "embedding":
        raise ConfigError(f"pooling: for embedding models; {name!r} is {NAMES[served.kind]}")
    served.model.to(place)
    return served


def _device(name: str) -> torch.device:
    """Return the device of this name after a tensor was put on it."""
    try:
        found = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == _AUTO else name)
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA asserts
        raise ConfigError(f"device: {name!r} cannot be used ({cause(error)}); give auto, cpu or cuda:0") from error
    return found


def _config(name: str, source: str, at: Mapping[str, Any]) -> Any:
    import transformers

    try:
        with quiet() if Path(source).is_dir() else asking(source):
            return transformers.AutoConfig.from_pretrained(source, **at)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: {name!r} could not be loaded ({cause(error)}); give {MINILM!r}, a folder with config.json, "
            "weights and tokenizer, or a hub name that can be reached"
        ) from error


def _find(source: str, file: str, at: Mapping[str, Any]) -> str | None:
    """Return the path of a model's file, or None if the model has no such file."""
    from transformers.utils.hub import cached_file

    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with quiet():
        found: str | None = cached_file(source, file, **quietly, **at)
    return found


def _saved_settings(name: str, source: str, at: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that sentence-transformers saved with a model, empty if there are none."""
    if (path := _find(source, "config_sentence_transformers.json", at)) is None:
        return {}
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model: {name!r} could not be loaded ({path} is not valid JSON)") from error
    return found


def _decoder(name: str, models_dir: Path | None, given: Mapping[str, Any]) -> Served:
    loaded = load_causal(name, models_dir, **given)
    positions = getattr(loaded.model.config, "max_position_embeddings", None) or _NO_LIMIT
    return Served("decoder", loaded.model, loaded.tokenizer, int(positions))


def _classifier(name: str, source: str, config: Any, at: Mapping[str, Any], of_model: Mapping[str, Any]) -> Served:
    loaded = load_pretrained(source, "AutoModelForSequenceClassification", "classifier", name=name, **at, **of_model)
    model: Any = loaded.model
    labels = tuple(config.id2label[i] for i in range(config.num_labels))
    saved = _saved_settings(name, source, at)  # settings of a CrossEncoder
    return Served(
        "reranker" if len(labels) == 1 else "classifier",
        model,
        loaded.tokenizer,
        _max_length(loaded.tokenizer, config),
        forward=lambda inputs: model(**inputs).logits,
        labels=labels,
        is_multi_label=config.problem_type == "multi_label_classification",
        prompts=saved.get("prompts") or {},
        default_prompt=saved.get("default_prompt_name"),
    )


def _sentence_transformer(
    name: str, source: str, at: Mapping[str, Any], of_model: dict[str, Any], pooling: str | None
) -> Served:
    """Load a model with sentence-transformers, which adds mean pooling to a plain transformers model."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ConfigError(f"model: {name!r} needs sentence-transformers: pip install 'llmcache-torch[serve]'") from None
    if (kind := _saved_settings(name, source, at).get("model_type", "SentenceTransformer")) != "SentenceTransformer":
        raise ConfigError(f"model: {name!r} is a {kind} of sentence-transformers; give a SentenceTransformer")
    try:
        with quiet() if Path(source).is_dir() else asking(source):
            model: Any = SentenceTransformer(source, device="cpu", model_kwargs=of_model, **at).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"model: {name!r} could not be loaded ({cause(error)})") from error
    _check_tokens(name, model)
    # Routes normalise vectors themselves, so that raw and normalised requests share an entry.
    is_normalised = type(model[-1]).__name__ == "Normalize"
    while type(model[-1]).__name__ == "Normalize":
        del model[-1]
    if pooling is not None:
        _set_pooling(name, model, pooling)
    config: Any = locate(model).config
    width = getattr(model[-1], "out_features", None)
    is_classifier = isinstance(width, int) and width > 1 and width == len(config.id2label)
    is_odd = isinstance(width, int) and (width < 32 or width % 4 != 0)  # for an embedding
    if is_odd and not (is_classifier or is_normalised):
        logger.warning(
            "llmcache: %r ends in a Dense with %d outputs, and is served as an embedding model. If these are scores of "
            "labels, name %d labels in id2label of its config.json, which has %d: then it is served as a classifier",
            *(name, width, width, len(config.id2label)),
        )
    return Served(
        "classifier" if is_classifier else "embedding",
        model,
        model.tokenizer,
        min(_max_length(model.tokenizer, config), model.max_seq_length or _NO_LIMIT),
        forward=lambda inputs: _sentence_embedding(model(inputs)),
        states=lambda inputs: model[0](inputs)["token_embeddings"],
        answer_of=_sentence_embedding,
        labels=tuple(config.id2label[i] for i in range(len(config.id2label))) if is_classifier else (),
        prompts=dict(model.prompts or {}),
        default_prompt=model.default_prompt_name,
        is_prompt_pooled=all(getattr(module, "include_prompt", True) for module in model.modules()),
        dimensions=model.truncate_dim,
    )


def _set_pooling(name: str, model: Any, pooling: str) -> None:
    """Replace the pooling of a sentence-transformers model; `ConfigError` if it has none."""
    for number, part in enumerate(model):
        if type(part).__name__ == "Pooling":
            mode = pooling.replace("-", "")
            model[number] = type(part)(part.embedding_dimension, mode, include_prompt=part.include_prompt)
            return
    raise ConfigError(f"pooling: {name!r} has no pooling that could be replaced")


def _check_tokens(name: str, model: Any) -> None:
    """Raise `ConfigError` if sentence-transformers' tokens differ from the tokenizer's, e.g. by a chat template."""
    ids = (getattr(model, "preprocess", None) or model.tokenize)([_SAMPLE]).get("input_ids")
    if ids is None or len(ids) != 1:
        raise ConfigError(f"model: {name!r} does not read token ids, which this server needs")
    (made,) = ids.tolist()
    if made != model.tokenizer(_SAMPLE, truncation=True, max_length=model.max_seq_length)["input_ids"]:
        raise ConfigError(
            f"model: {name!r} changes texts before its tokenizer reads them, such as by a chat template; this server "
            "does not: save it with text as its Transformer's only modality, if it was trained on plain text"
        )


def _sentence_embedding(output: Any) -> Tensor:
    made: Tensor = output["sentence_embedding"]
    return made


def _max_length(tokenizer: Any, config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None) or _NO_LIMIT
    return int(min(positions, tokenizer.model_max_length, _NO_LIMIT))
