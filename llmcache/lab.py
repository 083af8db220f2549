"""What experiments use of the inside of llmcache: observe requests, replay a cache on them, fit and choose limits.

    from llmcache.lab import Observation, RiskTarget, choose_limit

    observe     `Observation`s of requests that were computed, made by `cache.observe`
    replay      who would serve a request (`Found`), banks and prefix blocks that no model runs on, drift and alarm
    fit         `CalibratedReuse` of a wrapped model: fingerprints, risks, candidate limits
    choose      `split` requests, `try_limits` on those that test, `choose_limit` of a `RiskTarget`

Names here are no part of the public interface and change without notice. Each is imported on first use: those of
servers need the extra `serve`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcache.arrays import Doubles, Floats
    from llmcache.audit.alarm import Alarm
    from llmcache.banks.bank import Bank
    from llmcache.banks.entry import Entry
    from llmcache.banks.memory import Memory
    from llmcache.calibration.calibrated_reuse import CalibratedReuse
    from llmcache.calibration.calibration import (
        HoldoutOutcome,
        OperatingPoint,
        candidate_limits,
        check_size,
        choose_limit,
        n_tested,
        split,
        try_limits,
    )
    from llmcache.calibration.drift import DriftDetector, Marks, Profile
    from llmcache.calibration.observer import outputs, targets
    from llmcache.calibration.risk_target import MetricName, RiskTarget, Sources
    from llmcache.calibration.training import N_TURNS, Found
    from llmcache.config import explain
    from llmcache.fingerprint import ShingleMinHash
    from llmcache.index.lsh import share_equal
    from llmcache.models.adapters import Trunk, first_attention, locate, special_ids, unpack
    from llmcache.models.loading import (
        MINILM,
        Loaded,
        asking,
        cause,
        check_causal,
        find_folder,
        load_pretrained,
        packaged_minilm,
        quiet,
    )
    from llmcache.prefix.block import Block
    from llmcache.prefix.block_pool import BlockPool
    from llmcache.registry import Component, Registry
    from llmcache.request.observation import Observation
    from llmcache.request.prefill import Link
    from llmcache.request.rows import Scope
    from llmcache.serving.loading import Served, load_served
    from llmcache.serving.saving import Saves
    from llmcache.yaml_file import parse_yaml, read_yaml

_NAMES = {
    # Observe: requests that were computed, and the parts of a model that experiments look into.
    "request.observation": ("Observation",),
    "request.rows": ("Scope",),
    "models.adapters": ("Trunk", "first_attention", "locate", "special_ids", "unpack"),
    # Replay: what a cache would do, without a model.
    "arrays": ("Doubles", "Floats"),
    "banks.bank": ("Bank",),
    "banks.entry": ("Entry",),
    "banks.memory": ("Memory",),
    "reuse.prefix.block": ("Block",),
    "reuse.prefix.block_pool": ("BlockPool",),
    "request.prefill": ("Link",),
    "fingerprint": ("ShingleMinHash",),
    "index.lsh": ("share_equal",),
    "calibration.drift": ("DriftDetector", "Marks", "Profile"),
    "audit.alarm": ("Alarm",),
    # Fit and choose: calibrations, step by step.
    "calibration.calibrated_reuse": ("CalibratedReuse",),
    "calibration.observer": ("outputs", "targets"),
    "calibration.training": ("N_TURNS", "Found"),
    "calibration.risk_target": ("MetricName", "RiskTarget", "Sources"),
    "calibration.calibration": (
        *("HoldoutOutcome", "OperatingPoint", "candidate_limits", "check_size", "choose_limit", "n_tested", "split"),
        "try_limits",
    ),
    # Settings, models and servers, loaded as the commands load them.
    "config": ("explain",),
    "registry": ("Component", "Registry"),
    "yaml_file": ("parse_yaml", "read_yaml"),
    "models.loading": (
        *("MINILM", "Loaded", "asking", "cause", "check_causal", "find_folder", "load_pretrained", "packaged_minilm"),
        "quiet",
    ),
    "serving.loading": ("Served", "load_served"),
    "serving.saving": ("Saves",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "MINILM",
    "N_TURNS",
    "Alarm",
    "Bank",
    "Block",
    "BlockPool",
    "CalibratedReuse",
    "Component",
    "Doubles",
    "DriftDetector",
    "Entry",
    "Floats",
    "Found",
    "HoldoutOutcome",
    "Link",
    "Loaded",
    "Marks",
    "Memory",
    "MetricName",
    "Observation",
    "OperatingPoint",
    "Profile",
    "Registry",
    "RiskTarget",
    "Saves",
    "Scope",
    "Served",
    "ShingleMinHash",
    "Sources",
    "Trunk",
    "asking",
    "candidate_limits",
    "cause",
    "check_causal",
    "check_size",
    "choose_limit",
    "explain",
    "find_folder",
    "first_attention",
    "load_pretrained",
    "load_served",
    "locate",
    "n_tested",
    "outputs",
    "packaged_minilm",
    "parse_yaml",
    "quiet",
    "read_yaml",
    "share_equal",
    "special_ids",
    "split",
    "targets",
    "try_limits",
    "unpack",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'llmcache.lab' has no attribute {name!r}")
    return getattr(import_module(f"llmcache.{_HOME[name]}"), name)
