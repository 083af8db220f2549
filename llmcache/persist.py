"""Saving and loading a cache: safetensors for arrays, one JSON manifest for the rest, no pickle.

    manifest.json                settings, weights digest, scopes, names and SHA-256 of the files below
    requests-<tag>.safetensors   keys, token ids, fingerprints, answers; what fingerprint and calibration learned
    states-<tag>.safetensors     entries and blocks, stacked by layer and shape, and what each layer's codec learned

How one save takes the place of another is in `folder`. What is read is checked against the manifest's hashes before it
is used; if the save was replaced meanwhile, the new one is read. Order of arrival survives; recency, counts of use,
scores, divergences and ages do not: what has expired is not saved, and the rest begins a new life. Requests saved
before a fingerprint was fitted serve exact repeats, but are not found by others. A codec that was not fitted yet goes
on with the entries that were saved. What was measured (counters, reconstruction errors) is not saved.
"""

import logging
from collections.abc import Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from llmcache import __version__
from llmcache.arrays import below
from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.serialization import arrays_to_tensors, pack_requests, pack_states, unpack
from llmcache.banks.tier import named
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.calibration import Calibration
from llmcache.config import CacheConfig
from llmcache.errors import BankFileError, StoreError, UnfitBankError
from llmcache.execution.components import Components
from llmcache.folder import MANIFEST, is_data_name, locked, read_json, replace, sha256
from llmcache.models.adapters import Trunk, locate, special_ids
from llmcache.models.weights import Weights
from llmcache.request.bypass import CURES
from llmcache.request.rows import Scope

logger = logging.getLogger(__name__)

FORMAT = 10
_TRIES = 10

Tensors: TypeAlias = dict[str, dict[str, Tensor]]


class Manifest(BaseModel):
    """What `manifest.json` holds."""

    model_config = ConfigDict(extra="forbid")

    format: int  # version of this layout
    written_by: str  # version of this library
    payload: str  # what of a state is kept
    config: dict[str, Any]
    weights: str  # digest of the trunk's
    head: str  # of the model's others, where its answers matter: something is reused approximately
    special_ids: list[int]  # that fingerprints leave out; others would make fingerprints of other requests
    scopes: list[tuple[str, str, str]]  # namespace, dtype and attention; requests name theirs by number
    generations: dict[str, int | None]  # that namespaces had in the store; None: not known, or there is none
    files: dict[str, str]  # SHA-256 by name
    calibration: Calibration | None = None
    rests_on: list[str]  # namespaces of those that the calibration had serve
    quarantined: dict[str, str]  # requests that serve no others: their namespace by key


