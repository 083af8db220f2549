"""Saving and loading a cache: safetensors for tensors, one JSON manifest for the rest, no pickle.

    manifest.json                 settings, digest of the weights, names and SHA-256 of the files below
    <section>-<tag>.safetensors   the content of one part of the cache: `bank`, `blocks`, `calibrated`, ...

`folder` replaces one save by another. Files are checked against the manifest's hashes before they are used; if the save
is replaced meanwhile, the new one is read. Insertion order is saved; recency, use counts, ages and statistics are not.
"""

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from llmcache.calls.wrapped import Wrapped
from llmcache.config import CacheConfig
from llmcache.errors import BankFileError, ConfigError, StoreError, UnfitBankError
from llmcache.models.adapters import locate, special_ids
from llmcache.models.weights import Weights
from llmcache.request.bypass import CURES
from llmcache.support.folder import MANIFEST, is_data_name, locked, replace, sha256, why_untrusted
from llmcache.support.version import __version__

FORMAT = 15
_META = "__meta__"  # the tensor that holds a section's JSON
#: Settings that affect neither the stored data nor a calibration's bound.
_FREE: Final = frozenset(("auto_bypass", "engine", "policy"))
_BUDGETS: Final = frozenset(("max_bytes", "max_entries"))
_AGAIN: Final = "save the cache again, or give another folder"
CALIBRATED: Final = "calibrated"  # the section of a calibration; with it, budgets must not shrink


