"""The only file that assigns `module.forward`.

Native hooks cannot skip a layer, and some callers (sentence-transformers 6) call `trunk.forward(...)`, which runs none.
Removal is in reverse order and restores each module's `__dict__` exactly, including an earlier foreign wrapper
(accelerate's, say).

Copies, pickles and DataParallel's replicas of a module must not contain our swaps, which would call the original
module. So a swapped module also gets its own `__reduce_ex__` and `_replicate_for_data_parallel`, which leave out swaps
and hooks. Python and torch look these up on the module before its class.
"""

import copy
import logging
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as _every_module
from transformers.utils.generic import ModelOutput

from llmcache.errors import WrapError
from llmcache.models.adapters import Trunk
from llmcache.models.arguments import Arguments, takes_dict
from llmcache.models.packing import make_output
from llmcache.models.packing import parts_of as fields_of
from llmcache.models.tuners import is_activation
from llmcache.support.threads import HEAD_PRODUCTS

logger = logging.getLogger("llmcache")

ALREADY_WRAPPED = "this model is already wrapped: use the existing cache, or call its unwrap() first"
#: Held while a trunk's forward is replaced.
SWAPPING = threading.RLock()
_CAPTURING = "transformers.utils.output_capturing"
_LOGITS_TO_KEEP = "logits_to_keep"
_TRAINING = attrgetter("training")
_TOKENS = {"input_ids", "attention_mask", "token_type_ids"}
_MOST_DISTINCT = 0.8  # share of different states above which logits are made of all


class Listener(Protocol):
    """The object to which a swap passes calls."""

    @property
    def last(self) -> Sequence[Any]:
        """The outcome of each row of this thread's last call."""

    def join(self, kv_cache: Any, rows: Sequence[tuple[Any, int]]) -> None:
        """Follow a K/V cache into which rows of others, each a K/V cache and a number, were copied in this order."""


class _Override:
    """An attribute of a module that overrides a method of its class; a copy of the module gets the class's method."""

    name: ClassVar[str]

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _class_method(memo[id(self.module)], self.name)

    def __reduce__(self) -> Any:
        return getattr, (self.module, self.name)  # pickled as a bound method, which is the class's when loaded


class _Reduce(_Override):
    """Copies and pickles a module without our swaps and hooks."""

    name = "__reduce_ex__"

    def __call__(self, protocol: Any) -> Any:
        if any(swap.is_of_trunk for swap in _swaps_of(self.module.forward)):  # once for a whole model
            logger.info("llmcache: a copy of a %s is made without its cache", type(self.module).__name__)
        return _without_ours(_class_method(self.module, self.name)(protocol))


class _Replicate(_Override):
    """Makes DataParallel copy a module without our swaps and hooks."""

    name = "_replicate_for_data_parallel"

    def __call__(self) -> nn.Module:
        replica: nn.Module = _class_method(self.module, self.name)()
        replica.__dict__ = _plain_attributes(vars(replica))
        return replica


def shield(module: nn.Module) -> None:
    """Make copies of a module leave out our swaps and hooks."""
    for kind in (_Reduce, _Replicate):
        vars(module).setdefault(kind.name, kind(module))


def unshield(module: nn.Module) -> None:
    """Undo `shield` if no swap or hook of ours is left."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    if not (_swaps_of(vars(module).get("forward")) or any(map(_is_ours, hooks))):
        for kind in (_Reduce, _Replicate):
            vars(module).pop(kind.name, None)


def _without_ours(value: Any) -> Any:
    """Return what a module is rebuilt from, without our attributes, wherever its class puts them."""
    if type(value) is tuple:
        return tuple(map(_without_ours, value))
    if type(value) is not dict:
        return value
    if isinstance(value.get(_Reduce.name), _Reduce):
        return _plain_attributes(value)
    return {key: _without_ours(one) for key, one in value.items()}


def _plain_attributes(space: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes without our swaps and hooks."""
    plain = {name: value for name, value in space.items() if not isinstance(value, (_Reduce, _Replicate))}
    if swaps := _swaps_of(plain.get("forward")):
        del plain["forward"]
        if swaps[-1].had_own_forward:
            plain["forward"] = swaps[-1].original
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        if (hooks := plain.get(name)) and any(map(_is_ours, hooks.values())):
            plain[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_ours(hook))
    return plain


