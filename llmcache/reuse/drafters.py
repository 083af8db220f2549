"""What answers for a draft: an int8 graph of the model, one of the trunk under the model's own head, another model.

A drafter answers one row at a time, without padding, so that an answer does not depend on its batch: dynamic
quantisation has one scale a call, and kernels of other models round by the size of the batch.

Sizes: n tokens of a row, C outputs, D hidden width.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llmcache.engines.graphs import find_reason
from llmcache.engines.onnx import OnnxGraph
from llmcache.errors import ConfigError, UnsupportedModelError
from llmcache.models.adapters import Trunk, device_of, locate
from llmcache.models.arguments import Arguments, names_of, takes_dict
from llmcache.models.hooks import are_hooked, listener_of, parts_around
from llmcache.models.packing import Payload
from llmcache.models.packing import parts_of as fields_of
from llmcache.models.twin import make_replicas
from llmcache.models.weights import Weights
from llmcache.request.bypass import CURES
from llmcache.request.rows import Row
from llmcache.reuse.answers import Reading, read_logits
from llmcache.reuse.calibration.inputs import longest_input
from llmcache.reuse.call import Call
from llmcache.support.arrays import Floats


class Drafter(Protocol):
    """Answers single rows. Thread-safe.

    Attributes:
        makes_states: Its states take the place of the trunk's; else its output takes that of the model's logits.
        head: Digest of the wrapped model's head that it copies, or that reads its states; "" for none.
    """

    makes_states: bool
    head: str

    @property
    def name(self) -> str:
        """Tells its weights and numbers; "" if it answers no more."""
        ...

    def covers(self, call: Call, row: "Row") -> bool:
        """Whether it answers a row as it would alone."""

    def run(self, inputs: Mapping[str, Tensor]) -> tuple[Any, Floats]:
        """Return what `states` takes, and the output (C,), for the arguments (1, n) of one row."""

    def states(self, made: Any, arguments: Mapping[str, Any]) -> Any:
        """Return the trunk's output for a row of a call, whose arguments are given, if it `makes_states`."""

    def close(self) -> None:
        """Answer no more."""


class GraphDrafter:
    """An int8 graph: of the model, which returns logits; or of the trunk, whose states the model's own head reads.

    Of an embedding, the payload of these states is the answer.
    """

    def __init__(
        self, model: nn.Module, trunk: Trunk, read: Reading, payload: Payload | None, engine: OnnxGraph, head: str
    ) -> None:
        """Take the head's present tensors unless the graph has them, and answer a row on trial.

        `payload` chooses the row that is the answer; None: the logits are, as `read` finds them in the model's output.
        `head` is the digest of the weights outside the trunk.

        Raises:
            Exception: The head takes more than tokens, mixes rows, or cannot be copied.
        """
        self.engine, self._read, self._payload = engine, read, payload
        self.close = engine.close
        self.makes_states = not engine.twin.head
        self.head = head if payload is None else ""
        self._given = threading.local()  # the trunk's output that the head reads
        self._head: nn.Module = nn.Identity()
        #: The head runs on served states with its hooks, and here without.
        self._parts: Callable[[], Sequence[nn.Module]] = tuple
        if payload is None:
            mixes_rows = False
            with suppress(Exception):  # some heads take one row at a time
                mixes_rows = _mixes_rows(model, trunk, read)
            if mixes_rows:
                raise ValueError("the head of the wrapped model mixes the rows of a call")
            self._parts = partial(parts_around, model, trunk.module)
        if payload is None and self.makes_states:
            replicas = make_replicas(model)
            replicas[trunk.module].forward = lambda *args, **kwargs: self._given.states
            self._head = replicas[model]
            self._names = names_of(model.forward)
            self._takes_dict = takes_dict(model)
        self.run(engine.twin.inputs(1, 4))

    @property
    def name(self) -> str:
        return self.engine.name if self.engine.n_graphs else ""

    def covers(self, call: Call, row: "Row") -> bool:
        engine = self.engine
        if are_hooked(self._parts()):
            return False
        if isinstance(call.engine, OnnxGraph) and call.engine.twin.takes_types == engine.twin.takes_types:
            return engine.is_of(call.scope.weights)  # that engine was chosen for what the draft takes
        return engine.choose(call.args, call.kwargs, call.scope.weights, call.path.keeps_kv) is engine

    def run(self, inputs: Mapping[str, Tensor]) -> tuple[Any, Floats]:
        made = self.engine.compute(inputs)
        if not self.makes_states:
            return None, _to_host(made[0][0])
        if self._payload is not None:
            kept = self._payload.take(made[0][0], slice(0, inputs["input_ids"].shape[1]))
            return made, _to_host(kept.float().mean(dim=0))
        self._given.states = self.engine.twin.pack(made, {})
        return made, _to_host(self._read(_run(self._head, self._takes_dict, self._names, inputs))[0])

    def states(self, made: Any, arguments: Mapping[str, Any]) -> Any:
        return self.engine.twin.pack(made, arguments)


