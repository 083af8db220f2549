"""The errors that this library raises. Each message says what is wrong and how to fix it."""


class LLMCacheError(Exception):
    """Base class of all errors meant for the user."""


class ConfigError(LLMCacheError, ValueError):
    """A setting is unknown, out of range or contradicts another."""


class UnsafeReuseError(ConfigError):
    """Approximate reuse was requested for a head that answers token by token."""


class RequestError(LLMCacheError, ValueError):
    """The model cannot run a prompt, or cannot continue it. No wrong result was returned."""


class NotCachedError(LLMCacheError, LookupError):
    """The cache cannot answer a call within `LLMCache.only_if_cached`. The model's layers were not run.

    Attributes:
        rows: Indices of the rows not in the cache, in order; None if the whole call bypasses the cache.
    """

    def __init__(self, rows: tuple[int, ...] | None = None) -> None:
        """Name the missing rows in the message."""
        which = "this call" if rows is None else f"row {', '.join(map(str, rows))} of this call"
        super().__init__(f"only_if_cached: {which} is not in the cache; call the model outside of it")
        self.rows = rows


class CalibrationError(LLMCacheError, ValueError):
    """The requests do not suffice for the claim, or the metric failed on them."""


class UnsupportedModelError(LLMCacheError, TypeError):
    """The model's layers could not be found."""


class WrapError(LLMCacheError, RuntimeError):
    """The model is in the wrong state: already wrapped, unwrapped, or its forward was replaced."""


class StoreError(LLMCacheError, RuntimeError):
    """A store failed to read or write. Within a call this costs speed only, and is not raised."""


class BankFileError(LLMCacheError, ValueError):
    """A saved cache cannot be used: it is incomplete, damaged, or does not fit (`UnfitBankError`)."""


class UnfitBankError(BankFileError):
    """A saved cache is intact but was made with other weights, another tokenizer, or another version of llmcache."""
