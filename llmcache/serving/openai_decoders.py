"""OpenAI's routes for decoders in vLLM's dialect: `/v1/completions` and `/v1/chat/completions`.

An answer served from the cache has the same tokens as a computed one and streams in the same chunks.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import accumulate, chain, product
from time import time
from typing import Any, Final, NamedTuple
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.sse import EventSourceResponse, format_sse_event

from llmcache.generation import StoppedBy, Token
from llmcache.generation.detokenizer import Detokenizer
from llmcache.serving.bodies import BodyRoute, cache_headers
from llmcache.serving.decoder import Decoder, Prompt
from llmcache.serving.detokenizing import StopTexts, TokenTexts
from llmcache.serving.flights import Arrived, Generating, Ids
from llmcache.serving.front import unless_gone
from llmcache.serving.openai_schemas import ChatRequest, CompletionRequest, GenerationRequest
from llmcache.serving.refusals import Refusal
from llmcache.serving.server import Server

router = APIRouter(tags=["openai"], route_class=BodyRoute)

_LOWEST: Final = -9999.0
_SHORT: Final = 16  # default of `max_tokens` for completions, as in OpenAI's API
_STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_Length = tuple[int | None, int | None, tuple[str, str]]  # arguments of `Decoder.n_new`


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Complete one or more prompts."""
    asked = 1 if body.max_tokens == 0 else body.max_tokens  # the token is made, and left out of the response
    length = (asked, _SHORT, ("prompt", "max_tokens"))
    return await _respond(body, request, body.prompts, length, _Completion)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation. It may contain calls of tools if the model's chat template writes them."""
    template = getattr(request.app.state.server.tokenizer, "chat_template", None)
    if template and any(one.tool_calls for one in body.messages) and "tool_calls" not in str(template):
        raise Refusal("invalid", "messages: the model's chat template does not write `tool_calls`", param="messages")
    named = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    length = (body.max_completion_tokens or body.max_tokens, None, ("messages", named))
    return await _respond(body, request, [body.chat], length, _Chat)


class Delta(NamedTuple):
    """A piece of an answer: its text, its tokens, and, in the last piece, the finish reason."""

    text: str
    tokens: Sequence[Token]
    finish_reason: StoppedBy | None


class _Shape:
    """Builds the response objects of a route."""

    prefix: str
    whole: str
    chunk: str

    def __init__(self, server: Server, body: GenerationRequest) -> None:
        self._texts = None if body.n_logprobs is None else TokenTexts(server.tokenizer)

    def choice(self, index: int, answer: Delta, is_piece: bool = False) -> dict[str, Any]:
        """Return the choice object of a whole answer, or of a piece of a streamed one."""
        raise NotImplementedError

    def opened(self, index: int, answer: Generating, first: Delta) -> Delta:
        """Return the first piece of an answer, with all that comes before its first token."""
        return first

    def openings(self, n_answers: int) -> list[dict[str, Any]]:
        """Return the choice objects that open streamed answers, if the route has any."""
        return []


class _Completion(_Shape):
    """Response objects of `/v1/completions`."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, server: Server, body: GenerationRequest) -> None:
        super().__init__(server, body)
        assert isinstance(body, CompletionRequest)
        self._body, self._tokenizer = body, server.tokenizer
        self._n_characters: Counter[int] = Counter()  # characters so far, by answer

    def opened(self, index: int, answer: Generating, first: Delta) -> Delta:
        if not self._body.echo:
            return first
        prompt = self._body.prompts[index // (self._body.n or 1)]
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
        begin = [Token(answer.prompt[0], math.nan, (), 0.0), *answer.scored] if self._body.is_scored else []
        if self._body.max_tokens == 0:
            return Delta(text, begin, "length")
        return Delta(text + first.text, [*begin, *first.tokens], first.finish_reason)

    def choice(self, index: int, answer: Delta, is_piece: bool = False) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs(index, answer.tokens),
            "finish_reason": answer.finish_reason,
        }

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._texts is None:
            return None
        texts = [self._texts.text(token.id) for token in tokens]
        *offsets, self._n_characters[index] = accumulate(map(len, texts), initial=self._n_characters[index])
        return {
            "tokens": texts,
            "token_logprobs": [None if math.isnan(token.logprob) else _finite(token.logprob) for token in tokens],
            "top_logprobs": [None if math.isnan(token.logprob) else self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float]:
        """Return log-probabilities by text of the likeliest tokens and the chosen one; the likeliest per text."""
        assert self._texts is not None
        found: dict[str, float] = {}
        for one, logprob in (*token.top, (token.id, token.logprob)):
            found.setdefault(self._texts.text(one), _finite(logprob))
        return found


def _finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold: at least -9999, as OpenAI's API returns for probability 0."""
    return max(logprob, _LOWEST)


