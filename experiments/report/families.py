"""Writes `docs/families.md`: which decoders of transformers are served from stored beginnings, and why others are not.

Each class for causal language models is built tiny, with random weights, and generates from prompts that share
beginnings: plainly, then with a cache, one prompt a call and in padded batches. Run it as
`python -m experiments.report.families [--only CLASS ...] docs/families.md`; without a file it prints. It takes minutes.
"""

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
{n} prompts of {n_tokens} tokens in all, of which {n_shared} repeat the beginning of an earlier prompt: plainly, then
with the cache, with one prompt a call (*alone*), and with {rows} padded prompts a call (*in batches*). The columns say
how many tokens of the prompts were not computed. *Packed*: several prompts are computed in one row. *Wrong*: how many
prompts were continued otherwise than without the cache, in both ways.
"""
COPIED = """\
States cannot be cut, so a copy serves only what continues it: a prompt, an answer, or what `cache.prefill` was passed.
Of these prompts, none continues another, so nothing is served *alone* or *in batches*. Here, what prompts share was
passed to `cache.prefill` before.
"""
N_NEW, BLOCK, ROWS = 4, 8, 4
_NO_END = {"eos_token_id": None, "pad_token_id": 0}
_VOCABULARY, _MOST_PARAMETERS = 96, 2_000_000
#: Changes of these sizes, tried in turn; None: as the config has it.
_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"layer_types": None},
    {"head_dim": None},
    {"layer_types": None, "head_dim": None, "num_key_value_heads": None},
)
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
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
}
_STATES: dict[str, int] = {
    **dict.fromkeys(
        ("mamba_d_state", "state_size", "ssm_state_size", "linear_key_head_dim", "linear_value_head_dim"), 8
    ),
    **dict.fromkeys(("mamba_n_heads", "mamba_expand", "linear_num_key_heads", "linear_num_value_heads"), 2),
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
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
    alone: int = 0  # tokens that were not computed
    batched: int = 0
    copied: int = 0  # tokens that were not computed, alone, after `prefill` of what prompts share
    n_wrong: int = 0  # prompts, in any way
    reason: str = ""  # why nothing is served


def tiny_config(kind: type[Any], changes: dict[str, Any]) -> Any:
    """Return a config of this class with tiny sizes, some of them changed."""
    usual = kind()
    sizes = {name: value for name, value in SIZES.items() if _has(usual, name)}
    if kinds := getattr(usual, "layer_types", None):
        kinds = [*kinds, *(["conv"] if _has(usual, "conv_L_cache") else [])]  # LFM2 has none unless it is told where
        sizes["layer_types"] = (list(dict.fromkeys(kinds)) * 4)[:4]
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
    served, n_wrong, reason = {}, 0, ""
    for rows, expected in plain.items():
        try:
            cache = LLMCache.wrap(model, prefix={"block": BLOCK})
        except UnsupportedModelError as error:
            return Tried(name, reason=str(error).partition(". ")[0])
        with cache:
            found = [generate(model, *batch) for batch in batches(rows)]
            stats = cache.stats()
        n_wrong += sum(int((one != other).any(1).sum()) for one, other in zip(found, expected, strict=True))
        served[rows] = stats.n_prefix_tokens
        bypassed = (f"`{one}`" for one in stats.bypassed)
        reason = reason or ", ".join(bypassed)
    allowed = look_at(locate(model))
    reason = reason or allowed.reason or "the kind of its K/V cache"
    if not allowed.copies:
        return Tried(name, True, allowed.packs, served[1], served[ROWS], 0, n_wrong, reason)
    with LLMCache.wrap(model, prefix={"block": BLOCK}) as cache:
        cache.prefill([ids.tolist() for ids in beginnings()])
        cache.restart_stats()
        found = [generate(model, *batch) for batch in batches(1)]
        copied = cache.stats().n_prefix_tokens
    n_wrong += sum(int((one != other).any(1).sum()) for one, other in zip(found, plain[1], strict=True))
    return Tried(name, True, False, served[1], served[ROWS], copied, n_wrong, reason)


def beginnings() -> list[Tensor]:
    """Return what prompts begin with in common with an earlier one, each once."""
    own = prompts()
    common = (max((_common(ids, other) for other in own[:number]), default=0) for number, ids in enumerate(own))
    every = {tuple(ids[:n].tolist()) for ids, n in zip(own, common, strict=True) if n}
    return [torch.tensor(ids) for ids in sorted(every, key=len)]


def _common(one: Tensor, other: Tensor) -> int:
    """Return how many tokens two prompts begin with in common."""
    n = min(len(one), len(other))
    return int((one[:n] == other[:n]).cumprod(0).sum())


def render(tried: Sequence[Tried]) -> str:
    """Return the page."""
    own = prompts()
    n_shared = sum(max((_common(ids, other) for other in own[:number]), default=0) for number, ids in enumerate(own))
    numbers = {"n": len(own), "n_tokens": sum(map(len, own)), "n_shared": n_shared, "n_new": N_NEW, "rows": ROWS}
    served = [one for one in tried if one.alone or one.batched]
    copied = [one for one in tried if one.copied and one not in served]
    others = [one for one in tried if one.is_built and not (one.alone or one.batched or one.copied)]
    rows = [(f"`{one.name}`", one.copied, one.n_wrong) for one in copied]
    cells = [(f"`{one.name}`", one.alone, one.batched, "yes" if one.packs else "", one.n_wrong) for one in served]
    n_wrong = sum(one.n_wrong for one in tried)
    left_out = ", ".join(f"`{one.name}`" for one in tried if not one.is_built)
    return "\n".join(
        (
            HEADER.format(version=tf.__version__, **numbers),
            f"Served: {len(served)} of {len(served) + len(copied) + len(others)} classes, and {len(copied)} from "
            f"copies of their states; {n_wrong} prompts came out wrong.\n",
            "## Served\n",
            markdown.table(("class", "alone", "in batches", "packed", "wrong"), cells),
            "\n## Served from copies of states\n",
            COPIED,
            markdown.table(("class", "alone", "wrong"), rows),
            "\n## Not served\n",
            "What a bypass reason means: `llmcache.CURES`.\n",
            "| class | why |\n|---|---|",
            *(f"| `{one.name}` | {one.reason} |" for one in others),
            f"\nNot built, since these sizes do not suit their configs or they want other inputs: {left_out}.",
            "",
        )
    )


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
    for name in parsed.only or every:
        tried.append(try_class(name))
        print(tried[-1], file=sys.stderr, flush=True)
    page = render(tried)
    print(page) if parsed.page is None else parsed.page.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1:])
