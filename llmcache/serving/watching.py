"""What is told of requests as they are served; `metrics` counts it."""

from typing import Final

#: What serves those who join a request in flight, beside the rungs.
IN_FLIGHT: Final = "in_flight"


class Watcher:
    """Told what becomes of requests; by itself it keeps nothing of it."""

    def served(self, rung: str | None, n_prompt_tokens: int, n_cached_tokens: int) -> None:
        """An input was answered, by a rung or, with None, by the model."""

    def tokenised(self, seconds: float) -> None:
        """The inputs of a request, or a prompt, have become tokens, in so long."""

    def computed(self, seconds: float) -> None:
        """An input was computed, in a batch that took so long."""

    def queued(self, seconds: float) -> None:
        """A request that is computed has waited."""

    def batch(self, n_requests: int, n_tokens: int) -> None:
        """A batch is computed."""

    def first_token(self, seconds: float) -> None:
        """The first token of an answer is there, so long after its request."""

    def inter_token(self, seconds: float) -> None:
        """Another one is, so long after the one before."""

    def generated(self, n: int) -> None:
        """So many tokens of answers are."""

    def inferred(self, prefill_s: float, decode_s: float) -> None:
        """A generation has ended: its first token took so long once it had a place, and all others together."""

    def finished(self, reason: str) -> None:
        """A request has come to its end."""

    def failed(self) -> None:
        """The model failed on an input or a generation."""

    def cancelled(self) -> None:
        """A client had gone before that."""