class _Chat(_Shape):
    """Response objects of `/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, answer: Delta, is_piece: bool = False) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        said = {"delta": {"content": answer.text} if answer.text else {}} if is_piece else {"message": message}
        ended = {"logprobs": self._logprobs(answer.tokens), "finish_reason": answer.finish_reason}
        return {"index": index, **said, **ended}

    def openings(self, n_answers: int) -> list[dict[str, Any]]:
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [{"index": index, **opening} for index in range(n_answers)]

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._texts is None:
            return None
        entry = self._entry
        content = [entry(one.id, one.logprob) | {"top_logprobs": [entry(*top) for top in one.top]} for one in tokens]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        assert self._texts is not None
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": self._texts.utf8(token)}


class _Answers:
    """The answers of one request, `n` for each prompt, with the fields that all its chunks share."""

    def __init__(self, server: Server, body: GenerationRequest, shape: _Shape, check_key: Callable[[], None]) -> None:
        self._server, self._body, self._shape, self._check_key = server, body, shape, check_key
        self._answers: list[Generating] = []
        self._arrived: Arrived = asyncio.Queue()
        self._opened = set[int]()  # answers of which a piece was returned
        self._n_made = 0
        self._id = f"{shape.prefix}-{uuid4().hex}"
        self._created = int(time())

    def start(self, decoder: Decoder, namespace: str, prompts: Sequence[Ids], length: _Length) -> None:
        """Start `n` answers for each prompt, with consecutive seeds."""
        most = [decoder.n_new(len(prompt), *length) for prompt in prompts]  # refuses before any has begun
        for (prompt, n), seed in product(zip(prompts, most, strict=True), self._body.seeds()):
            sampling = self._body.sampling(n, seed, decoder.eos_ids, decoder.vocabulary)
            self._answers.append(decoder.start(prompt, sampling, namespace, self._arrived))

    async def whole(self) -> dict[str, Any]:
        """Return the complete response object after all answers have ended."""
        parts: list[list[Delta]] = [[] for _ in self._answers]
        async for index, delta in self.deltas():
            parts[index].append(delta)
        choices = []
        for index, deltas in enumerate(parts):
            texts, tokens, reasons = zip(*deltas, strict=True)
            answer = Delta("".join(texts), [*chain(*tokens)], reasons[-1])
            choices.append(self._shape.choice(index, answer))
        return self._object(self._shape.whole, choices) | {"usage": self.usage()}

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield pieces of all answers as they arrive, each with the index of its answer."""
        texts = [_StoppableText(answer, self._server.tokenizer, self._body.stops) for answer in self._answers]
        try:
            while not all(answer.is_over for answer in self._answers):
                answer, item = await self._arrived.get()
                self._check_key()
                if answer.is_over:  # ended at a stop text
                    continue
                index = self._answers.index(answer)
                delta = texts[index].add(*answer.take(item))
                if delta is not None:
                    self._n_made += 0 if self._body.max_tokens == 0 else len(delta.tokens)
                    delta = delta if index in self._opened else self._shape.opened(index, answer, delta)
                    self._opened.add(index)
                    yield index, delta
        finally:
            self.close()

    async def events(self, first: tuple[int, Delta], rest: AsyncGenerator[tuple[int, Delta]]) -> AsyncGenerator[bytes]:
        """Yield all answers as encoded server-sent events; `first` and `rest` come from `deltas`."""
        try:
            for opening in self._shape.openings(len(self._answers)):
                yield self._event([opening])
            yield self._event([self._shape.choice(*first, is_piece=True)])
            async for index, delta in rest:
                yield self._event([self._shape.choice(index, delta, is_piece=True)])
            if self._body.includes_usage:
                yield self._event([], usage=self.usage())
            yield format_sse_event(data_str="[DONE]")
        except Refusal as refusal:
            yield format_sse_event(event="error", data_str=json.dumps(refusal.body("openai")))

    def usage(self) -> dict[str, Any]:
        """Return the `usage` object; a prompt's tokens count once, whatever `n`."""
        prompts = self._answers[:: self._body.n or 1]
        n_prompt, n_made = sum(answer.n_prompt for answer in prompts), self._n_made
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_made, "total_tokens": n_prompt + n_made}
        details = {"prompt_tokens_details": {"cached_tokens": sum(answer.n_cached for answer in prompts)}}
        return usage | (details if self._server.settings.reveal_hits else {})

    def close(self) -> None:
        """End all answers. Idempotent."""
        for answer in self._answers:
            answer.close()

    def headers(self) -> dict[str, str]:
        """Return `X-Cache` headers if the setting `reveal_hits` is on."""
        if not self._server.settings.reveal_hits:
            return {}
        return cache_headers([answer.rung for answer in self._answers[:: self._body.n or 1]])

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        usage_field = {"usage": usage} if self._body.includes_usage else {}
        return format_sse_event(data_str=json.dumps(self._object(self._shape.chunk, choices) | usage_field))

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        named = {"id": self._id, "object": kind, "created": self._created, "model": self._server.name}
        return {**named, "choices": choices}


