"""Options shared by commands, and the printed summary of a request."""

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, ParamSpec, TypeAlias, TypeVar

import typer

if TYPE_CHECKING:
    from llmcache.generation import Sampling
    from llmcache.generation.chat import Turn

MODELS_VARIABLE = "LLMCACHE_MODELS"

ModelsDir: TypeAlias = Annotated[
    Path | None, typer.Option(envvar=MODELS_VARIABLE, help="Folder in which to look up models by name.")
]
Model: TypeAlias = Annotated[str, typer.Option(help="A causal language model: a folder, or a name on the hub.")]
Engine: TypeAlias = Annotated[
    str | None, typer.Option(help="What computes misses: eager, onnxruntime or auto; overrides --config.")
]
Draft: TypeAlias = Annotated[
    str | None, typer.Option(help="int8: also serve an int8 copy's answers, within the bound; overrides --config.")
]
TruncateOption: TypeAlias = Annotated[
    Literal["left", "error"], typer.Option(help="If a prompt is too long: drop its beginning, or fail.")
]

P = ParamSpec("P")
R = TypeVar("R")


def taking(parameters: Iterable[Parameter]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let typer see these options in place of a command's `**others`."""

    def decorate(command: Callable[P, R]) -> Callable[P, R]:
        *own, _ = signature(command).parameters.values()
        command.__signature__ = Signature([*own, *parameters])  # type: ignore[attr-defined]
        return command

    return decorate


def make_sampling(
    *,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 128,
    do_sample: Annotated[bool, typer.Option("--do-sample", help="Sample tokens; default: take the likeliest.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits. With --do-sample.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the K likeliest tokens. With --do-sample.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from this much probability. With --do-sample.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: less repetition.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
) -> "Sampling":
    """Return sampling settings from command-line options; None means the default."""
    from llmcache.generation import Sampling

    return Sampling(
        do_sample=do_sample,
        temperature=1.0 if temperature is None else temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )


#: Options of a command that passes them on to `make_sampling`.
SAMPLING = tuple(signature(make_sampling).parameters.values())


def show_turn(turn: "Turn", is_verbose: bool) -> None:
    """Print a summary of the request if `is_verbose`; else only what was left out of its prompt, if anything."""
    if is_verbose:
        typer.echo(_summary(turn))
    elif cut := _omissions(turn):
        typer.echo(f"llmcache: {cut}", err=True)


def _omissions(turn: "Turn") -> str:
    """Return what was left out of the prompt to fit the context; empty if nothing."""
    forgotten = f"oldest turns forgotten: {turn.n_forgotten:,}" if turn.n_forgotten else ""
    cut = f"cut off on the left: {turn.prompt.n_dropped:,} tokens" if turn.prompt.n_dropped else ""
    return ", ".join(part for part in (forgotten, cut) if part)


def _summary(turn: "Turn") -> str:
    """Return two lines on where the answer came from and how long it took."""
    prompt, made = turn.prompt, turn.generation
    n_prompt, n_reused = made.n_prompt, made.n_prompt if made.rung == "exact" else made.n_prefix
    cut = _omissions(turn)
    first = (
        f"prompt {'known' if prompt.is_hit else 'new'}, {n_prompt:,} tokens{cut and f', {cut}'}; "
        f"{n_reused:,} of {n_prompt:,} from the store ({made.rung or 'computed'})"
    )
    if made.times is None:
        return f"[{first}; no token]"
    times = made.times
    each = "" if times.tpot_s is None else f", each further one {1e3 * times.tpot_s:.1f} ms"
    return (
        f"[{first}]\n[encoding {1e3 * turn.encode_s:.1f} ms, first token {1e3 * times.ttft_s:.1f} ms{each}, "
        f"{len(made.tokens):,} tokens in {1e3 * times.e2el_s:.0f} ms, K/V {made.kv_nbytes / 1e6:.2f} MB]"
    )
