"""`llmcache repl`: a conversation with a model that is loaded once and remembers what it computed."""

import io
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcache.cli import options
from llmcache.cli.table import show_table
from llmcache.errors import RequestError

if TYPE_CHECKING:
    from llmcache import LLMCache
    from llmcache.generation import Chat, LatencySummary

_PROMPT = "> "


def command(
    model: options.Model,
    system: Annotated[str | None, typer.Option(help="What is said before the first question.")] = None,
    truncate: options.TruncateOption = "error",
    max_new_tokens: options.MaxNewTokens = options.MAX_NEW_TOKENS,
    do_sample: options.DoSample = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    repetition_penalty: options.Penalty = None,
    seed: options.Seed = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Tell of each request what came from where.")] = False,
    models_dir: options.ModelsDir = None,
) -> None:
    """Talk to a model. Its cache serves what prompts have in common; /help lists commands.

    Ctrl-C ends an answer, which is forgotten then with its question; at the prompt it ends the conversation.
    """
    sampling = options.make_sampling(max_new_tokens, do_sample, temperature, top_k, top_p, repetition_penalty, seed)
    from llmcache import LLMCache
    from llmcache.generation import Chat
    from llmcache.models.loading import load_causal

    loaded = load_causal(model, models_dir)
    with LLMCache.wrap(loaded.model, tokenizer=loaded.tokenizer) as cache:
        chat = Chat(loaded.model, loaded.tokenizer, sampling, system=system, truncate=truncate, name=model)
        _Talk(chat, cache, verbose).run()


class _Talk:
    """Reads lines and answers them until the end."""

    def __init__(self, chat: "Chat", cache: "LLMCache", is_verbose: bool) -> None:
        from llmcache.generation import Latencies

        self._chat = chat
        self._cache = cache
        self._is_verbose = is_verbose
        self._latencies = Latencies()
        self._is_over = False
        self._kv_nbytes = 0
        self._commands: Mapping[str, tuple[str, Callable[[], None]]] = {
            "/stats": ("what was served from memory so far, and how long first tokens took", self._show_stats),
            "/clear": ("forget the conversation; what was computed stays known", self._clear),
            "/quit": ("end the conversation", self._quit),
            "/help": ("this list", self._help),
        }

    def run(self) -> None:
        """Ask for lines; an end of input ends it, as /quit does."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused as any other prompt
        while not self._is_over:
            try:
                line = input(_PROMPT).strip()
            except (EOFError, KeyboardInterrupt):
                typer.echo()
                return
            if line in self._commands:
                self._commands[line][1]()
            elif line.startswith("/"):
                typer.echo(f"llmcache: no command {line!r}; those there are:", err=True)
                self._help()
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
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
            if answer is None:  # before it began
                return
        typer.echo()
        turn = self._chat.turn()
        self._kv_nbytes = turn.generation.kv_nbytes
        if turn.generation.times is not None:
            self._latencies.add(turn.generation.times, turn.generation.rung)
        if self._is_verbose:
            typer.echo(options.told(turn))
        elif cut := options.cuts(turn):
            typer.echo(f"llmcache: {cut}", err=True)

    def _show_stats(self) -> None:
        stats = self._cache.stats()
        figures = {
            "requests": stats.n_requests,
            "of these answered from a known prompt": stats.hits.get("exact", 0),
            "prompt tokens": stats.n_prompt_tokens,
            "prompt tokens from a stored prefix": stats.n_prefix_tokens,
            "prompts known": len(self._chat.prompts),
            "blocks held": stats.n_blocks,
            "bytes held": stats.held_nbytes,
            "K/V bytes of the last answer": self._kv_nbytes,
        }
        show_table("Remembered", [{"figure": name, "value": value} for name, value in figures.items()])
        rows = [_times(rung, found) for rung, found in self._latencies.summary().items()]
        if rows:
            typer.echo()
            show_table("Medians by what served the prompt, milliseconds", rows)

    def _clear(self) -> None:
        self._chat.clear()
        typer.echo("cleared")

    def _quit(self) -> None:
        self._is_over = True

    def _help(self) -> None:
        for name, (what, _) in self._commands.items():
            typer.echo(f"{name:<8}{what}")


def _times(rung: str, found: "LatencySummary") -> dict[str, Any]:
    spreads = {"ttft": found.ttft, "tpot": found.tpot, "e2el": found.e2el}
    medians = {name: None if spread is None else 1e3 * spread.median for name, spread in spreads.items()}
    return {"served by": rung, "requests": found.n_requests, **medians}