class Section(Protocol):
    """A part of a cache that is saved."""

    def state(self, weights: str) -> tuple[Any, dict[str, Tensor]]:
        """Return a consistent snapshot of the data for these weights: JSON data, and tensors by name."""

    def restore(self, meta: Any, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state` returned, taking over the tensors."""


class Manifest(BaseModel):
    """The content of `manifest.json`."""

    model_config = ConfigDict(extra="forbid")

    format: int  # version of this layout
    written_by: str  # version of this library
    payload: str  # name of the payload that entries keep
    config: dict[str, Any]
    weights: str  # digest of the trunk's weights
    head: str  # digest of the model's other weights; "" if reuse is exact only
    special_ids: list[int]  # token ids excluded from fingerprints; must be the same when loading
    numbers: dict[str, tuple[int, int]] | None = None  # of namespaces, see `Tier.numbers`; None: there was no store
    kinds: dict[str, list[Any]]  # descriptions of the trunk's outputs, by component; see `OutputFormats`
    files: dict[str, str] = {}  # SHA-256 by file name


def save(
    folder: str | Path,
    wrapped: Wrapped,
    config: CacheConfig,
    sections: Mapping[str, Section],
    kinds: Mapping[str, list[Any]],
    numbers: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Save a cache atomically. `numbers` must be read before the sections are, as a purge may come in between.

    Raises:
        StoreError: Writing failed, the weights cannot be read, or other files are in the way. An earlier save is kept.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    weights = wrapped.weights.digest(is_kept=True)
    if reason := wrapped.weights.unreadable:
        raise StoreError(f"{folder}: not saved: {CURES[reason]}")
    is_approximate = config.tau is not None or config.learn is not None or CALIBRATED in sections
    try:
        with locked(folder):
            manifest = Manifest(
                format=FORMAT,
                written_by=__version__,
                payload=wrapped.payload.name,
                config=config.model_dump(mode="json", exclude_unset=True),
                weights=weights,
                head=Weights(wrapped.model, wrapped.trunk.module, has_values=False).digest() if is_approximate else "",
                special_ids=list(special_ids(wrapped.trunk, wrapped.tokenizer)),
                numbers=None if numbers is None else dict(numbers),
                kinds=dict(kinds),
            )
            parts = {}
            for name, section in sections.items():
                meta, tensors = section.state(weights)
                meta_bytes = torch.frombuffer(bytearray(json.dumps(meta).encode()), dtype=torch.uint8)
                parts[name] = {_META: meta_bytes} | {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
            replace(folder, parts, lambda files: manifest.model_copy(update={"files": files}).model_dump_json(indent=2))
    except (OSError, ValueError, SafetensorError) as error:
        raise StoreError(f"{folder}: could not save: {error}") from error


class Saved:
    """A complete, checked save that suits a model. Other processes may save to the folder meanwhile."""

    def __init__(self, folder: str | Path, model: nn.Module, tokenizer: Any) -> None:
        """Read and check the save in a folder.

        Raises:
            UnfitBankError: It was saved from other weights, with another tokenizer, or by another version.
            BankFileError: The folder is incomplete or damaged.
            StoreError: It was replaced while it was read, and another save there does not end.
        """
        self.folder = folder
        self.manifest = read_manifest(folder)
        try:
            self._parts = self._read(model, tokenizer)
        except BankFileError:
            if read_manifest(folder).files == self.manifest.files:
                raise
            # Another save replaced it meanwhile and removed its files. Under the lock none can; a folder that may not
            # be written cannot be locked.
            with locked(Path(folder)) if os.access(folder, os.W_OK) else nullcontext():
                self.manifest = read_manifest(folder)
                self._parts = self._read(model, tokenizer)

    def _read(self, model: nn.Module, tokenizer: Any) -> dict[str, dict[str, Tensor]]:
        _check(self.manifest, model, tokenizer, self.folder)
        return {
            name.split("-")[0]: _read_checked(Path(self.folder) / name, sha)
            for name, sha in self.manifest.files.items()
        }

    @property
    def sections(self) -> set[str]:
        """The names of the saved sections."""
        return set(self._parts)

    def settings(self, given: CacheConfig | None) -> CacheConfig:
        """Return the settings to load with: the saved ones, or `given` if these are compatible with the save.

        Raises:
            UnfitBankError: This version does not accept the saved settings.
            ConfigError: The given settings are not compatible with the save.
        """
        return choose_settings(self.manifest.config, given, CALIBRATED in self._parts, self.folder)

    def restore(self, payload: str, sections: Mapping[str, Section]) -> None:
        """Load the sections into an empty cache whose payload is `payload`; sections that were not saved stay empty.

        Raises:
            UnfitBankError: The saved entries have another payload than this model's head needs.
            BankFileError: The files do not fit each other.
        """
        if self.manifest.payload != payload:
            raise UnfitBankError(
                f"{self.folder}: saved with payload {self.manifest.payload!r}, where this model is served by "
                f"{payload!r}: its head is another one, or is now known to read more; give another folder"
            )
        try:
            for name, section in sections.items():
                if part := dict(self._parts.get(name, {})):
                    meta = json.loads(part.pop(_META).numpy().tobytes())
                    section.restore(meta, part)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise BankFileError(f"{self.folder}: the files do not fit each other: {error!r}; {_AGAIN}") from error


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest of a save; see `Saved`."""
    path = Path(folder) / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        number = found.get("format") if isinstance(found, dict) else None
        if isinstance(number, int) and number != FORMAT:
            by = f", written by llmcache {found['written_by']}" if found.get("written_by") else ""
            raise UnfitBankError(
                f"{path}: format {number}{by}; this version ({__version__}) reads format {FORMAT}: save the cache again"
            )
        manifest = Manifest.model_validate(found)
        if not all(map(is_data_name, manifest.files)):
            raise BankFileError(f"{path}: names files not written by cache.save(): {sorted(manifest.files)}; {_AGAIN}")
        return manifest
    except BankFileError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BankFileError(f"{folder}: no {MANIFEST} here; give a folder that cache.save() wrote") from error
    except ValidationError as error:
        first = error.errors()[0]
        wrong = f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"
        raise UnfitBankError(f"{path}: not as this version ({__version__}) writes it: {wrong}; {_AGAIN}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise BankFileError(f"{path}: no readable manifest: {str(error).splitlines()[0]}; {_AGAIN}") from error


def _check(manifest: Manifest, model: nn.Module, tokenizer: Any, folder: str | Path) -> None:
    """Raise `UnfitBankError` if the save does not suit the model, `BankFileError` if anyone may have written it."""
    if danger := why_untrusted(Path(folder)):
        raise BankFileError(danger)
    trunk = locate(model, str(manifest.config.get("adapter", "auto")))
    watched = Weights(trunk.module)
    weights = watched.digest()
    if reason := watched.unreadable:
        raise UnfitBankError(f"{folder}: cannot check if this model has the weights it was saved from: {CURES[reason]}")
    if manifest.weights != weights:
        raise UnfitBankError(
            f"{folder}: saved from other weights (digest {manifest.weights[:12]}, this model has {weights[:12]}); "
            "give the model it was saved from, or another folder"
        )
    if manifest.special_ids != list(special_ids(trunk, tokenizer)):
        raise UnfitBankError(
            f"{folder}: saved with other special tokens; give the tokenizer that it was saved with, or another folder"
        )
    if manifest.head and manifest.head != (head := Weights(model, trunk.module, has_values=False).digest()):
        raise UnfitBankError(
            f"{folder}: saved for a head with other weights (digest {manifest.head[:12]}, this model's has "
            f"{head[:12]}), whose answers approximate hits return; give the model that it was saved from, or "
            "another folder"
        )


def choose_settings(
    saved: Mapping[str, Any], given: CacheConfig | None, is_calibrated: bool, folder: str | Path
) -> CacheConfig:
    """Return the settings to load with; see `Saved.settings`. A calibration needs room for all of its requests."""
    try:
        known = CacheConfig.make(saved)
    except ConfigError as error:
        raise UnfitBankError(f"{folder}: saved with settings that this version refuses: {error}; {_AGAIN}") from error
    if given is None:
        return known
    before, now = known.model_dump(mode="json"), given.model_dump(mode="json")

    def may_change(key: str) -> bool:
        if key in _BUDGETS:  # None: unlimited
            return not is_calibrated or now[key] is None or (before[key] is not None and now[key] >= before[key])
        return key in _FREE

    if differing := [key for key in now if now[key] != before[key] and not may_change(key)]:
        changes = "; ".join(f"{key} is {now[key]!r}, and was {before[key]!r}" for key in differing)
        raise ConfigError(
            f"{folder}: saved with other settings than those given: {changes}. Leave the settings out to use those of "
            "the save, or begin anew in another folder"
        )
    return given


def _read_checked(path: Path, sha: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if not path.is_file():
            raise BankFileError(f"{path}: missing; the save is incomplete: {_AGAIN}")
        if sha256(path) != sha:
            raise BankFileError(f"{path}: cut short or changed since it was saved: {_AGAIN}")
        return load_file(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # load_file raises RuntimeError for a missing file
        raise BankFileError(f"{path}: not readable: {error}; {_AGAIN}") from error
