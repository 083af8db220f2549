"""Every error this library raises on purpose; each says what was wrong, and what to do about it."""


class LLMCacheError(Exception):
    """Root of every error meant for the user."""


class ConfigError(LLMCacheError, ValueError):
    """A setting is unknown, out of range or contradicts another."""


class UnsafeReuseError(ConfigError):
    """Whole-sequence reuse of a different input was asked for on a head that answers token by token."""


class RequestError(LLMCacheError, ValueError):
    """A prompt, or what is to follow it, that the model cannot run: nothing was computed that could be wrong."""


class NotCachedError(LLMCacheError, LookupError):
    """A call within `LLMCache.only_if_cached` that the cache cannot answer; the model's layers were not run.

    Attributes:
        rows: Numbers of the rows that it cannot, in order; None where that is true of the call as a whole.
    """

    def __init__(self, rows: tuple[int, ...] | None = None) -> None:
        """Say of which rows."""
        which = "this call" if rows is None else f"row {', '.join(map(str, rows))} of this call"
        super().__init__(f"only_if_cached: {which} is not in the cache; call the model outside of it")
        self.rows = rows


class CalibrationError(LLMCacheError, ValueError):
    """The requests cannot carry the claim, or the metric failed on them. The cache stays as it was."""


class UnsupportedModelError(LLMCacheError, TypeError):
    """The model's layers could not be found."""


class WrapError(LLMCacheError, RuntimeError):
    """The model is in the wrong state for this: already wrapped, or copied while wrapped."""


class StoreError(LLMCacheError, RuntimeError):
    """A store failed to read or write. Inside a call it costs speed only."""


class BankFileError(LLMCacheError, ValueError):
    """A saved cache cannot be used: missing parts, damaged, or made by other weights."""


class UnfitBankError(BankFileError):
    """A saved cache is whole, and of no use here: of other weights, another tokenizer, or another version of this."""
