"""`llmcache repl`: a conversation with a model loaded here and cached, or with a server."""

import io
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcache.cli import options
from llmcache.cli.table import show_table
from llmcache.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from llmcache import LLMCache
    from llmcache.cli.remote import RemoteChat, RemoteTurn
    from llmcache.generation import Chat, LatencySummary, Sampling

_PROMPT = "> "
_HELP = """\
/stats  show hits so far, and times to the first token
/clear  start a new conversation; the cache keeps its entries
/quit   end the conversation
/help   show this list"""


@options.taking(options.SAMPLING)
def command(
    *,
    model: Annotated[
        str | None,
        typer.Option(help="A causal language model: a folder, or a name on the hub; with --url its name there."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Talk to a server with OpenAI's chat completions.")] = None,
    key: Annotated[str | None, typer.Option(envvar="LLMCACHE_KEY", help="API key for that server.")] = None,
    system: Annotated[str | None, typer.Option(help="System message before the first question.")] = None,
    truncate: options.TruncateOption = "error",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print hits and timings of each request.")] = False,
    models_dir: options.ModelsDir = None,
    **drawn: Any,
) -> None:
    """Talk to a model. The cache serves shared prefixes of prompts; /help lists commands.

    Ctrl-C interrupts an answer and drops it with its question; at the prompt it ends the conversation.
    """
    sampling = options.make_sampling(**drawn)
    if url is not None:
        from llmcache.cli.remote import RemoteChat

        if truncate != "error":
            raise ConfigError(f"truncate={truncate!r} has no effect on a server, which refuses what is too long")
        remote = RemoteChat(url, key, ({} if model is None else {"model": model}) | _request_fields(sampling), system)
        talk = _RemoteTalk(remote, verbose)
        _converse(talk.answer, talk.show_stats, remote.clear)
        return
    if model is None:
        raise ConfigError("give --model, or --url of a server")
    from llmcache import LLMCache
    from llmcache.generation import Chat
    from llmcache.models.loading import load_causal

    loaded = load_causal(model, models_dir)
    with LLMCache.wrap(loaded.model, tokenizer=loaded.tokenizer) as cache:
        chat = Chat(loaded.model, loaded.tokenizer, sampling, system=system, truncate=truncate)
        own = _LocalTalk(chat, cache, verbose)
        _converse(own.answer, own.show_stats, chat.clear)


def _converse(answer: Callable[[str], None], show_stats: Callable[[], None], clear: Callable[[], None]) -> None:
    """Read commands and questions, line by line, until the end of input or /quit."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused like other bad prompts
    while True:
        try:
            line = input(_PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if line == "/quit":
            return
        if line == "/stats":
            show_stats()
        elif line == "/clear":
            clear()
            typer.echo("cleared")
        elif line.startswith("/"):
            if line != "/help":
                typer.echo(f"llmcache: no command {line!r}; the commands are:", err=True)
            typer.echo(_HELP)
        elif line:
            answer(line)


class _LocalTalk:
    """A conversation with a model loaded here."""

    def __init__(self, chat: "Chat", cache: "LLMCache", is_verbose: bool) -> None:
        from llmcache.generation import Latencies

        self._chat = chat
        self._cache = cache
        self._is_verbose = is_verbose
        self._latencies = Latencies()
        self._kv_nbytes = 0

    def answer(self, line: str) -> None:
        """Print the answer to a question, and its source."""
        answer = None
        try:
            answer = self._chat.ask(line)
            for piece in answer:
                typer.echo(piece, nl=False)
        except RequestError as error:
            typer.echo(f"llmcache: {error}", err=True)
            return
        except KeyboardInterrupt:
            typer.echo(" ... interrupted", nl=answer is None)
            if answer is None:  # before the answer began
                return
        typer.echo()
        turn = self._chat.turn()
        self._kv_nbytes = turn.generation.kv_nbytes
        if turn.generation.times is not None:
            self._latencies.add(turn.generation.times, turn.generation.rung)
        options.show_turn(turn, self._is_verbose)

    def show_stats(self) -> None:
        """Print hits and times to the first token."""
        stats = self._cache.stats()
        figures = {
            "requests": stats.n_requests,
            "requests whose whole prompt was stored": stats.hits.get("exact", 0),
            "prompt tokens": stats.n_prompt_tokens,
            "prompt tokens computed": stats.n_computed_tokens,
            "prompt tokens saved": stats.n_saved_tokens,
            "tokenised prompts held": len(self._chat.prompts),
            "blocks held": stats.n_blocks,
            "bytes held": stats.held_nbytes,
            "bytes of blocks at most": stats.prefix_max_nbytes,
            "K/V bytes of the last answer": self._kv_nbytes,
        }
        _show_figures("Cache", figures)
        rows = [_latency_row(rung, found) for rung, found in self._latencies.summary().items()]
        if rows:
            typer.echo()
            show_table("Medians by what served the prompt, milliseconds", rows)


class _RemoteTalk:
    """A conversation with a model on a server."""

    def __init__(self, chat: "RemoteChat", is_verbose: bool) -> None:
        self._chat = chat
        self._is_verbose = is_verbose

    def answer(self, line: str) -> None:
        """Print the answer to a question, and the server's token counts if verbose."""
        has_text = False
        try:
            for piece in self._chat.ask(line):
                typer.echo(piece, nl=False)
                has_text = True
        except (RequestError, OSError) as error:
            typer.echo(nl=has_text)
            typer.echo(f"llmcache: {error}", err=True)
            return
        except KeyboardInterrupt:
            typer.echo(" ... interrupted")
            return
        typer.echo()
        if self._is_verbose:
            typer.echo(_summary(self._chat.turns[-1]))

    def show_stats(self) -> None:
        """Print the token counts that the server reported for this conversation."""
        turns = self._chat.turns
        firsts = [turn.first_s for turn in turns if turn.first_s is not None]
        figures = {
            "requests": len(turns),
            "prompt tokens": sum(turn.n_prompt or 0 for turn in turns),
            "prompt tokens not computed": sum(turn.n_cached or 0 for turn in turns),
            "answer tokens": sum(turn.n_made or 0 for turn in turns),
            "median time to the first text, milliseconds": 1e3 * statistics.median(firsts) if firsts else None,
        }
        _show_figures("This conversation", figures)


def _show_figures(title: str, figures: Mapping[str, float | None]) -> None:
    show_table(title, [{"figure": name, "value": value} for name, value in figures.items()])


def _request_fields(sampling: "Sampling") -> dict[str, Any]:
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    asked = {
        "max_tokens": sampling.max_new_tokens,
        "seed": sampling.seed,
        "repetition_penalty": sampling.repetition_penalty,
        **(drawn if sampling.do_sample else {"temperature": 0}),
    }
    defaults = {"repetition_penalty": 1.0}
    return {name: value for name, value in asked.items() if value is not None and value != defaults.get(name)}


def _summary(turn: "RemoteTurn") -> str:
    """Return one line with a turn's token counts and times."""
    prompt = "prompt of unknown length" if turn.n_prompt is None else f"prompt {turn.n_prompt:,} tokens"
    cached = "" if turn.n_cached is None else f", {turn.n_cached:,} not computed"
    first = "" if turn.first_s is None else f"first text {1e3 * turn.first_s:.1f} ms, "
    made = "" if turn.n_made is None else f"{turn.n_made:,} tokens in "
    return f"[{prompt}{cached}; {first}{made}{1e3 * turn.whole_s:.0f} ms]"


def _latency_row(rung: str, found: "LatencySummary") -> dict[str, Any]:
    spreads = {"ttft": found.ttft, "tpot": found.tpot, "e2el": found.e2el}
    medians = {name: None if spread is None else 1e3 * spread.median for name, spread in spreads.items()}
    return {"served by": rung, "requests": found.n_requests, **medians}
