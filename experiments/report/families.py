"""Writes `docs/families.md`: which decoders of transformers are served from stored beginnings, and why others are not.

Each class for causal language models is built tiny, with random weights, and generates from prompts that share
beginnings: plainly, then with a cache, one prompt a call and in padded batches. Run it as
`python -m experiments.report.families [--only CLASS ...] docs/families.md`; without a file it prints. It takes minutes.
"""

import argparse
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as tf
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from experiments.report import markdown
from llmcache import LLMCache, UnsupportedModelError
from llmcache.lab import locate, look_at

HEADER = """\
# Decoders

Made by `make families` with transformers {version}; do not edit.

A decoder is not looked up in a table: `wrap` [tries](prefix.md#when-it-applies) what its trunk does. Here each class of
transformers for causal language models is built tiny, with random weights, in float32. It generates {n_new} tokens from
{n} prompts of {n_tokens} tokens in all, of which {n_shared} repeat the beginning of an earlier prompt, and from a next
turn after each answer: plainly, then with the cache. The columns say how many tokens of the prompts were not computed:

- *alone*: with one prompt a call;
- *in batches*: with {rows} padded prompts a call;
- *next turn*: of {n_turned} tokens, where each prompt goes on with its answer and {n_more} new tokens, alone. The last
  token of an answer was not run, so at most {n_known} are known.

A trunk that does not pack runs each segment of a tree by itself. Here that counts as {of_forward} more tokens at most:
of models so small, one more forward takes longer than all prompts.

*From*: prompts are served from *blocks* of K/V, as far as they agree with earlier ones, or from *copies* of K/V caches
that cannot be cut ([states](prefix.md#states)): a copy serves what continues it. So with copies, what prompts share was
passed to `cache.prefill` before *alone*, which serves the first prompts as well, and batches are computed in full.
*Packed*: several prompts are computed in one row. *Wrong*: how many prompts were continued otherwise than without the
cache, in all ways.
"""
N_NEW, N_MORE, BLOCK, ROWS = 4, 6, 8, 4
OF_FORWARD = 32  # token columns
_NO_END = {"eos_token_id": None, "pad_token_id": 0}
_VOCABULARY, _MOST_PARAMETERS = 96, 2_000_000
#: Changes of these sizes, tried in turn; None: as the config has it.
_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"layer_types": None},
    {"head_dim": None},
    {"num_experts_per_tok": 1},
    {"layer_types": None, "head_dim": None, "num_key_value_heads": None},
)
#: Kinds of layers that do not tell how many tokens they have seen.
_ONLY_STATES = {"linear_attention", "conv", "moe", "mlp"}
_WIDTH: dict[str, int] = dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32)
_DEPTH: dict[str, int] = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), 4
)
_HEADS: dict[str, int] = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4
)
_INNER: dict[str, int] = dict.fromkeys(
    (
        "intermediate_size",
        "ffn_dim",
        "dff",
        "d_ff",
        "n_inner",
        "ffn_hidden_size",
        "decoder_ffn_dim",
        "intermediate_size_mlp",
    ),
    48,
)
_EXPERTS: dict[str, int] = {
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
}
_STATES: dict[str, int] = {
    **dict.fromkeys(
        ("mamba_d_state", "state_size", "ssm_state_size", "linear_key_head_dim", "linear_value_head_dim"), 8
    ),
    **dict.fromkeys(("mamba_n_heads", "mamba_expand", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "expand"), 1),
    **dict.fromkeys(("linear_num_heads", "linear_head_dim"), 4),
    "mamba_d_head": 32,
    "mamba_chunk_size": 16,
    "mamba_d_ssm": 64,
}
_OTHERS: dict[str, Any] = {
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("sliding_window", "window_size"), 20),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("query_pre_attn_scalar", "hidden_size_per_layer_input", "laurel_rank", "index_topk"), 8),
    **dict.fromkeys(("num_key_value_heads", "index_n_heads", "altup_num_inputs"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCABULARY),
    "full_attn_idxs": [1, 3],
    "attn_layer_indices": [1, 3],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "attention_chunk_size": 24,
    "rotary_dim": 4,
    "num_kv_shared_layers": 0,
    "attention_types": [[["global", "local"], 2]],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
#: Sizes of tiny models, under all names that configs have for them.
SIZES: dict[str, Any] = _WIDTH | _DEPTH | _HEADS | _INNER | _EXPERTS | _STATES | _OTHERS


@dataclass(frozen=True)
class Tried:
    """What was found of one class."""

    name: str
    is_built: bool = True
    packs: bool = False
    copies: bool = False  # served from copies of states, not from blocks
    alone: int = 0  # tokens that were not computed
    batched: int = 0
    turned: int = 0
    n_wrong: int = 0  # prompts, in any way
    reason: str = ""  # why nothing is served

    @property
    def is_served(self) -> bool:
        return bool(self.alone or self.batched or self.turned)


def tiny_config(kind: type[Any], changes: dict[str, Any]) -> Any:
    """Return a config of this class with tiny sizes, some of them changed."""
    usual = kind()
    sizes = {name: value for name, value in SIZES.items() if _has(usual, name)}
    kinds = list(dict.fromkeys(getattr(usual, "layer_types", None) or ()))
    kinds += ["conv"] if _has(usual, "conv_L_cache") else []  # LFM2 has none unless it is told where
    if kinds:
        kinds += [] if {*kinds} - _ONLY_STATES else ["full_attention"]
        sizes["layer_types"] = (kinds * 4)[:4]
    changed = sizes | {name: value for name, value in changes.items() if name in sizes}
    return kind(**{name: value for name, value in changed.items() if value is not None})


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # an attribute that differs by layer
        return False


def build(name: str) -> Any:
    """Return a tiny model of a class that generates; the last error if there is none."""
    failed: Exception = ValueError(name)
    for changes in _WAYS:
        try:
            model = _build(getattr(tf, name), changes)
            generate(model, *next(batches(1)))
            return model
        except Exception as error:  # configs and models check sizes in many ways
            failed = error
    raise failed


def _build(kind: Any, changes: dict[str, Any]) -> Any:
    """Return a seeded model with large weights, which tell inputs apart."""
    config = tiny_config(kind.config_class, changes)
    with torch.device("meta"):
        n_parameters = sum(one.numel() for one in kind(config).parameters())
    if n_parameters > _MOST_PARAMETERS:
        raise ValueError(f"{n_parameters:,} parameters")
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


def prompts() -> list[Tensor]:
    """Return prompts (n,) of which most share a beginning with an earlier one."""
    generator = torch.Generator().manual_seed(1)

    def new(n_tokens: int) -> Tensor:
        return torch.randint(5, _VOCABULARY, (n_tokens,), generator=generator)

    first, second = new(32), new(32)
    longer = torch.cat([first, new(24)])
    ends = ((first, 9), (first, 14), (longer, 8), (second, 11), (longer, 13), (second, 7), (first, 17), (second, 21))
    return [torch.cat([begin, new(n_more)]) for begin, n_more in ends]


def batches(rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids and mask (B, T) of all prompts, padded at their beginning, `rows` at a time."""
    every = prompts()
    for begin in range(0, len(every), rows):
        own = every[begin : begin + rows]
        width = max(map(len, own))
        ids = torch.stack([torch.cat([torch.zeros(width - len(one), dtype=torch.int64), one]) for one in own])
        yield ids, torch.stack([torch.arange(width) >= width - len(one) for one in own]).long()


def generate(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the tokens (B, N_NEW) that a model chooses greedily."""
    with torch.inference_mode():
        made: Tensor = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=N_NEW, do_sample=False, use_cache=True, **_NO_END
        )
    return made[:, ids.shape[1] :]


def try_class(name: str) -> Tried:
    """Return what is served of a class."""
    try:
        model = build(name)
        plain = {rows: [generate(model, *batch) for batch in batches(rows)] for rows in (1, ROWS)}
    except Exception as error:  # any class may want something of its own
        return Tried(name, is_built=False, reason=f"{type(error).__name__}: {error}")
    turns = [_turn(*prompt, answer) for prompt, answer in zip(batches(1), plain[1], strict=True)]
    expected = [generate(model, *turn) for turn in turns]
    try:
        allowed = look_at(locate(model))
    except UnsupportedModelError as error:
        return Tried(name, reason=str(error).partition(". ")[0])
    with LLMCache.wrap(model, prefix={"block": BLOCK}) as cache:
        if allowed.copies:
            cache.prefill([ids.tolist() for ids in beginnings()])
            cache.restart_stats()
        n_wrong = _count_wrong(model, batches(1), plain[1])
        alone = cache.stats().n_prefix_tokens
        n_wrong += _count_wrong(model, turns, expected)
        turned, bypassed = cache.stats().n_prefix_tokens - alone, cache.stats().bypassed
    with LLMCache.wrap(model, prefix={"block": BLOCK}) as cache:
        n_wrong += _count_wrong(model, batches(ROWS), plain[ROWS])
        batched = cache.stats().n_prefix_tokens
    reason = allowed.reason or ", ".join(f"`{one}`" for one in bypassed) or "the kind of its K/V cache"
    return Tried(name, True, allowed.packs, allowed.copies, alone, batched, turned, n_wrong, reason)


def _count_wrong(model: Any, asked: Iterable[tuple[Tensor, Tensor]], expected: Sequence[Tensor]) -> int:
    """Return how many rows of batches a wrapped model continues otherwise than expected."""
    found = [generate(model, *batch) for batch in asked]
    return sum(int((one != other).any(1).sum()) for one, other in zip(found, expected, strict=True))


def _turn(ids: Tensor, mask: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and mask (1, T) of a prompt that goes on with its answer and new tokens."""
    new = torch.randint(5, _VOCABULARY, (1, N_MORE), generator=torch.Generator().manual_seed(2))
    longer = torch.cat([ids, answer, new], 1)
    return longer, torch.ones_like(longer)


def beginnings() -> list[Tensor]:
    """Return what prompts begin with in common with an earlier one, each once."""
    every = {tuple(ids[:n].tolist()) for ids, n in zip(prompts(), shared(), strict=True) if n}
    return [torch.tensor(ids) for ids in sorted(every, key=len)]


def shared() -> list[int]:
    """Return how many tokens each prompt begins with in common with an earlier one."""
    own = prompts()
    return [max((_common(ids, other) for other in own[:number]), default=0) for number, ids in enumerate(own)]


def _common(one: Tensor, other: Tensor) -> int:
    """Return how many tokens two prompts begin with in common."""
    n = min(len(one), len(other))
    return int((one[:n] == other[:n]).cumprod(0).sum())


def render(tried: Sequence[Tried]) -> str:
    """Return the page."""
    own = prompts()
    n_tokens = sum(map(len, own))
    numbers = {
        "n": len(own),
        "n_tokens": n_tokens,
        "n_shared": sum(shared()),
        "n_new": N_NEW,
        "n_more": N_MORE,
        "n_turned": n_tokens + len(own) * (N_NEW + N_MORE),
        "n_known": n_tokens + len(own) * (N_NEW - 1),
        "rows": ROWS,
        "of_forward": OF_FORWARD,
    }
    served, others = ([one for one in tried if one.is_built and one.is_served is wanted] for wanted in (True, False))
    n_copies, n_wrong = sum(one.copies for one in served), sum(one.n_wrong for one in tried)
    left_out = ", ".join(f"`{one.name}`" for one in tried if not one.is_built)
    return "\n".join(
        (
            HEADER.format(version=tf.__version__, **numbers),
            f"Served: {len(served)} of {len(served) + len(others)} classes, {len(served) - n_copies} from blocks and "
            f"{n_copies} from copies; {n_wrong} prompts came out wrong.\n",
            "## Served\n",
            markdown.table(
                ("class", "from", "alone", "in batches", "next turn", "packed", "wrong"),
                [_cells(one) for one in served],
            ),
            "\n## Not served\n",
            "What a bypass reason means: `llmcache.CURES`. No trunk found: layers take other arguments than those of "
            "transformers with K/V, or keep states elsewhere than in the K/V cache.\n",
            "| class | why |\n|---|---|",
            *(f"| `{one.name}` | {one.reason} |" for one in others),
            f"\nNot built, since these sizes do not suit their configs or they want other inputs: {left_out}.",
            "",
        )
    )


def _cells(one: Tried) -> tuple[object, ...]:
    batched = "" if one.copies else one.batched
    kind, packs = "copies" if one.copies else "blocks", "yes" if one.packs else ""
    return f"`{one.name}`", kind, one.alone, batched, one.turned, packs, one.n_wrong


def main(arguments: Sequence[str]) -> None:
    """Try the classes, and write the page."""
    parser = argparse.ArgumentParser(description="Write the page of decoders.")
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--only", nargs="*", help="class names; default: all")
    parsed = parser.parse_args(arguments)
    tf.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    names = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if not name.endswith("ConditionalGeneration")}
    every = sorted(name for name in names if hasattr(tf, name))
    tried = []
    with patch("llmcache.models.causal_trial.MOST_OF_FORWARD", OF_FORWARD):
        for name in parsed.only or every:
            tried.append(try_class(name))
            print(tried[-1], file=sys.stderr, flush=True)
    page = render(tried)
    print(page) if parsed.page is None else parsed.page.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1:])
