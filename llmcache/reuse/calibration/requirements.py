"""Refuses models and settings for which approximate reuse can have no bound."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmcache.config import CacheConfig
from llmcache.errors import CalibrationError, ConfigError
from llmcache.memory.policies import POLICIES, Policy
from llmcache.models.heads import Head, refuse_unsafe
from llmcache.reuse.calibration.calibration import check_size
from llmcache.reuse.calibration.inputs import n_rows


def refuse_coupled(coupling: str, inputs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse requests of several rows if rows of a call affect each other; `coupling` is the reason, or ""."""
    number = next((number for number, batch in enumerate(inputs) if n_rows(batch) > 1), None) if coupling else None
    if number is not None:
        raise CalibrationError(
            f"request {number} has {n_rows(inputs[number])} rows, and rows of a call affect each other: {coupling}. So "
            "only calls of one row can be served approximately: give, and send, one row a call; or wrap the model in "
            "float precision, which answers batches too"
        )


def check_settings(head: Head, config: CacheConfig) -> None:
    """Refuse settings for which no bound could hold."""
    if config.tau is not None:
        raise ConfigError(f"tau={config.tau} chooses what may be reused; to have that calibrated, wrap without tau")
    refuse_unsafe(head, config)
    if head.name == "multiple-choice head":
        raise ConfigError("a multiple-choice head answers several rows together: it cannot be calibrated row by row")
    if not config.serves_exact:
        raise ConfigError("exact=False: a calibration assumes that repeats get their own states; leave exact out")
    if _may_drop_sources(POLICIES.find(config.policy.name)):
        staying = sorted(name for name, policy in POLICIES.items() if not _may_drop_sources(policy))
        raise ConfigError(
            f"policy={config.policy.name!r}: a calibration's sources must stay; use one of {', '.join(staying)}"
        )
    if config.learn is None:
        return
    try:
        check_size(config.learn, config.max_drop, config.delta)
    except CalibrationError as error:
        raise ConfigError(f"learn={config.learn}: {error}") from error
    if config.max_entries is not None and config.max_entries < config.learn:
        raise ConfigError(
            f"max_entries={config.max_entries}: some of the learn={config.learn} requests would be evicted before "
            "they could serve; raise it, or lower learn"
        )


def _may_drop_sources(policy: type[Policy]) -> bool:
    """Whether this policy may evict entries within the budget, or recompute them."""
    return policy.lets_entries_leave_early or policy.checks_reuse
