"""From a name to a model that can be served: what kind it is, and how it is called."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from llmcache.answers import Reading, read_logits
from llmcache.errors import ConfigError
from llmcache.models.adapters import locate
from llmcache.models.loading import (
    MINILM,
    asking,
    cause,
    find_folder,
    load_causal,
    load_pretrained,
    packaged_minilm,
    quiet,
)

Kind = Literal["embedding", "classifier", "reranker", "decoder"]

#: What each kind is called in messages.
NAMES: Mapping[Kind, str] = {
    "embedding": "an embedding model",
    "classifier": "a classifier",
    "reranker": "a reranker",
    "decoder": "a causal language model",
}
#: The model on padded rows.
Run = Callable[[dict[str, Tensor]], Tensor]

_SAMPLE = "Where is my CARD?"
_MOST = 10**6  # tokenizers say more than this where nobody told them


def _not_run(inputs: dict[str, Tensor]) -> Tensor:
    raise AssertionError("this kind of model is not run in this way")


@dataclass(frozen=True, slots=True)
class Served:
    """A model in eval mode, and what a server has to know of it."""

    kind: Kind
    model: nn.Module  # of transformers or sentence-transformers
    tokenizer: Any
    max_length: int  # tokens of the longest input
    forward: Run = _not_run  # inputs (B, T) to outputs (B, O); of a decoder not called
    states: Run = _not_run  # inputs (B, T) to the last states (B, T, D); called for embedding models alone
    answer_of: Reading = read_logits  # finds the answer in the model's output
    labels: tuple[str, ...] = ()  # of a classifier, by number
    is_multi_label: bool = False  # any number of labels may hold at once
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts that go before an input, by name
    default_prompt: str | None = None  # name of the prompt of texts for which none is named
    is_prompt_pooled: bool = True  # tokens of a prompt are pooled as those of the input are
    dimensions: int | None = None  # of an embedding, unless a request asks for others; None: all of the model

    @property
    def config(self) -> Any:
        """Config of the transformers model within."""
        return locate(self.model).config


def load_served(name: str, models_dir: Path | None = None) -> Served:
    """Load a model: `minilm` (packaged), a folder, one of `models_dir` first, or a name on the hub.

    Its architecture says what it is: `...ForCausalLM` a decoder, unless it is of sentence-transformers;
    `...ForSequenceClassification` a classifier, with one label a reranker; others are embedding models. A
    sentence-transformers model that ends in a `Dense` with as many outputs as its config has labels is a classifier,
    too.
    """
    source = find_folder(name, models_dir) or (str(packaged_minilm()) if name == MINILM else name)
    config = _config(name, source)
    architecture = next(iter(config.architectures or ("",)))
    if architecture.endswith(("ForCausalLM", "LMHeadModel")) and _find(source, "modules.json") is None:
        return _decoder(name, models_dir)
    if architecture.endswith("ForSequenceClassification"):
        return _with_head(name, source, config)
    return _sentence(name, source)


def _config(name: str, source: str) -> Any:
    import transformers

    try:
        with quiet() if Path(source).is_dir() else asking(source):
            return transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: {name!r} could not be loaded ({cause(error)}); give {MINILM!r}, a folder with config.json, "
            "weights and tokenizer, or a hub name that can be reached"
        ) from error


def _find(source: str, file: str) -> str | None:
    """Return the path to a file of a model; None: it has no such file."""
    from transformers.utils.hub import cached_file

    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with quiet():
        found: str | None = cached_file(source, file, **quietly)
    return found


def _saved(name: str, source: str) -> dict[str, Any]:
    """Return the settings that sentence-transformers saved with a model; empty: none."""
    if (path := _find(source, "config_sentence_transformers.json")) is None:
        return {}
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model: {name!r} could not be loaded ({path} is not valid JSON)") from error
    return found


def _decoder(name: str, models_dir: Path | None) -> Served:
    loaded = load_causal(name, models_dir)
    positions = getattr(loaded.model.config, "max_position_embeddings", None) or _MOST
    return Served("decoder", loaded.model, loaded.tokenizer, int(positions))


def _with_head(name: str, source: str, config: Any) -> Served:
    loaded = load_pretrained(source, "AutoModelForSequenceClassification", "classifier", name=name)
    model: Any = loaded.model
    labels = tuple(config.id2label[i] for i in range(config.num_labels))
    saved = _saved(name, source)  # of a CrossEncoder
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


def _sentence(name: str, source: str) -> Served:
    """An embedding model, as sentence-transformers loads it: also folders of transformers, with mean pooling."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ConfigError(f"model: {name!r} needs sentence-transformers: pip install 'llmcache-torch[serve]'") from None
    if (kind := _saved(name, source).get("model_type", "SentenceTransformer")) != "SentenceTransformer":
        raise ConfigError(f"model: {name!r} is a {kind} of sentence-transformers; give a SentenceTransformer")
    try:
        with quiet() if Path(source).is_dir() else asking(source):
            model: Any = SentenceTransformer(source).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"model: {name!r} could not be loaded ({cause(error)})") from error
    _check_tokens(name, model)
    # What is asked for raw and normalised is one entry then: vectors are normalised when they are answered.
    while type(model[-1]).__name__ == "Normalize":
        del model[-1]
    config: Any = locate(model).config
    width = getattr(model[-1], "out_features", None)
    is_classifier = isinstance(width, int) and width > 1 and width == len(config.id2label)
    return Served(
        "classifier" if is_classifier else "embedding",
        model,
        model.tokenizer,
        min(_max_length(model.tokenizer, config), model.max_seq_length or _MOST),
        forward=lambda inputs: _sentence_embedding(model(inputs)),
        states=lambda inputs: model[0](inputs)["token_embeddings"],
        answer_of=_sentence_embedding,
        labels=tuple(config.id2label[i] for i in range(len(config.id2label))) if is_classifier else (),
        prompts=dict(model.prompts or {}),
        default_prompt=model.default_prompt_name,
        is_prompt_pooled=all(getattr(module, "include_prompt", True) for module in model.modules()),
        dimensions=model.truncate_dim,
    )


def _check_tokens(name: str, model: Any) -> None:
    """Refuse a model for which sentence-transformers makes other tokens than its tokenizer, by a chat template say."""
    ids = (getattr(model, "preprocess", None) or model.tokenize)([_SAMPLE]).get("input_ids")
    if ids is None or len(ids) != 1:
        raise ConfigError(f"model: {name!r} reads texts by something else than token ids, which this server does not")
    (made,) = ids.tolist()
    if made != model.tokenizer(_SAMPLE, truncation=True, max_length=model.max_seq_length)["input_ids"]:
        raise ConfigError(
            f"model: {name!r} changes texts before its tokenizer reads them, by a chat template for instance, which "
            "this server does not; save it with text as its Transformer's only modality, if it was trained on such"
        )


def _sentence_embedding(output: Any) -> Tensor:
    made: Tensor = output["sentence_embedding"]
    return made


def _max_length(tokenizer: Any, config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None) or _MOST
    return int(min(positions, tokenizer.model_max_length, _MOST))
