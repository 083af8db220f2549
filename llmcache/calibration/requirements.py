"""Refuses models and settings under which approximate reuse cannot have a bound."""

from llmcache.calibration.calibration import check_size
from llmcache.config import CacheConfig
from llmcache.errors import CalibrationError, ConfigError, UnsafeReuseError
from llmcache.models.heads import Head
from llmcache.policies import POLICIES, Policy


def refuse_unsafe(what: str, head: Head, config: CacheConfig) -> None:
    """Refuse approximate reuse under a head whose answers it would replace by those of another input."""
    if not head.why_unsafe or config.allow_unsafe:
        return
    raise UnsafeReuseError(
        f"{what} with a model that has a {head.name}: reusing a layer's whole output replaces everything "
        f"above it by what the stored request computed. {head.why_unsafe} Leave tau out (exact repeats are still "
        "served), or set allow_unsafe=True to measure what that costs."
    )


def refuse_coupled(what: str, coupling: str) -> None:
    """Refuse approximate reuse under a model in which rows of a call affect each other, for the reason given."""
    if coupling:
        raise ConfigError(
            f"{what} with a model in which requests of a batch affect each other: {coupling}. What a stored request "
            "was answered rests on those beside it: leave this out (repeats of whole calls are still served)"
        )


def check_settings(head: Head, config: CacheConfig) -> None:
    """Refuse settings under which no bound could be kept."""
    if config.tau is not None:
        raise ConfigError(
            f"tau={config.tau} is your own choice of what may be reused; to have it calibrated, wrap without tau"
        )
    refuse_unsafe("a calibration", head, config)
    if head.name == "multiple-choice head":
        raise ConfigError("a multiple-choice head answers several rows together: it cannot be calibrated row by row")
    if not config.serves_exact:
        raise ConfigError(
            "exact=False: a calibration counts on repeats being served from their own states; leave it out"
        )
    if _lets_leave(POLICIES.find(config.policy.name)):
        staying = sorted(name for name, policy in POLICIES.items() if not _lets_leave(policy))
        raise ConfigError(
            f"policy={config.policy.name!r}: the requests that a calibration rests on stay; use one of "
            f"{', '.join(staying)}"
        )
    if config.learn is None:
        return
    try:
        check_size(config.learn, config.max_drop, config.delta)
    except CalibrationError as error:
        raise ConfigError(f"learn={config.learn}: {error}") from error
    if config.max_entries is not None and config.max_entries < config.learn:
        raise ConfigError(
            f"max_entries={config.max_entries}: some of the learn={config.learn} requests would have left before they "
            "could serve; raise it, or lower learn"
        )


def _lets_leave(policy: type[Policy]) -> bool:
    """Whether entries may leave before the budget is used up, or be recomputed, under this policy."""
    return policy.lets_entries_leave_early or policy.checks_reuse
