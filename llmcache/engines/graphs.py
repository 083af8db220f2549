"""Makes compiled graphs of a trunk, one per bucket, and compares each with the trunk before it is used.

Graphs are made of a twin, which shares the trunk's tensors and has no hooks.

Sizes: B rows, T tokens of a call; R rows, L tokens of a bucket; D hidden width.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmcache.errors import ConfigError
from llmcache.models.adapters import Trunk, device_of, vocabulary_size
from llmcache.models.arguments import Arguments
from llmcache.models.model_config import setting
from llmcache.models.twin import make_twin

_STATES, _TYPES = "last_hidden_state", "token_type_ids"
#: Largest difference from the trunk's own output, as a share of its largest value: float32 or wider; narrower dtypes.
TOLERANCE, TOLERANCE_OF_HALVES = 1e-4, 5e-2

#: `inputs by name (R, L) -> tensors of the trunk's output, in order`.
Graph = Callable[[Mapping[str, Tensor]], Sequence[Tensor]]


class Bucket(NamedTuple):
    """The shape of a graph, R rows of L tokens: calls that are not larger are padded to it."""

    rows: int
    length: int


def make_buckets(lengths: Sequence[int], rows: Sequence[int], n_positions: int | None) -> list[Bucket]:
    """Return all buckets of these sizes, smallest first; `ConfigError` if none is within the model's positions."""
    for name, sizes in (("lengths", lengths), ("rows", rows)):
        if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
            raise ConfigError(f"{name}: give whole numbers over 0 (got {sizes})")
    kept = sorted({length for length in lengths if n_positions is None or length <= n_positions})
    if not kept:
        raise ConfigError(f"lengths: the model has {n_positions} positions (got {lengths})")
    return [Bucket(n_rows, length) for length in kept for n_rows in sorted(set(rows))]


class Maker:
    """Makes graphs of one trunk, converts a call's arguments to their inputs, and their tensors to its output."""

    def __init__(self, trunk: Trunk, mode: str | None, backend: str | Callable[..., Any]) -> None:
        """Make the twin. `ConfigError` if it returns more than states (B, T, D) and the pooler's output (B, D)."""
        self._trunk = trunk
        self._twin = make_twin(trunk.module)
        self._backend = backend
        # No guards, so that nothing is checked or compiled in service: `CompiledTrunk` checks for changes.
        self._options = {**_options_of(mode, backend), "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        names = Arguments(self._twin.forward).names
        self._fixed = {"return_dict": True, **({"use_cache": False} if "use_cache" in names else {})}
        with torch.inference_mode(False), torch.no_grad():
            ids = self._tokens(Bucket(1, 2))
            output = self._twin(input_ids=ids, **self._fixed)
            named = dict(output.items()) if isinstance(output, Mapping) else {}
            self.names = tuple(name for name, value in named.items() if value is not None)
            if self.names not in ((_STATES,), (_STATES, "pooler_output")):
                found = ", ".join(self.names) or type(output)
                raise ConfigError(f"compile: the trunk returns {found}, not states alone")
            self._kind = type(output)
            #: Whether token types are an input. Types of 0 must equal no types, since one graph serves both.
            self.takes_types = False
            if _TYPES in names:
                typed = self._twin(input_ids=ids, token_type_ids=ids * 0, **self._fixed)
                self.takes_types = torch.equal(typed[_STATES], named[_STATES])

    def make(self, bucket: Bucket) -> Graph:
        """Compile a graph, and compare it with the trunk on a full call and on a smaller one with a padded row.

        `ValueError` if the outputs differ; a compiler may raise anything.
        """
        twin, names, fixed = self._twin, self.names, self._fixed

        def run(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            output = twin(**inputs, **fixed)
            return tuple(output[name] for name in names)

        # torch.compile stores compiled code by code object: each graph gets its own.
        name = f"trunk_{bucket.rows}x{bucket.length}"
        code = run.__code__.replace(co_name=name)
        own = types.FunctionType(code, run.__globals__, name, run.__defaults__, run.__closure__)
        graph: Graph = torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend, options=self._options)
        with torch.inference_mode(False), torch.no_grad():
            ids = self._tokens(bucket)
            self._compare(graph, bucket, ids, torch.ones_like(ids))
            ids = ids[: max(1, bucket.rows - 1), : max(1, bucket.length - 1)]
            mask = torch.ones_like(ids)
            mask[0, (ids.shape[1] + 1) // 2 :] = 0
            self._compare(graph, bucket, ids, mask)
        return graph

    def inputs(self, bucket: Bucket, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a call's arguments padded to a bucket: tokens on the right, rows at the end."""
        ids, given, kinds = arguments["input_ids"], arguments.get("attention_mask"), arguments.get(_TYPES)
        n_rows, n_tokens = ids.shape
        pad_id = setting(self._trunk.config, "pad_token_id") or 0
        padded = torch.full(bucket, pad_id, dtype=torch.int64, device=ids.device)
        mask = torch.zeros_like(padded)
        padded[:n_rows, :n_tokens] = ids
        mask[:n_rows, :n_tokens] = 1 if given is None else given
        mask[n_rows:, 0] = 1  # a row without any valid token would give NaN
        inputs = {"input_ids": padded, "attention_mask": mask}
        if self.takes_types:
            inputs[_TYPES] = torch.zeros_like(padded)
            if kinds is not None:
                inputs[_TYPES][:n_rows, :n_tokens] = kinds
        return inputs

    def pack(self, made: Sequence[Tensor], shape: Sequence[int], has_names: bool, is_owned: bool) -> Any:
        """Return the trunk's output for a call of (B, T) tokens, cut from the tensors that a graph made.

        With `has_names` it is a `ModelOutput`, else a tuple. With `is_owned` it is copied: the graph's next run
        overwrites its tensors.
        """
        n_rows, n_tokens = shape
        cut = [one[:n_rows, :n_tokens] if one.ndim == 3 else one[:n_rows] for one in made]
        cut = [one.clone() if is_owned else one.contiguous() for one in cut]
        return self._kind(**dict(zip(self.names, cut, strict=True))) if has_names else tuple(cut)

    def _tokens(self, bucket: Bucket) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary_size(self._trunk), bucket, generator=generator, device="cpu")
        return ids.to(device_of(self._twin))

    def _compare(self, graph: Graph, bucket: Bucket, ids: Tensor, mask: Tensor) -> None:
        given = {"input_ids": ids, "attention_mask": mask}
        expected = self._twin(**given, **self._fixed)
        found = self.pack(graph(self.inputs(bucket, given)), ids.shape, True, False)
        for name in self.names:
            where = mask.bool() if name == _STATES else slice(None)
            one, other = found[name][where], expected[name][where]
            allowed = TOLERANCE if torch.finfo(one.dtype).bits >= 32 else TOLERANCE_OF_HALVES
            difference = (one - other).abs().max()
            if not bool(difference <= allowed * other.abs().max().clamp(min=1)):
                raise ValueError(f"its {name} differs from the trunk's by {difference:.3g}")


def _options_of(mode: str | None, backend: str | Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a mode of `torch.compile`, which does not take both mode and options."""
    if mode is None:
        return {}
    modes = torch._inductor.list_mode_options()
    if backend != "inductor" or mode not in modes:
        raise ConfigError(f"mode: give {', '.join(sorted(modes))}, with backend 'inductor' (got {mode!r}, {backend!r})")
    return dict(modes[mode])