class _Events(EventSourceResponse):
    """Event stream that closes its generator and its answers however it ends."""

    def __init__(self, content: AsyncGenerator[bytes], headers: dict[str, str], close: Callable[[], None]) -> None:
        super().__init__(content, headers=headers)
        self._content = content
        self._close = close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
            await self._content.aclose()


class _StoppableText:
    """Turns an answer's tokens into text and ends it before the first stop text."""

    def __init__(self, answer: Generating, tokenizer: Any, stops: Sequence[str]) -> None:
        self._answer = answer
        self._detokenizer, self._finder = Detokenizer(tokenizer, answer.prompt), StopTexts(stops)
        self._tokens: list[Token] = []  # tokens since the last piece

    def add(self, token: Token, stopped_by: StoppedBy | None) -> Delta | None:
        """Add a token; return the next piece if there is text to send or the answer ends, else None."""
        self._tokens.append(token)
        piece = "" if stopped_by == "stop" else self._detokenizer.add(token.id)  # a stop token has no text
        if stopped_by is not None:
            piece += self._detokenizer.rest()
        text, is_found = self._finder.add(piece)
        if is_found:
            self._answer.stop()
            stopped_by = "stop"
        elif stopped_by is not None:
            text += self._finder.rest()
        elif not text:
            return None
        tokens, self._tokens = self._tokens, []
        return Delta(text, tokens, stopped_by)


async def _respond(
    body: GenerationRequest, request: Request, prompts: Sequence[Prompt], length: _Length, shape: type[_Shape]
) -> Response:
    """Answer prompts, whole or as a stream. A stream starts with the first text: earlier errors have an HTTP status."""
    server: Server = request.app.state.server
    server.check_name(body.model)
    server.needs("decoder")
    body.check()
    most, decoder, namespace = server.max_inputs, server.decoder, request.state.tenant.namespace
    if len(prompts) * (body.n or 1) > most:
        text = f"prompts and their answers (n) are at most {most} together (--max-client-batch-size)"
        raise Refusal("too_large", text, param="n")
    assert decoder is not None
    ids = [await decoder.encode(prompt, namespace) for prompt in prompts]
    keys, tenant = request.app.state.keys, request.state.tenant
    asked = _Answers(server, body, shape(server, body), lambda: keys and keys.check(tenant))
    try:
        asked.start(decoder, namespace, ids, length)
        if not body.stream:
            whole = await unless_gone(request, asked.whole())
            return JSONResponse(whole, headers=asked.headers())
        deltas = asked.deltas()
        first = await unless_gone(request, anext(deltas))
    except BaseException:
        asked.close()
        raise
    return _Events(asked.events(first, deltas), _STREAM_HEADERS | asked.headers(), asked.close)
