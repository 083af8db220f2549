"""Tokenizer and model by name: the packaged MiniLM, a folder, a name on the hub, or a tiny untrained model."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from experiments.models.architectures import ARCHITECTURES, random_model
from llmcache import ConfigError
from llmcache.lab import MINILM, Loaded, check_causal, find_folder, load_pretrained, packaged_minilm

UNTRAINED = "untrained"
SMOLLM2 = "smollm2"
FIGURES = "metrics.json"  # quality figures, beside a prepared model
#: Models made by `llmcache prepare`: the recipe's file in `experiments.prepare`, and its arguments.
PREPARED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "minilm-squad_v2": ("squad_v2", {}),
    "minilm-openbookqa": ("openbookqa", {}),
    "minilm-banking77": ("intent", {"data": "banking77"}),
    "minilm-snips": ("intent", {"data": "snips"}),
    "minilm-hwu64": ("intent", {"data": "hwu64"}),
    "gpt2-wikitext": ("wikitext", {}),
    "minilm-support-desk": ("support_desk", {}),
    SMOLLM2: ("smollm2", {}),
}
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

Inputs = dict[str, torch.Tensor]


def check_length(loaded: Loaded, max_length: int) -> None:
    """Raise `ConfigError` if `max_length` exceeds the model's positions."""
    config: Any = loaded.model.config
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ConfigError(f"max_length: {max_length} is more than this model's {positions} positions; give less")


def encode(tokenizer: Any, text: str, max_length: int) -> Inputs:
    """Tokenise one request: each tensor (1, T), T at most `max_length`, no padding."""
    return dict(tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt"))


def token_rows(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids (rows, T) of a request, which may have several choices, and a bool mask of valid tokens."""
    ids = inputs["input_ids"].flatten(end_dim=-2)
    return ids, inputs.get("attention_mask", torch.ones_like(ids)).reshape(ids.shape).bool()


#: Models with a head, by kind of head, with the name that messages use.
KINDS = {
    "states": ("AutoModel", "layers"),
    "class": ("AutoModelForSequenceClassification", "classifier"),
    "span": ("AutoModelForQuestionAnswering", "span head"),
    "choice": ("AutoModelForMultipleChoice", "multiple-choice head"),
    "token": ("AutoModelForCausalLM", "language-model head"),
}


def load(
    name: str, kind: str = "states", models_dir: Path | None = None, is_new_head: bool = False, **config: Any
) -> Loaded:
    """Load a model with a head of `KINDS`; with `is_new_head`, a head missing from the weights is initialised.

    The trunk of an architecture has random weights. It reads all-MiniLM's tokens, which are those of an uncased BERT.
    """
    auto, head = KINDS[kind]
    if name == UNTRAINED:
        return _make_untrained(auto, **config)
    if name in ARCHITECTURES and kind == "states":
        return Loaded(random_model(name, 0, kind), _tokenizer())
    loaded = load_pretrained(
        find(name, models_dir),
        auto,
        head,
        name=name,
        may_lack_head=kind == "states" or is_new_head,
        known=f"{MINILM!r}, a folder with config.json, weights and tokenizer, a name that `llmcache prepare` made, or "
        "a hub name that can be reached",
        **config,
    )
    if kind == "token":
        check_causal(name, loaded.model)
    return loaded


def _make_untrained(auto: str, **config: Any) -> Loaded:
    """Return a model with fixed random weights and all-MiniLM's tokenizer: for trial runs, not for figures."""
    import transformers

    tokenizer = _tokenizer()
    family = "gpt2" if auto == KINDS["token"][0] else "bert"
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 512}
    tokenizer.eos_token = tokenizer.sep_token  # as the config says
    special = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id, "pad_token_id": 0}
    made = transformers.AutoConfig.for_model(family, vocab_size=len(tokenizer), **shape, **special, **config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, auto).from_config(made)
    return Loaded(model.eval(), tokenizer)


def _tokenizer() -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(packaged_minilm())


def find(name: str, models_dir: Path | None) -> str:
    """Return the folder or hub name of a model; raise if a model of `llmcache prepare` was not prepared."""
    if name == MINILM:
        _check_minilm(folder := packaged_minilm())
        return str(folder)
    if (found := find_folder(name, models_dir)) is not None:
        return found
    if name in PREPARED:
        there = models_dir or Path("models")
        raise ConfigError(
            f"model: {name!r} is not in {Path.cwd() if models_dir is None else models_dir.absolute()}; "
            f"make it: llmcache prepare {name} --models-dir {there}; then give --models-dir {there}"
        )
    return name


def prepared_figures(name: str, models_dir: Path | None) -> dict[str, Any] | None:
    """Return the figures `llmcache prepare` measured for a model; None for other models."""
    path = Path(find(name, models_dir)) / FIGURES
    if not path.is_file():
        return None
    try:
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON; prepare the model again") from error
    return {key: value for key, value in figures.items() if key != "environment"}


@cache  # reads 90 MB
def _check_minilm(folder: Path) -> None:
    """Raise unless the weights are those the figures were measured with."""
    with (folder / "model.safetensors").open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != MINILM_SHA256:
        raise ConfigError(
            f"model: {MINILM!r}: the weights have sha256 {found}, expected {MINILM_SHA256}; reinstall the package"
        )
