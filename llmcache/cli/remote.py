"""A conversation with a server that has OpenAI's route `/v1/chat/completions`, for `llmcache repl --url`.

Uses only the standard library, so that a client of a server needs no extra packages. Redirects are not followed, so
that the key is sent to no other host.
"""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from llmcache.errors import ConfigError, RequestError

_TIMEOUT_S = 300.0  # longest time without a byte: servers send nothing while they compute a prompt
_ROUTE = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class RemoteTurn:
    """Token counts that the server reported for an answer (None if it did not), and times measured here."""

    n_prompt: int | None  # tokens of the prompt
    n_cached: int | None  # prompt tokens that were not computed
    n_made: int | None  # tokens of the answer
    first_s: float | None  # seconds to the first piece of text; None without text
    whole_s: float  # seconds to the last piece


class RemoteChat:
    """A conversation. Use it from one thread at a time."""

    def __init__(self, url: str, key: str | None, settings: Mapping[str, Any], system: str | None = None) -> None:
        """Prepare a conversation with the server at `url`, with or without `/v1`; nothing is sent yet.

        `settings` are added to the fields of each request. `key` is sent as a bearer token.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise ConfigError(f"url={url!r}: give the address of a server, such as http://127.0.0.1:8000")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("key: a key is printable ASCII")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._settings, self._system = host, port, settings, system
        self._path = parts.path.rstrip("/").removesuffix("/v1") + _ROUTE
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.turns: list[RemoteTurn] = []
        self.clear()

    def clear(self) -> None:
        """Start over with only the system message."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._history: list[dict[str, str]] = system

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer to a question in pieces; both join the conversation once the answer is read to its end.

        Raises:
            RequestError: The server refused the request, or its response is malformed.
            OSError: The server cannot be reached.
        """
        asked = [*self._history, {"role": "user", "content": text}]
        body = {**self._settings, "messages": asked, "stream": True, "stream_options": {"include_usage": True}}
        started, first_s, answer = perf_counter(), None, ""
        usage: dict[str, Any] = {}
        try:
            for chunk in self._chunks(body):
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content")
                    if piece:
                        first_s = perf_counter() - started if first_s is None else first_s
                        answer += piece
                        yield piece
        except (http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"the server did not answer as {_ROUTE} does ({type(error).__name__})") from error
        self._history = [*asked, {"role": "assistant", "content": answer}]
        n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        n_prompt, n_made = usage.get("prompt_tokens"), usage.get("completion_tokens")
        self.turns.append(RemoteTurn(n_prompt, n_cached, n_made, first_s, perf_counter() - started))

    def _chunks(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with closing(self._kind(self._host, self._port, timeout=_TIMEOUT_S)) as connection:
            connection.request("POST", self._path, json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise RequestError(_refusal_reason(response.status, response.read()))
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise RequestError(f"the server broke off: {chunk['error']['message']}")
                    yield chunk
            raise RequestError("the server broke off before the end of its answer")


def _refusal_reason(status: int, body: bytes) -> str:
    try:
        return f"the server refused it ({status}): {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server refused it ({status} {http.client.responses.get(status, '')})"