def _swaps_of(forward: Any) -> "list[Swap]":
    """Return the swaps that a forward consists of, outermost first: a module may have several."""
    swaps: list[Swap] = []
    forward = getattr(forward, "__func__", forward)  # accelerate binds an unwrapped forward to its module again
    while isinstance(forward, Swap):
        swaps.append(forward)
        forward = forward.original
    return swaps


def _is_ours(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", None)).startswith("llmcache.")


def _class_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a method of a module's class, bound to the module."""
    return types.MethodType(getattr(type(module), name), module)


class Swap(_Override):
    """Replaces one module's forward."""

    name = "forward"
    is_of_trunk = False

    def __init__(self, module: nn.Module, listener: Listener) -> None:
        """Replace a module's forward; `listener` receives the calls."""
        super().__init__(module)
        self._original: Callable[..., Any] = module.forward
        self.had_own_forward = "forward" in module.__dict__
        self.__wrapped__ = self._original  # inspect.signature() then shows the module's own
        # The module that torch.compile() returns takes any arguments.
        self.arguments = Arguments(getattr(module, "_orig_mod", module).forward)
        self.listener = listener
        with SWAPPING:  # of two threads that wrap one model, one is refused
            if self.is_of_trunk and any(swap.is_of_trunk for swap in _swaps_of(self._original)):
                raise WrapError(ALREADY_WRAPPED)
            module.forward = self
        shield(module)

    @property
    def original(self) -> Callable[..., Any]:
        """The replaced forward: the module's own, else its class's at present, which may be patched at any time."""
        if self.had_own_forward or torch.compiler.is_compiling():  # a compiler cannot trace the method made below
            return self._original
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):  # bound again, as by accelerate when it unwraps a model
            module, *rest = args
            return (self.run if module is self.module else _class_method(module, self.name))(*rest, **kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        raise NotImplementedError

    def remove(self) -> None:
        """Restore the module's forward; raise `WrapError` if a foreign one was put on top meanwhile."""
        forward = self.module.__dict__.get("forward")
        if forward is not None and getattr(forward, "__func__", forward) is self:
            if self.had_own_forward:
                self.module.forward = self.original
            else:
                del self.module.forward
        elif forward is not None and not self._was_on_top_of(forward):
            raise WrapError(
                f"{type(self.module).__name__}: its forward was replaced after wrapping "
                f"(by a {type(self.module.forward).__name__}); remove that first, then call unwrap() again"
            )
        unshield(self.module)

    def _was_on_top_of(self, forward: Any) -> bool:
        """Whether `forward` lay beneath this swap, which foreign code then removed."""
        sought = getattr(forward, "__func__", forward)
        below: Any = self.original
        while below is not None:
            if getattr(below, "__func__", below) is sought:
                return True
            below = getattr(below, "__wrapped__", None)
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the replaced forward, bound to the copied module, which computes with its own weights."""
        return copy.deepcopy(self.original, memo) if self.had_own_forward else super().__deepcopy__(memo)


class Passed(Swap):
    """Replaces the forward of an encoder that is not cached: its calls are counted."""

    listener: Any  # a cache, whose `pass_by(swap, args, kwargs)` counts a call and returns its output

    def run(self, *args: Any, **kwargs: Any) -> Any:
        is_plain = torch.compiler.is_compiling()
        return self.original(*args, **kwargs) if is_plain else self.listener.pass_by(self, args, kwargs)


class Distinct(NamedTuple):
    """Hidden states of a batch of which many are equal."""

    states: Tensor  # (B, T, D)
    distinct: Tensor  # each different one (N, D)
    places: Tensor  # its index among these (B, T)


class LogitsSwap(Swap):
    """Replaces the forward of the layer that turns states into logits: each different state is turned once."""

    def __init__(self, module: nn.Module, listener: Listener, equal: ContextVar[Distinct | None]) -> None:
        """Replace the forward; `equal` holds the states that the trunk returned last, if some are equal."""
        super().__init__(module, listener)
        self._equal = equal

    def run(self, *args: Any, **kwargs: Any) -> Any:
        known = None if torch.compiler.is_compiling() else self._equal.get()
        if known is None or len(args) != 1 or kwargs or (index := _index_of(args[0], known)) is None:
            return self.original(*args, **kwargs)
        used, inverse = torch.unique(index, return_inverse=True)
        if len(used) > _MOST_DISTINCT * index.numel():
            return self.original(*args, **kwargs)
        if not torch.equal(args[0].flatten(0, 1), known.distinct.index_select(0, index.flatten())):
            return self.original(*args, **kwargs)  # a hook, say, edited the states in place
        logits = self.original(known.distinct.index_select(0, used))
        return logits.index_select(0, inverse.flatten()).view(*index.shape, -1)  # half the time of `logits[inverse]`


def _index_of(states: Any, known: Distinct) -> Tensor | None:
    """Return the index of states that are some last or first columns (B, T', D) of known ones; None if they are not."""
    whole = known.states
    if not (isinstance(states, Tensor) and states.ndim == 3 and states.dtype == whole.dtype):
        return None
    is_view = states.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    if not is_view or states.shape[::2] != whole.shape[::2] or states.stride()[0] != whole.stride()[0]:
        return None
    first, rest = divmod(int(states.storage_offset()) - int(whole.storage_offset()), whole.shape[2])
    is_run = states.stride()[1:] == whole.stride()[1:] and not rest and 0 <= first <= whole.shape[1] - states.shape[1]
    return known.places[:, first : first + states.shape[1]] if is_run else None


class HeadSwap(Swap):
    """Replaces a language-model head's forward: reports how many of the last columns it reads."""

    def __init__(
        self,
        module: nn.Module,
        listener: Listener,
        reads_last: Callable[[int | None], object],
        equal: ContextVar[Distinct | None],
    ) -> None:
        """Replace the forward; `reads_last` takes the number, and None after the head has run.

        It takes 0 if each column is read for itself, and None if padding may be read as well: a loss is made of all.

        What `equal` holds is forgotten then.
        """
        super().__init__(module, listener)
        self._reads_last, self._equal = reads_last, equal

    def run(self, *args: Any, **kwargs: Any) -> Any:
        n_kept = self.arguments.get(args, kwargs, _LOGITS_TO_KEEP)
        n_read = n_kept if isinstance(n_kept, int) and n_kept > 0 else 0
        self._reads_last(None if self.arguments.get(args, kwargs, "labels") is not None else n_read)
        try:
            return self.original(*args, **kwargs)
        finally:
            self._reads_last(None)
            self._equal.set(None)


class GraphedModel(Swap):
    """Replaces the forward of a model whose trunk may be computed by a graph; see `HeadProducts`."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        is_within = HEAD_PRODUCTS.begin()
        try:
            return self.original(*args, **kwargs)
        finally:
            HEAD_PRODUCTS.end(is_within)


class Answered(BaseException):
    """Leaves the forward of a model from within its trunk, since `ModelCall.is_answered`."""


class Form(NamedTuple):
    """The form of a model's output that has logits (B, C) alone."""

    head: str  # digest of the weights outside the trunk
    call: tuple[Any, ...]  # `kind` of the trunk's call
    kind: type  # class of the output
    name: Any  # of the logits, as of `packing.parts_of`
    logits: Tensor  # (0, C): their dtype and device

    def fill(self, rows: Sequence[Any]) -> Any:
        """Return an output of this form with logits (C,) of B rows, in a new tensor."""
        logits = torch.from_numpy(np.array(rows)).to(self.logits)
        return make_output(self.kind, {self.name: logits})


@dataclass(slots=True, eq=False)
class ModelCall:
    """One call of the whole model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    beside: Sequence[Any]  # its arguments that the trunk does not take by name: labels, say
    form: Form | None  # of its output, if trunk and head need not run where logits are known; else None
    calls: list[Any] = field(default_factory=list)  # of the trunk, closed
    is_answered: bool = False  # by the logits of the only call of the trunk

    def has_rows_of(self, call: Any) -> bool:
        """Whether the trunk's rows are the model's: it got the same token ids."""
        given = (*self.args, *self.kwargs.values())
        given = (*given[0].values(), *given[1:]) if given and isinstance(given[0], Mapping) else given
        ids = call.arguments.get("input_ids")
        return any(one is ids for one in given)

    def answer_by(self, call: Any) -> bool:
        """Set and return `is_answered`, if a call of the trunk found logits for all of its rows."""
        form, hits = self.form, call.hits
        if form is None or self.calls or not hits or call.calibration is None or len(hits) < len(call.rows):
            return False
        if call.is_activated or not all(hit.logits is not None for hit in hits.values()):
            return False
        if call.arguments["input_ids"].device != form.logits.device:  # the model was moved
            return False
        is_same = all(call.arguments.get(name) is value for name, value in self.kwargs.items())
        self.is_answered = is_same and call.kind == form.call and call.calibration.head == form.head
        return self.is_answered


class ModelForward(Swap):
    """Replaces the whole model's forward: answers by logits where all are known, and shows outputs to the observer.

    Else it puts logits of a draft into the model's output.
    """

    listener: Any  # the cached forward of the model's trunk
    _is_spared = False  # until it is replaced: other threads may call the model meanwhile

    def __init__(self, model: nn.Module, listener: Any, is_spared: bool = False) -> None:
        """Replace the forward; `is_spared`: trunk and head need not run where logits are known."""
        #: None: it takes one dict, of which its head reads nothing else.
        self._of_trunk = None if takes_dict(model) else {*listener.arguments.names, "return_dict"}
        self._form: Form | None = None  # of the latest call that could be spared
        super().__init__(model, listener)
        self._is_spared = is_spared and not _swaps_of(self)[-1].had_own_forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.listener
        if forward.is_retired or torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        may_spare = self._is_spared and not (args or kwargs.keys() - _TOKENS)
        if may_spare:  # no hook, no foreign forward, no dropout in the head
            parts = parts_around(self.module, forward.module)
            may_spare = all(isinstance(vars(one).get("forward", self), Swap) for one in parts)
            is_training = self.module.training or any(map(_TRAINING, parts))
            may_spare = may_spare and not (is_training or are_hooked(parts))
        within = ModelCall(args, kwargs, self._beside(args, kwargs), self._form if may_spare else None)
        calls, beside, token, is_whole = within.calls, within.beside, forward.model_call.set(within), False
        failure: Exception | None = None
        try:
            output = self._run(within)
            is_whole = within.is_answered or forward.reuse.join(calls, output)
        except BaseException as error:
            if not (isinstance(error, Exception) and forward.reuse.has_part_in(calls)):
                raise
            failure = error
        finally:
            forward.model_call.reset(token)
            for call in () if is_whole else calls:
                forward.withdraw(call)
        if not is_whole:
            output = self.original(*args, **kwargs)  # no draft serves, as its logits cannot be put in
            if failure is not None:
                forward.reuse.fail(failure)  # of the placeholders: without them the head does not raise
            return output
        # Of several calls, it is unknown which one made which answer; a tuple begins with the loss, if there is one.
        if len(calls) == 1 and not within.is_answered:
            if may_spare and calls[0].calibration is not None:
                self._form = _form_of(calls[0], output)
            if calls[0].entries and not (beside and isinstance(output, tuple)):
                forward.reuse.observe(calls[0], output)
        return output

    def _run(self, within: ModelCall) -> Any:
        """Return the model's output, made of logits if a call of the trunk answered so."""
        try:
            output = self.original(*within.args, **within.kwargs)
        except Answered:
            if not within.is_answered:  # that of another model
                raise
        if not within.is_answered:
            return output
        call, form = within.calls[0], within.form
        assert form is not None
        return form.fill([call.hits[row.number].logits for row in call.rows])

    def _beside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the arguments that the trunk does not take by name, except None and False."""
        if self._of_trunk is None or not (args or kwargs.keys() - self._of_trunk):
            return ()
        given = self.arguments.bind(args, kwargs).items()
        return [one for name, one in given if name not in self._of_trunk and one is not None and one is not False]


def _form_of(call: Any, output: Any) -> Form | None:
    """Return the form of an output of a calibrated call; None if it is more than logits (B, C)."""
    if not (type(output) in (Tensor, tuple, list, dict) or isinstance(output, ModelOutput)):
        return None
    (name, logits), *others = (*fields_of(output).items(), (None, None))
    if len(others) != 1 or not (isinstance(logits, Tensor) and logits.ndim == 2 and logits.is_floating_point()):
        return None
    form = Form(call.calibration.head, call.kind, type(output), name, logits.new_empty((0, logits.shape[1])))
    made = form.fill([[0.0] * logits.shape[1]]) if isinstance(output, ModelOutput) else output
    return form if getattr(made, "__dict__", {}).keys() == getattr(output, "__dict__", {}).keys() else None


class _OutputHook:
    """Passes a module's output to `receive`; in a copy of the module it does nothing."""

    def __init__(self, receive: Callable[[Any], Any] = lambda output: None) -> None:
        self._receive = receive

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._receive(output)

    def __reduce__(self) -> tuple[type["_OutputHook"], tuple[()]]:
        return _OutputHook, ()


class Installed:
    """The swaps and hooks on a model: a function that removes each."""

    def __init__(self) -> None:
        self._removals: list[Callable[[], None]] = []

    def add(self, remove: Callable[[], None]) -> None:
        self._removals.append(remove)

    @property
    def is_empty(self) -> bool:
        return not self._removals

    def remove(self) -> None:
        """Remove everything, last first; raise `WrapError` if foreign wrappers lie on top of swaps, which then stay."""
        stuck: list[Callable[[], None]] = []
        errors: list[WrapError] = []
        for remove in reversed(self._removals):
            try:
                remove()
            except WrapError as error:
                stuck.insert(0, remove)
                errors.append(error)
        self._removals = stuck
        if errors:
            raise errors[0]


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward as it is without a cache."""
    swaps = _swaps_of(module.forward)
    forward: Callable[..., Any] = swaps[-1].original if swaps else module.forward
    return forward


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Return all submodules, each once. `modules()` takes several times as long, and this runs in each call."""
    found, seen = [module], {module}
    for part in found:
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found[1:]


def parts_around(model: nn.Module, trunk: nn.Module) -> list[nn.Module]:
    """Return the submodules of a model without those in its trunk, but with the trunk itself; runs in each call."""
    found = [model]
    for part in found:
        if part is not trunk:
            found += [one for one in part._modules.values() if one is not None and one not in found]
    return found[1:]


def are_hooked(modules: Sequence[nn.Module], only_before: bool = False) -> bool:
    """Whether one of these modules has a foreign hook, or all modules have global ones; `only_before`: pre-hooks."""
    if _every_module._global_forward_pre_hooks or (_every_module._global_forward_hooks and not only_before):
        return True
    hooks = [hook for one in modules if one._forward_pre_hooks for hook in one._forward_pre_hooks.values()]
    if not only_before:
        hooks += [hook for one in modules if one._forward_hooks for hook in one._forward_hooks.values()]
    return not all(_is_ours(hook) or _is_of_weights(hook) or _is_idle_capture(hook) for hook in hooks)


def _is_of_weights(hook: Callable[..., Any]) -> bool:
    """Whether a hook affects states alone: torch's own (pruning, weight_norm), or PEFT's for an activated LoRA."""
    return str(getattr(hook, "__module__", None)).startswith("torch.nn.utils.") or is_activation(hook)


def _is_idle_capture(hook: Callable[..., Any]) -> bool:
    """Whether a hook is transformers' own and captures nothing: it stays for good once hidden states were requested."""
    if getattr(hook, "__module__", None) != _CAPTURING:
        return False
    collector = getattr(sys.modules[_CAPTURING], "_active_collector", None)
    return collector is not None and not collector.get()


def is_wrapped(trunk: Trunk) -> bool:
    """Whether a cache is already installed on this trunk or a layer of it."""
    forwards = [vars(module).get("forward") for module in (trunk.module, *trunk.layers)]
    return any(isinstance(forward, Swap) and not isinstance(forward, Passed) for forward in forwards)


def listener_of(model: nn.Module) -> Listener | None:
    """Return the listener of a model's trunk; None if no cache is installed."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return next((one.listener for one in forwards if isinstance(one, Swap) and one.is_of_trunk), None)


def listen(module: nn.Module, receive: Callable[[Any], Any]) -> Callable[[], None]:
    """Pass a module's output to `receive`, whose result, unless None, replaces it; return a function that ends this."""
    handle = module.register_forward_hook(_OutputHook(receive))
    shield(module)

    def remove() -> None:
        handle.remove()
        unshield(module)

    return remove


def find_lm_head(model: nn.Module, trunk: Trunk) -> nn.Module | None:
    """Return transformers' language-model head around the trunk, if it can compute the last logits alone.

    Directly around it, or around a model that only holds it.
    """
    for module in model.modules():
        is_hf = type(module).__module__.startswith("transformers.")
        within = [one for child in module.children() for one in (child, *_alone(child))]
        if is_hf and trunk.module in within and _LOGITS_TO_KEEP in Arguments(module.forward).names:
            return module
    return None


def _alone(module: nn.Module) -> Sequence[nn.Module]:
    """Return the part of a module that has no other."""
    parts = list(module.children())
    return parts if len(parts) == 1 else ()


def find_logits(lm_head: Any) -> nn.Module | None:
    """Return the linear layer by which a language-model head turns each state into logits by itself."""
    layer = lm_head.get_output_embeddings()
    return layer if type(layer) is nn.Linear else None