class ModelDrafter:
    """Another model with the same labels and token ids."""

    makes_states = False
    head = ""

    def __init__(self, draft: nn.Module, model: nn.Module, trunk: Trunk, arguments: Arguments) -> None:
        """Take a `draft` that `check_model` accepted for `model`, and the arguments of its trunk's forward.

        Raises:
            ValueError: Its weights cannot be told from others.
        """
        self._draft, self._trunk, self._arguments = draft, trunk, arguments
        self._weights, self._longest, self._is_open = Weights(draft), _longest(draft), True
        #: Hooks of the wrapped model's parts would see the placeholders of drafted rows; those of the draft's have no
        #: part in its name.
        self._parts: Callable[[], Sequence[nn.Module]] = lambda: [
            *parts_around(model, trunk.module),
            *draft.modules(),
        ]
        self._weights.digest()
        if reason := self._weights.unreadable:
            raise ValueError(CURES[reason])

    @property
    def name(self) -> str:
        return f"{type(self._draft).__name__} {self._weights.digest()}" if self._is_open else ""

    def covers(self, call: Call, row: "Row") -> bool:
        if call.path.keeps_kv or self._weights.is_training or row.n_valid > self._longest:
            return False
        if call.arguments["input_ids"].device != device_of(self._draft) or are_hooked(self._parts()):
            return False
        return find_reason(self._trunk, self._arguments, call.arguments) is None

    def run(self, inputs: Mapping[str, Tensor]) -> tuple[Any, Floats]:
        return None, _to_host(_answer(self._draft, inputs)[0])

    def states(self, made: Any, arguments: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self._is_open = False


def check_model(draft: Any, model: nn.Module, trunk: Trunk, read: Reading) -> None:
    """Refuse a draft that cannot answer in the model's place.

    Raises:
        ConfigError: It is no model, this model or wrapped, has other labels, another vocabulary, is training or on
            another device, or answers NaN.
    """
    if draft is None:
        raise ConfigError("draft: the engine 'model' needs the model: wrap(draft=model), load(..., draft=model)")
    if not isinstance(draft, nn.Module):
        raise ConfigError(f"draft: give 'int8', options or a model (got a {type(draft).__name__})")
    if read is not read_logits:
        raise ConfigError("draft: another model's logits are put into the output's, so leave answer_of out")
    if problem := _find_problem(draft, model, trunk):
        raise ConfigError(f"draft={type(draft).__name__}(...): {problem}")


def _find_problem(draft: nn.Module, model: nn.Module, trunk: Trunk) -> str | None:
    """Return why a model is no draft of another one, and the cure; None if it may be."""
    if draft is model or trunk.module in draft.modules() or draft in model.modules():
        return "it is the model itself, or shares its trunk: give a smaller model"
    if listener_of(draft) is not None:
        return "it has a cache of its own: unwrap it first"
    if next(draft.parameters(), None) is None:
        return "it has no weights"
    if any(part.training for part in draft.modules()):
        return "it is in training mode: call eval() first"
    if (own := device_of(draft)) != (wanted := device_of(trunk.module)):
        return f"it is on {own}, and the model on {wanted}: move it there"
    ours, its = getattr(model, "config", None), getattr(draft, "config", None)
    for name, what in (
        ("vocab_size", "tokens: give a model with the same tokenizer"),
        ("pad_token_id", "as padding: give a model with the same tokenizer"),
        ("num_labels", "labels: give a model with the same ones, in the same order"),
        ("id2label", "as labels: give a model with the same ones, in the same order"),
        ("problem_type", "as its problem type: give a model trained for the same answers"),
    ):
        here, there = (getattr(config, name, None) for config in (ours, its))
        if None not in (here, there) and here != there:
            return f"it has {there!r} {what} (the model has {here!r})"
    try:
        with torch.inference_mode():
            ids = torch.ones(1, 4, dtype=torch.int64, device=own)
            logits = _answer(draft, {"input_ids": ids, "attention_mask": ids})
    except Exception as error:  # a model may raise anything
        return f"it does not answer a request: {error}"
    if logits.shape != (1, n := getattr(ours, "num_labels", logits.shape[-1])):
        return f"it answers with logits of shape {tuple(logits.shape)}, where the model has (1, {n})"
    if not bool(logits.isfinite().all()):
        return "it answers with NaN or infinite numbers"
    try:
        if model is trunk.module or not _mixes_rows(model, trunk, read_logits):  # calibration refuses a trunk alone
            return None
    except Exception as error:  # a head may raise anything
        return f"the head of the wrapped model does not take rows without states: {error}"
    return "the head of the wrapped model mixes the rows of a call: leave draft out"


@torch.inference_mode()
def _mixes_rows(model: nn.Module, trunk: Trunk, read: Reading) -> bool:
    """Whether a row's logits depend on the states of the row before it, by a trial with NaN there."""
    replicas = make_replicas(model)
    twin, is_dict, names = replicas[trunk.module], takes_dict(model), names_of(model.forward)
    run, ids = twin.forward, torch.ones(2, 4, dtype=torch.int64, device=device_of(trunk.module))

    def answer() -> Tensor:
        return read(_run(replicas[model], is_dict, names, {"input_ids": ids, "attention_mask": ids}))[1]

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        for value in fields_of(output).values():
            if isinstance(value, Tensor) and value.is_floating_point() and len(value) == len(ids):
                value[0] = torch.nan
        return output

    whole = answer()
    twin.forward = spoilt
    return not torch.allclose(answer(), whole, atol=1e-4)


@torch.inference_mode()
def try_head(model: nn.Module, trunk: Trunk, read: Reading) -> tuple[bool, bool]:
    """Return whether a head notes nothing in its attributes, and if logits may answer for the whole model.

    In a trial they must be all of its output, the same each time, and its rows not mixed.
    """
    if takes_dict(model):
        return False, False
    is_steady = False
    try:
        replicas, forward = make_replicas(model), Arguments(model.forward)
        head = Weights(replicas[model], without=replicas[trunk.module])
        ids = torch.ones(2, 4, dtype=torch.int64, device=device_of(trunk.module))
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": ids}
        if "use_cache" in forward.names:
            inputs["use_cache"] = False
        before = head.digest()
        one, other = (_run(replicas[model], False, names_of(model.forward), inputs) for _ in range(2))
        is_steady = head.digest() == before
        if not is_steady or read is not read_logits or len(fields_of(one)) > 1:
            return is_steady, False
        return True, torch.equal(read(one), read(other)) and not _mixes_rows(model, trunk, read)
    except Exception:  # a model may raise anything, and its head may take one row at a time
        return is_steady, False


def _run(model: nn.Module, is_dict: bool, names: Collection[str] | None, inputs: Mapping[str, Any]) -> Any:
    """Return a model's output; `is_dict`: it takes one dict; `names`: of its arguments, None: any."""
    if is_dict:
        return model(dict(inputs))
    return model(**{name: value for name, value in inputs.items() if names is None or name in names})


def _answer(draft: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a model's logits (1, C) for a row. Token types go only to a forward that names them."""
    names = Arguments(draft.forward).names
    return read_logits(draft(**{name: value for name, value in inputs.items() if name in names or not names}))


def _longest(model: nn.Module) -> float:
    """Return the most tokens that a model takes; infinite if it does not say."""
    try:
        found = longest_input(locate(model))
    except UnsupportedModelError:
        found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return torch.inf if found is None else found


def _to_host(output: Tensor) -> Floats:
    """Return an output (C,) as an array."""
    return output.float().cpu().numpy()
