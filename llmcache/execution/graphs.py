"""One compiled graph of a trunk for one shape of call, made and checked before it is used.

Sizes: B rows, T tokens of a call; R rows, L tokens of a bucket; D hidden width.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmcache.errors import ConfigError
from llmcache.models.adapters import Trunk, device_of, vocabulary_size
from llmcache.models.arguments import Arguments
from llmcache.models.model_config import setting
from llmcache.models.twin import make_twin

_STATES, _POOLED, _TYPES = "last_hidden_state", "pooler_output", "token_type_ids"
#: How far states of a graph may lie from the trunk's own, as a share of the largest, in float32 or wider; in others.
TOLERANCE, TOLERANCE_OF_HALVES = 1e-4, 5e-2


class Bucket(NamedTuple):
    """A shape that a graph is made for: calls of no more rows (R) and tokens (L) are padded to it."""

    rows: int
    length: int


def make_buckets(lengths: Sequence[int], rows: Sequence[int], n_positions: int | None) -> list[Bucket]:
    """All buckets of these sizes, smallest first, but for those that exceed what a model has positions for.

    Raises:
        ConfigError: A size is no whole number over 0, or none is left.
    """
    for name, sizes in (("lengths", lengths), ("rows", rows)):
        if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
            raise ConfigError(f"{name}: give whole numbers over 0 (got {sizes})")
    kept = sorted({length for length in lengths if n_positions is None or length <= n_positions})
    if not kept:
        raise ConfigError(f"lengths: the model has {n_positions} positions (got {lengths})")
    return [Bucket(n_rows, length) for length in kept for n_rows in sorted(set(rows))]


#: `inputs by name (R, L) -> what the trunk puts out, in the order of `Output.names``.
Graph = Callable[[Mapping[str, Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Output:
    """How a trunk packs what it puts out: states (B, T, D), and maybe what its pooler makes of them (B, D).

    Attributes:
        kind: Class of the output with names.
        names: Of what is in it.
        takes_types: No token types are as good as types of 0, so that both are one graph.
        has_entering: Behind these comes what enters the trunk's final norm (B, T, D), since entries keep that.
    """

    kind: Callable[..., Any]
    names: tuple[str, ...]
    takes_types: bool
    has_entering: bool

    def cut(self, made: Sequence[Tensor], n_rows: int, n_tokens: int) -> list[Tensor]:
        """Of tensors for a bucket, what is the call's."""
        return [one[:n_rows, :n_tokens] if one.ndim == 3 else one[:n_rows] for one in made]

    def pack(self, made: Sequence[Tensor], has_names: bool) -> Any:
        """An output of these tensors, as the trunk would have put out."""
        own = made[: len(self.names)]
        return self.kind(**dict(zip(self.names, own, strict=True))) if has_names else tuple(own)