def save(components: Components, model: nn.Module, config: CacheConfig, tokenizer: Any, folder: str | Path) -> None:
    """Write a cache. Entries of other weights, which could not be served anyway, are left out.

    If writing failed, the weights cannot be read, or the folder holds something else where the save would go, it is a
    `StoreError`, and an earlier save in the folder is still whole.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    weights = components.weights.digest(is_kept=True)
    if reason := components.weights.unreadable:
        raise StoreError(f"{folder}: not saved: {CURES[reason]}")
    try:
        with locked(folder):
            generations = {} if components.tier is None else components.tier.generations()  # first: a purge may come
            parts, scopes, calibration, rests_on = _take(components, weights)
            quarantined = components.banks.quarantined
            namespaces = {scope.namespace for scope in scopes} | {*rests_on, *quarantined.values()}
            manifest = Manifest(
                format=FORMAT,
                written_by=__version__,
                payload=components.payload.name,
                config=config.model_dump(mode="json", exclude_unset=True),
                weights=weights,
                head=_head_digest(model, components.trunk, config, calibration is not None),
                special_ids=list(special_ids(components.trunk, tokenizer)),
                scopes=[(scope.namespace, scope.dtype, scope.attention) for scope in scopes],
                generations={name: generations.get(name) for name in namespaces},
                files={},
                calibration=calibration,
                rests_on=rests_on,
                quarantined=quarantined,
            )
            replace(folder, parts, lambda files: manifest.model_copy(update={"files": files}).model_dump_json(indent=2))
    except (OSError, ValueError, SafetensorError) as error:
        raise StoreError(f"{folder}: could not save: {error}") from error


def read(folder: str | Path, model: nn.Module, tokenizer: Any) -> tuple[Manifest, Tensors]:
    """Read a save that this model can be served from: one version, whole, also while others save there.

    Returns the manifest, and the tensors of each file by the first part of its name.
    """
    for _ in range(_TRIES):
        manifest = read_manifest(folder)
        check(manifest, model, tokenizer, folder)
        try:
            return manifest, {
                name.split("-")[0]: _read_checked(Path(folder) / name, sha) for name, sha in manifest.files.items()
            }
        except BankFileError:
            if read_manifest(folder).files == manifest.files:
                raise
            # Another save took its place meanwhile, and removed its files.
    raise BankFileError(f"{folder}: replaced {_TRIES} times while it was being read: load it when fewer save there")


def format_of(folder: str | Path) -> int | None:
    """The format of a save; None where that cannot be told."""
    try:
        found = read_json(Path(folder) / MANIFEST)
    except (OSError, ValueError):
        return None
    return found.get("format") if isinstance(found, dict) else None


def read_manifest(folder: str | Path) -> Manifest:
    path = Path(folder) / MANIFEST
    try:
        found = read_json(path)
        _check_format(found, path)
        manifest = Manifest.model_validate(found)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BankFileError(f"{folder}: no {MANIFEST} here; give a folder that cache.save() wrote") from error
    except UnfitBankError:
        raise
    except ValidationError as error:
        raise UnfitBankError(f"{path}: not as this version ({__version__}) writes it: {_first_line(error)}") from error
    except (OSError, ValueError) as error:
        raise BankFileError(f"{path}: not a readable manifest: {_first_line(error)}") from error
    if not {name.split("-")[0] for name in manifest.files if is_data_name(name)} >= {"requests", "states"}:
        raise BankFileError(f"{path}: names other files than cache.save() writes: {sorted(manifest.files)}")
    return manifest


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _check_format(found: Any, path: Path) -> None:
    """Refuse a manifest of a format that is not read here, and say who wrote it."""
    number = found.get("format") if isinstance(found, dict) else None
    if isinstance(number, int) and number != FORMAT:
        written_by = found.get("written_by")
        raise UnfitBankError(
            f"{path}: format {number}{f', written by llmcache {written_by}' if written_by else ''}; this version "
            f"({__version__}) reads format {FORMAT}: save the cache again"
        )


def check(manifest: Manifest, model: nn.Module, tokenizer: Any, folder: str | Path) -> None:
    """Refuse a save that this model could not be served from."""
    trunk = locate(model, str(manifest.config.get("adapter", "auto")))
    watched = Weights(trunk.module)
    weights = watched.digest()
    if reason := watched.unreadable:
        raise UnfitBankError(
            f"{folder}: whether this model has the weights it was saved from is unknown: {CURES[reason]}"
        )
    if manifest.weights != weights:
        raise UnfitBankError(
            f"{folder}: saved from other weights (digest {manifest.weights[:12]}, this model has {weights[:12]}); "
            "give the model that it was saved from, or another folder"
        )
    if manifest.special_ids != list(special_ids(trunk, tokenizer)):
        raise UnfitBankError(
            f"{folder}: saved with other special tokens; give the tokenizer that it was saved with, or another folder"
        )
    if manifest.head and manifest.head != (head := Weights(model, without=trunk.module).digest()):
        raise UnfitBankError(
            f"{folder}: saved for a head with other weights (digest {manifest.head[:12]}, this model's has "
            f"{head[:12]}), "
            "by which others than repeats were answered; give the model that it was saved from, or another folder"
        )


def _head_digest(model: nn.Module, trunk: Trunk, config: CacheConfig, is_calibrated: bool) -> str:
    is_approximate = config.tau is not None or config.learn is not None or is_calibrated
    return Weights(model, without=trunk.module).digest() if is_approximate else ""


def restore(components: Components, manifest: Manifest, parts: Tensors, folder: str | Path) -> None:
    """Fill an empty library with what was saved, and serve within the calibration that was saved.

    Refused are files that do not fit each other, a calibration of another head, and entries that keep other parts of
    states than this model's head reads.
    """
    try:
        _fill(components, manifest, parts, folder)
    except BankFileError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise BankFileError(f"{folder}: the files do not fit each other: {error!r}") from error
    calibrated = components.calibrated
    made = None if calibrated is None else calibrated.calibration
    if calibrated is not None and made is not None and not calibrated.is_made_for(manifest.weights):
        raise UnfitBankError(
            f"{folder}: calibrated for a head with other weights (digest {made.head[:12]}, this model's has "
            f"{calibrated.head_digest()[:12]}); give the model that it was saved from, or another folder"
        )


def _fill(components: Components, manifest: Manifest, parts: Tensors, folder: str | Path) -> None:
    if components.tier is None:
        _take_in(components, manifest, parts, folder, set())
        return
    names = [name for name, *_ in manifest.scopes] + [*manifest.rests_on, *manifest.quarantined.values()]
    with components.tier.loading({name: manifest.generations.get(name) for name in names}) as gone:
        _take_in(components, manifest, parts, folder, gone)
    if gone:
        logger.warning("%s: not used, as it may have been purged since, is %s", folder, named(gone))


def _take_in(components: Components, manifest: Manifest, parts: Tensors, folder: str | Path, gone: Set[str]) -> None:
    """Fill the banks, but for namespaces that are gone, with which goes a calibration that rests on them."""
    banks, weights = components.banks, manifest.weights
    scopes = [Scope(namespace, weights, dtype, attention) for namespace, dtype, attention in manifest.scopes]
    learned = {name: tensor.numpy() for name, tensor in parts["requests"].items()}
    records = list(unpack(parts["requests"], parts["states"], scopes))
    if manifest.payload != (kept := components.payload.name):
        raise UnfitBankError(
            f"{folder}: saved with payload {manifest.payload!r}, where this model is served by {kept!r}: its head is "
            "another one, or is now known to read more; give another folder"
        )
    if components.calibrated is not None and manifest.calibration is not None:
        components.calibrated.restore(manifest.calibration, below("trust.", learned), manifest.rests_on)
    records = [record for record in records if record.scope.namespace not in gone]
    if banks.fingerprint is not None:
        banks.fingerprint.restore(below("fingerprint.", learned))
    for layer, packer in banks.layer_banks.packers[weights].items():
        packer.codec.restore(below(f"{layer}/codec/", parts["states"]))
    for record in records:
        if record.place is None:
            banks.adopt(record)
        elif components.prefix is not None:
            components.prefix.adopt(record)
    if components.prefix is not None:
        components.prefix.gather()
    banks.place(records)
    for key, namespace in manifest.quarantined.items():
        banks.quarantine(key, namespace)
    for name in gone:
        components.forget(name)


def _take(components: Components, weights: str) -> tuple[Tensors, list[Scope], Calibration | None, list[str]]:
    """What is written, as it is at one moment: tensors by file, scopes, calibration and its namespaces."""
    banks, calibrated = components.banks, components.calibrated
    with nullcontext() if calibrated is None else calibrated.held():  # no calibration is renewed meanwhile
        if calibrated is not None and not calibrated.is_made_for(weights):
            calibrated = None
        blocks = [] if components.prefix is None else components.prefix.records()
        records = [record for record in (*banks.records(), *blocks) if record.scope.weights == weights]
        scopes = list(dict.fromkeys(record.scope for record in records))
        parts = {
            "requests": pack_requests(records, scopes) | _pack_learned(banks, calibrated),
            "states": pack_states(records) | _pack_codecs(banks, weights),
        }
        if calibrated is None:
            return parts, scopes, None, []
        return parts, scopes, calibrated.calibration, sorted(calibrated.namespaces)


def _pack_learned(banks: CacheBanks, calibrated: CalibratedReuse | None) -> dict[str, Tensor]:
    fingerprint = {} if banks.fingerprint is None else banks.fingerprint.state()
    learned = {f"fingerprint.{name}": array for name, array in fingerprint.items()}
    if calibrated is not None:
        learned |= {f"trust.{name}": array for name, array in calibrated.state().items()}
    return arrays_to_tensors(learned)


def _pack_codecs(banks: CacheBanks, weights: str) -> dict[str, Tensor]:
    """What codecs learned of these weights' states. Taken after the records: a packed entry needs its codec."""
    return {
        f"{layer}/codec/{name}": tensor.cpu().contiguous()
        for layer, packer in banks.layer_banks.packers.get(weights, {}).items()
        for name, tensor in packer.codec.state().items()
    }


def _read_checked(path: Path, sha: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if not path.is_file():
            raise BankFileError(f"{path}: missing; the save is incomplete")
        if sha256(path) != sha:
            raise BankFileError(f"{path}: cut short or changed since it was saved")
        return load_file(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # a file that is gone by now is a RuntimeError there
        raise BankFileError(f"{path}: not readable: {error}") from error
