"""Saving and loading a cache: safetensors for arrays, one JSON manifest for the rest, no pickle.

    manifest.json               settings, weights digest, scopes, names and SHA-256 of the files below
    requests-<id>.safetensors   keys, token ids, fingerprints, answers; what fingerprint and calibration learned
    states-<id>.safetensors     entries, stacked by layer and shape, and what each layer's codec learned

The manifest is replaced last and in one step, so a save that is cut short leaves the earlier one whole. What is read is
checked against the manifest's hashes before it is used. Order of arrival survives; recency, counts of use, scores,
divergences and ages do not: what has expired is not saved, and the rest begins a new life. Requests saved before a
fingerprint was fitted serve exact repeats, but are not found by others. A codec that was not fitted yet goes on with
the entries that were saved. What was measured (counters, reconstruction errors) is not saved.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from llmcache.adapters import Trunk, special_ids
from llmcache.arrays import below
from llmcache.calibration import Calibration
from llmcache.config import CacheConfig
from llmcache.errors import BankFileError, StoreError
from llmcache.library import Library
from llmcache.packing import arrays_to_tensors, pack_requests, pack_states, unpack
from llmcache.parts import Parts
from llmcache.rows import Scope
from llmcache.trust import Trust
from llmcache.weights import Weights

FORMAT = 4
MANIFEST = "manifest.json"


class Manifest(BaseModel):
    """What `manifest.json` holds.

    Attributes:
        format: Version of this layout.
        config: Settings of the cache.
        weights: Digest of the trunk's weights.
        special_ids: Ids that fingerprints leave out; others would make fingerprints of other requests.
        scopes: Namespace, dtype and attention of each scope; requests name theirs by number.
        files: SHA-256 of each data file by name.
        calibration: What approximate reuse rests on, where it was calibrated.
        struck: Requests that serve no others: their namespace by key.
    """

    model_config = ConfigDict(extra="forbid")

    format: int
    config: dict[str, Any]
    weights: str
    special_ids: list[int]
    scopes: list[tuple[str, str, str]]
    files: dict[str, str]
    calibration: Calibration | None = None
    struck: dict[str, str] = {}


def save(served: Parts, config: CacheConfig, tokenizer: Any, folder: str | Path) -> None:
    """Write a cache. Entries of other weights, which could not be served anyway, are left out.

    Args:
        served: What to save.
        config: Settings to save with it.
        tokenizer: Names the special tokens, which fingerprints leave out; or None.
        folder: Made if needed.

    Raises:
        StoreError: Writing failed. An earlier save in the folder is still whole.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    weights = served.weights.digest()
    parts, scopes, calibration = _take(served, weights)
    tag = uuid.uuid4().hex[:12]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = _write(folder, parts, tag)
        manifest = Manifest(
            format=FORMAT,
            config=config.model_dump(mode="json", exclude_unset=True),
            weights=weights,
            special_ids=list(special_ids(served.trunk, tokenizer)),
            scopes=[(scope.namespace, scope.dtype, scope.attention) for scope in scopes],
            files=files,
            calibration=calibration,
            struck=served.library.struck,
        )
        _replace(folder / MANIFEST, manifest.model_dump_json(indent=2))
        _remove_others(folder, files)
    except (OSError, SafetensorError) as error:
        for path in folder.glob(f"*-{tag}.safetensors"):
            path.unlink(missing_ok=True)
        raise StoreError(f"{folder}: could not save: {error}") from error


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest.

    Raises:
        BankFileError: There is none, or it is not one of ours.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = Manifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise BankFileError(f"{folder}: no {MANIFEST} here; give a folder that cache.save() wrote") from error
    except (OSError, ValueError, ValidationError) as error:
        raise BankFileError(f"{path}: not a readable manifest: {str(error).splitlines()[0]}") from error
    if manifest.format != FORMAT:
        raise BankFileError(f"{path}: format {manifest.format}; this version reads format {FORMAT}")
    return manifest


def check(manifest: Manifest, trunk: Trunk, tokenizer: Any, folder: str | Path) -> None:
    """Refuse a save that this model could not be served from.

    Args:
        manifest: Of `folder`.
        trunk: Of the model.
        tokenizer: Names the special tokens now; or None.
        folder: Named in the error.

    Raises:
        BankFileError: Saved from other weights, or with other special tokens.
    """
    weights = Weights(trunk.module).digest()
    if manifest.weights != weights:
        raise BankFileError(
            f"{folder}: saved from other weights (digest {manifest.weights[:12]}, this model has {weights[:12]}); "
            "load the model it was saved from, or start an empty cache with wrap()"
        )
    if manifest.special_ids != list(special_ids(trunk, tokenizer)):
        raise BankFileError(f"{folder}: saved with other special tokens; give load() the tokenizer that wrap() had")


