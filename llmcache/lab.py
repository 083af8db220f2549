"""Internal names that experiments may use: observe requests, replay a cache on them, fit and choose limits.

    from llmcache.lab import Observation, RiskTarget, choose_limit

    observe     `Observation`s of computed requests, made by `cache.observe`
    replay      the source that would serve a request (`Found`); banks and prefix blocks without a model
    fit         `CalibratedReuse` of a wrapped model: fingerprints, risks, candidate limits
    audit       the `Alarm` and the constants by which hits are drawn
    choose      `split` requests, `try_limits` on the test part, `choose_limit` for a `RiskTarget`

These names are not part of the public interface and change without notice. Each is imported on first use: names of
servers need the extra `serve`.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    # Observe: computed requests, and the parts of a model that experiments inspect.
    "reuse.observation": ("Observation",),
    "request.rows": ("Scope",),
    "models.adapters": ("CACHE", "Trunk", "first_attention", "locate", "special_ids", "unpack"),
    "models.causal_trial": ("look_at",),
    # Replay: a cache without a model.
    "support.arrays": ("Doubles", "Floats"),
    "memory.bank": ("Bank", "Entry"),
    "memory.blocks.block_pool": ("BlockPool",),
    "memory.blocks.block": ("Block", "Link"),
    "paper.fingerprints": ("ShingleMinHash",),
    "memory.index.lsh": ("share_equal",),
    # Engines: experiments export models in the same way.
    "engines.onnx": ("open_session", "quantise", "untransposed"),
    # Fit and choose: calibrations, step by step.
    "reuse.calibration.calibrated_reuse": ("CalibratedReuse",),
    "reuse.calibration.observer": ("outputs", "targets"),
    "reuse.calibration.training": ("N_TURNS", "Found"),
    "reuse.calibration.risk_target": ("Growth", "RiskTarget"),
    "reuse.calibration.calibration": (
        *("HoldoutOutcome", "OperatingPoint", "candidate_limits", "check_size", "choose_limit", "n_tested", "split"),
        "try_limits",
    ),
    # Audit: draws and alarm, step by step.
    "reuse.audit.account": ("BY_RISK",),
    "reuse.audit.alarm": ("CLOSER", "WATCH", "Alarm", "epoch_of"),
    # Settings, models and servers, loaded as the commands load them.
    "config": ("PrefixOptions", "explain"),
    "support.registry": ("Component", "Registry"),
    "support.yaml_file": ("parse_yaml", "read_yaml"),
    "models.loading": (
        *("MINILM", "Loaded", "asking", "cause", "check_causal", "find_folder", "load_pretrained", "packaged_minilm"),
        "quiet",
    ),
    "serving.loading": ("Served", "load_served"),
    "serving.saving": ("Saves",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'llmcache.lab' has no attribute {name!r}")
    return getattr(import_module(f"llmcache.{_HOME[name]}"), name)