class TrunkRun:
    """Runs a twin of a trunk, and takes what is wanted out of its output."""

    def __init__(self, twin: nn.Module, norm: nn.Module | None, names: Sequence[str], fixed: Mapping[str, Any]) -> None:
        """Take a twin; with a norm it is one without it, and what enters the norm is put out behind the states."""
        self._twin, self._norm, self._names, self._fixed = twin, norm, names, fixed

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Outputs in the order of `Output.names`."""
        output = self._twin(**inputs, **self._fixed)
        if self._norm is not None:
            return self._norm(output[_STATES]), output[_STATES]
        return tuple(output[name] for name in self._names)


def _options_of(mode: str | None, backend: Any) -> dict[str, Any]:
    """What a mode of `torch.compile` stands for: modes and options cannot both be given."""
    if mode is None:
        return {}
    modes = torch._inductor.list_mode_options()
    if backend != "inductor" or mode not in modes:
        raise ConfigError(f"mode: give {', '.join(sorted(modes))}, with backend 'inductor' (got {mode!r}, {backend!r})")
    return dict(modes[mode])


class Maker:
    """Makes graphs of twins of one trunk."""

    def __init__(self, trunk: Trunk, has_entering: bool, mode: str | None, backend: Any) -> None:
        """See how the trunk packs its output.

        Args:
            trunk: Not touched: twins are run and compiled.
            has_entering: What enters its final norm is wanted as well.
            mode: Of `torch.compile`, for the backend `inductor`.
            backend: Likewise.

        Raises:
            ConfigError: The mode is unknown; or it has no twin, or puts out more than states and what a pooler makes of
                them.
        """
        self._trunk = trunk
        self._twin = twin = make_twin(trunk.module)
        self._has_entering = has_entering
        self._backend = backend
        self._options = _options_of(mode, backend)
        # Without guards nothing is looked at in service, and nothing compiled anew: who runs a graph sees to it that
        # everything still is as it was.
        self._options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
        names = Arguments(twin.forward).names
        self._takes_types = _TYPES in names
        self._fixed = {"return_dict": True, **({"use_cache": False} if "use_cache" in names else {})}
        self.output = self._show_output()
        self.run = TrunkRun(twin, None, self.output.names, self._fixed)
        if has_entering:  # is put out by a twin without the norm, which comes afterwards
            without = make_twin(trunk.module)
            without.set_submodule(str(trunk.adapter.norm), nn.Identity())
            norm = twin.get_submodule(str(trunk.adapter.norm))
            self.run = TrunkRun(without, norm, self.output.names, self._fixed)

    def make(self, bucket: Bucket) -> Graph:
        """A graph that was found to put out what the trunk does.

        Raises:
            Exception: Whatever a compiler raises.
            ValueError: It puts out something else.
        """
        whole = self.run

        def run(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            return whole(inputs)

        # What is compiled hangs on the code object: one of its own for each graph.
        name = f"trunk_{bucket.rows}x{bucket.length}"
        code = run.__code__.replace(co_name=name)
        own = types.FunctionType(code, run.__globals__, name, run.__defaults__, run.__closure__)
        graph: Graph = torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend, options=self._options)
        with torch.inference_mode(False), torch.no_grad():
            self._check(graph, bucket)
        return graph

    def inputs(self, bucket: Bucket, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a graph is run with for the arguments of a call: padded on the right, rows of padding below."""
        ids = arguments["input_ids"]
        n_rows, n_tokens = ids.shape
        pad_id = setting(self._trunk.config, "pad_token_id") or 0
        padded = torch.full(bucket, pad_id, dtype=torch.int64, device=ids.device)
        mask = torch.zeros_like(padded)
        padded[:n_rows, :n_tokens] = ids
        given = arguments.get("attention_mask")
        mask[:n_rows, :n_tokens] = 1 if given is None else given
        mask[n_rows:, 0] = 1  # a row that may attend to nothing is not finite
        inputs = {"input_ids": padded, "attention_mask": mask}
        if self.output.takes_types:
            inputs[_TYPES] = torch.zeros_like(padded)
            if (kinds := arguments.get(_TYPES)) is not None:
                inputs[_TYPES][:n_rows, :n_tokens] = kinds
        return inputs

    def _show_output(self) -> Output:
        ids = self._tokens(Bucket(1, 2))
        with torch.inference_mode(False), torch.no_grad():
            output = self._twin(input_ids=ids, **self._fixed)
            named = dict(output.items()) if isinstance(output, Mapping) else {}
            typed = self._twin(input_ids=ids, token_type_ids=ids * 0, **self._fixed) if self._takes_types else None
        names = tuple(name for name, value in named.items() if value is not None)
        if names != (_STATES,) and (self._has_entering or names != (_STATES, _POOLED)):
            raise ConfigError(f"compile: the trunk puts out {', '.join(names) or type(output)}, not states alone")
        takes_types = typed is not None and torch.equal(typed[_STATES], named[_STATES])
        return Output(type(output), names, takes_types, self._has_entering)

    def _tokens(self, bucket: Bucket) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary_size(self._trunk), bucket, generator=generator, device="cpu")
        return ids.to(device_of(self._twin))

    def _check(self, graph: Graph, bucket: Bucket) -> None:
        """Compare with the trunk: a full call, then a smaller one with a row that is padded."""
        ids = self._tokens(bucket)
        self._compare(graph, bucket, {"input_ids": ids})
        ids = ids[: max(1, bucket.rows - 1), : max(1, bucket.length - 1)]
        mask = torch.ones_like(ids)
        mask[0, (ids.shape[1] + 1) // 2 :] = 0
        self._compare(graph, bucket, {"input_ids": ids, "attention_mask": mask})

    def check_equal(self, graph: Graph) -> None:
        """Compare what takes calls of any shape, unpadded, with the trunk.

        Raises:
            ValueError: It puts out something else, if only in the last bit.
        """
        with torch.inference_mode(False), torch.no_grad():
            for n_rows, n_tokens in ((1, 12), (3, 31)):
                ids = self._tokens(Bucket(n_rows, n_tokens))
                mask = torch.ones_like(ids)
                mask[1:, n_tokens // 2 :] = 0
                for arguments in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
                    expected = self._twin(**arguments, **self._fixed)
                    found = graph(self.inputs(Bucket(n_rows, n_tokens), arguments))
                    if not all(torch.equal(a, expected[b]) for a, b in zip(found, self.output.names, strict=False)):
                        raise ValueError("what it puts out is not what the trunk does")

    def _compare(self, graph: Graph, bucket: Bucket, arguments: dict[str, Tensor]) -> None:
        expected = self._twin(**arguments, **self._fixed)
        ids = arguments["input_ids"]
        valid = arguments.get("attention_mask", torch.ones_like(ids)).bool()
        cut = self.output.cut(graph(self.inputs(bucket, arguments)), *ids.shape)
        for name, found in zip(self.output.names, cut, strict=False):
            where = valid if name == _STATES else slice(None)
            difference = (found[where] - expected[name][where]).abs().max()
            allowed = TOLERANCE if torch.finfo(found.dtype).bits >= 32 else TOLERANCE_OF_HALVES
            if not bool(difference <= allowed * expected[name][where].abs().max().clamp(min=1)):
                raise ValueError(f"its {name} differs from the trunk's by {difference:.3g}")