def restore(served: Parts, manifest: Manifest, folder: str | Path) -> None:
    """Fill an empty library with what was saved, and serve within the calibration that was saved.

    Args:
        served: Made with the manifest's settings; can be calibrated if it was.
        manifest: Of `folder`, checked.
        folder: Where the data files are.

    Raises:
        BankFileError: A file is missing, cut short or changed, or the calibration is one of another head.
    """
    parts = {name.split("-")[0]: _read_checked(Path(folder) / name, sha) for name, sha in manifest.files.items()}
    library, weights = served.library, manifest.weights
    scopes = [Scope(namespace, weights, dtype, attention) for namespace, dtype, attention in manifest.scopes]
    try:
        learned = {name: tensor.numpy() for name, tensor in parts["requests"].items()}
        records = list(unpack(parts["requests"], parts["states"], scopes))
        if served.trust is not None and manifest.calibration is not None:
            namespaces = {record.scope.namespace for record in records if record.is_kept}
            served.trust.restore(manifest.calibration, below("trust.", learned), namespaces)
        if library.fingerprint is not None:
            library.fingerprint.restore(below("fingerprint.", learned))
        for layer, packer in library.banks.packers[weights].items():
            packer.codec.restore(below(f"{layer}/codec/", parts["states"]))
        for record in records:
            library.adopt(record)
        library.place(records)
        if served.trust is not None:
            served.trust.chooser.present((one.scope, one.key, one.answer) for one in records if one.is_kept)
        for key, namespace in manifest.struck.items():
            library.strike(key, namespace)
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        raise BankFileError(f"{folder}: the files do not fit each other: {error!r}") from error
    made, trust = manifest.calibration, served.trust
    if trust is not None and made is not None and not trust.is_made_for(weights):
        raise BankFileError(
            f"{folder}: calibrated for a head with other weights (digest {made.head[:12]}, this model's has "
            f"{trust.head_digest()[:12]}); load the model that it was saved from"
        )


def _take(served: Parts, weights: str) -> tuple[dict[str, dict[str, Tensor]], list[Scope], Calibration | None]:
    """What is to be written, as it is at one moment: tensors by file, scopes, calibration."""
    library = served.library
    with nullcontext() if served.trust is None else served.trust.held():  # no calibration is renewed meanwhile
        trust = served.trust if served.trust is not None and served.trust.is_made_for(weights) else None
        records = [record for record in library.records() if record.scope.weights == weights]
        scopes = list(dict.fromkeys(record.scope for record in records))
        parts = {
            "requests": pack_requests(records, scopes) | _pack_learned(library, trust),
            "states": pack_states(records) | _pack_codecs(library, weights),
        }
        return parts, scopes, None if trust is None else trust.calibration


def _pack_learned(library: Library, trust: Trust | None) -> dict[str, Tensor]:
    """What fingerprint and calibration learned."""
    fingerprint = {} if library.fingerprint is None else library.fingerprint.state()
    learned = {f"fingerprint.{name}": array for name, array in fingerprint.items()}
    if trust is not None:
        learned |= {f"trust.{name}": array for name, array in trust.state().items()}
    return arrays_to_tensors(learned)


def _pack_codecs(library: Library, weights: str) -> dict[str, Tensor]:
    """What codecs learned of these weights' states. Taken after the records: a packed entry needs its codec."""
    return {
        f"{layer}/codec/{name}": tensor.cpu().contiguous()
        for layer, packer in library.banks.packers.get(weights, {}).items()
        for name, tensor in packer.codec.state().items()
    }


def _read_checked(path: Path, sha: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    if not path.is_file():
        raise BankFileError(f"{path}: missing; the save is incomplete")
    if _sha256(path) != sha:
        raise BankFileError(f"{path}: cut short or changed since it was saved")
    return load_file(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(folder: Path, parts: dict[str, dict[str, Tensor]], tag: str) -> dict[str, str]:
    """Write each part to a file of its own and return their SHA-256 by name."""
    from safetensors.torch import save_file

    files = {}
    for part, tensors in parts.items():
        name = f"{part}-{tag}.safetensors"
        save_file(tensors, folder / name)
        files[name] = _sha256(folder / name)
    return files


def _replace(path: Path, text: str) -> None:
    """Write a file in one step, so that a reader sees the old or the new one."""
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _remove_others(folder: Path, files: Iterable[str]) -> None:
    """Delete data files of earlier saves."""
    for kind in ("requests", "states"):
        for path in folder.glob(f"{kind}-*.safetensors"):
            if path.name not in set(files):
                path.unlink(missing_ok=True)
