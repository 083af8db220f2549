"""A conversation with a model: its history, the prompt cache before it, the prefix rung beneath it.

A turn's prompt is the history and what is asked now. Its beginning was a prompt before, so that on a wrapped model the
prefix rung serves it; a prompt that was asked as it is, the prompt cache knows whole.
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

_KEPT = 0.75  # of the room, after turns were forgotten: the next few then begin alike again, which prefixes live on


@dataclass(frozen=True, slots=True)
class Turn:
    """What became of a question.

    Attributes:
        text: The answer, as far as it was made.
        prompt: The question with all that came before it.
        encode_s: Seconds until the prompt's tokens were known.
        generation: Tokens, times, and what served the prefill.
        n_forgotten: Turns that were dropped from the conversation to make room for this one.
    """

    text: str
    prompt: Prompt
    encode_s: float
    generation: Generation
    n_forgotten: int = 0


class Answer(Iterator[str]):
    """An answer as it is made: pieces of text. Closed or interrupted, it is not remembered. One thread at a time."""

    def __init__(
        self,
        question: str,
        prompt: Prompt,
        encode_s: float,
        kept: Sequence[Message],
        tokens: Stream,
        detokenizer: Detokenizer,
    ) -> None:
        """Answer `question` from `tokens`; see `Turn`. `kept` is the history that the prompt has."""
        self.question, self.prompt, self.encode_s, self.kept = question, prompt, encode_s, kept
        self._tokens = tokens
        self._detokenizer = detokenizer
        self.text = ""
        self.is_whole = False

    def __next__(self) -> str:
        """The next piece, which no later token changes."""
        while not self.is_whole:
            token = next(self._tokens, None)
            self.is_whole = token is None
            piece = self._detokenizer.rest() if token is None else self._detokenizer.add(token.id)
            self.text += piece
            if piece:
                return piece
        raise StopIteration

    def close(self) -> None:
        """End it before its end."""
        self._tokens.close()

    def generation(self) -> Generation:
        """What became of it so far."""
        return self._tokens.generation()


class Chat:
    """A conversation. One thread at a time.

    Where the tokenizer has a chat template, turns are its messages; without one, what was said is one text, by lines.
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
            system: What is said before the first question.
            truncate: What is done about a history that the model has no room for: an error, or the oldest turns are
                forgotten (`left`), some more than need be. A question that has no room by itself is cut; see
                `PromptCache`.

        Raises:
            RequestError: The context has no room for a prompt beside `max_new_tokens`.
            UnsupportedModelError: The model is no causal language model.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling or Sampling()
        self._system = system
        room = context_length(decoder_config(model))
        if room is not None and room <= self._sampling.max_new_tokens:
            raise RequestError(
                f"max_new_tokens={self._sampling.max_new_tokens}: the model's context has {room} tokens, which leaves "
                "none for a prompt; ask for fewer"
            )
        self._longest = None if room is None else room - self._sampling.max_new_tokens
        self.prompts = PromptCache(tokenizer, self._longest, truncate)
        self._history: list[Message] = []
        self._open: Answer | None = None  # of the last question, until its turn
        self.clear()

    @property
    def history(self) -> Sequence[Message]:
        """What was said, oldest first: messages of `role` and `content`."""
        return tuple(dict(message) for message in self._history)

    def clear(self) -> None:
        """Begin anew, with what the system says; prompts and prefixes stay known."""
        self._open = None
        self._history = [] if self._system is None else [{"role": "system", "content": self._system}]

    def ask(self, text: str) -> Answer:
        """Ask a question; the answer is computed while it is read, and remembered with it when it was read to its end.

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
        """What became of the last question; remembered if its answer is whole.

        Raises:
            RequestError: None was asked since the last turn.
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
        """The prompt of a question, and the history that it has room for."""
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
        return whole, self._history  # a question that has no room by itself takes none from what was said before

    def _prompt(self, messages: Sequence[Message]) -> Prompt:
        """The messages by the chat template; without one, their contents as one text."""
        text = "\n".join(str(message["content"]) for message in messages)
        return self.prompts.encode(messages if self._tokenizer.chat_template else text)
