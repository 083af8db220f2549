"""A conversation with a model, its history, and a prompt cache.

A turn's prompt is the history and the new question. It begins with the previous prompt, so on a wrapped model the
prefix rung serves that part. The prompt cache serves the token ids of a prompt that is repeated as a whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from llmcache.errors import RequestError
from llmcache.generation.detokenizer import Detokenizer
from llmcache.generation.kv_caches import context_length
from llmcache.generation.prompt_cache import Message, Prompt, PromptCache, Truncate
from llmcache.generation.results import Generation
from llmcache.generation.sampling import Sampling
from llmcache.generation.stream import Stream, stream
from llmcache.generation.validation import decoder_config

_KEPT = 0.75  # share of the room that is filled after turns are dropped, so that the next turns share a prefix again


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer.

    Attributes:
        text: The answer as far as it was read.
        prompt: The prompt: the history and the question.
        encode_s: Seconds to format and tokenise the prompt.
        generation: Tokens, times, and the rung that served the prefill.
        n_forgotten: Turns dropped from the history to make room for this one.
    """

    text: str
    prompt: Prompt
    encode_s: float
    generation: Generation
    n_forgotten: int = 0


@dataclass(eq=False, repr=False)
class Answer(Iterator[str]):
    """Yields an answer as pieces of text. Not added to the history unless read to its end. One thread at a time."""

    question: str
    prompt: Prompt
    encode_s: float
    kept: Sequence[Message]  # the part of the history that is in the prompt
    _tokens: Stream
    _detokenizer: Detokenizer
    text: str = ""
    is_whole: bool = False

    def __next__(self) -> str:
        """Return the next piece, which no later token changes."""
        while not self.is_whole:
            token = next(self._tokens, None)
            if token is None and self._tokens.stopped_by is None:
                break  # closed or interrupted: the answer has no end
            self.is_whole = token is None
            piece = self._detokenizer.rest() if token is None else self._detokenizer.add(token.id)
            self.text += piece
            if piece:
                return piece
        raise StopIteration

    def close(self) -> None:
        """Stop the generation."""
        self._tokens.close()

    def generation(self) -> Generation:
        """Return the tokens and times so far."""
        return self._tokens.generation()


class Chat:
    """A conversation. One thread at a time.

    With a chat template, the history is formatted as its messages; without one, their contents are joined by newlines.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        sampling: Sampling | None = None,
        *,
        system: str | None = None,
        truncate: Truncate = "error",
    ) -> None:
        """Begin a conversation.

        Args:
            model: A causal language model in eval mode, wrapped or not.
            tokenizer: Its tokenizer.
            sampling: How tokens are chosen; None: greedy.
            system: System message before the first question; None: none.
            truncate: If a prompt exceeds the model's context less `max_new_tokens`: `error` raises, `left` drops the
                oldest turns, more than necessary, so that the next turns share a prefix. A question that is too long by
                itself is cut on the left; see `PromptCache`.

        Raises:
            RequestError: The context has no room for a prompt beside `max_new_tokens`.
            UnsupportedModelError: The model is not a causal language model.
        """
        self._model, self._tokenizer, self._system = model, tokenizer, system
        self._sampling = sampling or Sampling()
        room, n_new = context_length(decoder_config(model)), self._sampling.max_new_tokens
        if room is not None and room <= n_new:
            left = f"the model's context has {room} tokens, which leaves none for a prompt"
            raise RequestError(f"max_new_tokens={n_new}: {left}; lower it")
        self._longest = None if room is None else room - n_new
        self.prompts = PromptCache(tokenizer, self._longest, truncate)
        self.clear()

    @property
    def history(self) -> Sequence[Message]:
        """Messages so far, oldest first: dicts of `role` and `content`."""
        return tuple(dict(message) for message in self._history)

    def clear(self) -> None:
        """Reset the history to the system message. The prompt cache and stored prefixes are kept."""
        self._open: Answer | None = None  # answer to the last question, until `turn` is called
        self._history: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]

    def ask(self, text: str) -> Answer:
        """Ask a question. The answer is computed while it is read; `turn` then adds both to the history.

        Raises:
            RequestError: The prompt cannot be answered; see `PromptCache.encode` and `stream`.
        """
        if not isinstance(text, str):
            raise RequestError(f"ask with a text (got {type(text).__name__})")
        started = perf_counter()
        self._open = None
        prompt, kept = self._encode({"role": "user", "content": text})
        encode_s = perf_counter() - started
        ids = torch.tensor([prompt.ids], device=next(self._model.parameters()).device)
        tokens = stream(self._model, ids, self._sampling)
        self._open = Answer(text, prompt, encode_s, kept, tokens, Detokenizer(self._tokenizer, prompt.ids))
        return self._open

    def turn(self) -> Turn:
        """End the last question's answer and return both; added to the history if the answer was read to its end.

        Raises:
            RequestError: No question was asked since the last turn.
        """
        if self._open is None:
            raise RequestError("nothing was asked: call ask() and read its answer first")
        answer, self._open = self._open, None
        answer.close()
        n_forgotten = (len(self._history) - len(answer.kept)) // 2
        if answer.is_whole:
            said = [{"role": "user", "content": answer.question}, {"role": "assistant", "content": answer.text}]
            self._history = [*answer.kept, *said]
        return Turn(answer.text, answer.prompt, answer.encode_s, answer.generation(), n_forgotten)

    def _encode(self, question: Message) -> tuple[Prompt, Sequence[Message]]:
        """Return the prompt of a question, and the history that fits in it."""
        whole = self._prompt([*self._history, question])
        if not whole.n_dropped:
            return whole, self._history
        assert self._longest is not None
        first, end = 0 if self._system is None else 1, len(self._history)
        for kept_from in range(first + 2, end + 1, 2):
            kept = self._history[:first] + self._history[kept_from:]
            prompt = self._prompt([*kept, question])
            if not prompt.n_dropped and (kept_from == end or len(prompt.ids) <= _KEPT * self._longest):
                return prompt, kept
        return whole, self._history  # the question is too long by itself: the history stays, the prompt is cut

    def _prompt(self, messages: Sequence[Message]) -> Prompt:
        """Encode messages by the chat template; without one, their contents as one text."""
        text = "\n".join(str(message["content"]) for message in messages)
        return self.prompts.encode(messages if self._tokenizer.chat_template else text)
