"""Caches facts about the trunk's present state and about the signatures of calls. Each is worked out once."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, is_, ne, not_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from llmcache.models.adapters import CACHE, Trunk
from llmcache.models.arguments import DECIDING, Arguments
from llmcache.models.causal import UNTRIED, Causal
from llmcache.models.causal_trial import Causality
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head
from llmcache.models.hooks import are_hooked, parts_of
from llmcache.models.masks import flatten
from llmcache.models.model_config import keys_of, setting
from llmcache.models.weights import Look
from llmcache.request.bypass import find_reason_of, find_reason_of_kv, is_strange
from llmcache.request.reading import RequestReader, Tables
from llmcache.request.rows import Scope

_ID_DTYPES = (torch.int64, torch.int32)  # embeddings reject others
_MOST_STATES = 16  # states kept
_MOST_FORMS = 64  # signatures kept for each state
_OF_SHAPES = ("input_shape", "mask_4d", "traced")  # reasons that do not follow from the signature alone
_PLAIN = {Tensor, type(None), bool, int, float, str}
# Read in every call.
_is_within_mode: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_transformed: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_n_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_function_modes: Callable[[], list[object]] = _get_current_function_mode_stack
_HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks")
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


@dataclass(frozen=True, slots=True)
class CallSignature:
    """Facts about all calls whose arguments have the same signature, valid for one `TrunkState`."""

    names: tuple[str, ...]  # of the arguments, positional ones first
    reason: str | None = None  # for a bypass
    attention: str = ""  # the implementation in use, see `Trunk.attention`
    causal: Causal = UNTRIED  # what the trunk allows
    keeps_kv: bool = False  # the caller keeps the K/V
    kind: tuple[Any, ...] = ()  # the arguments and settings that decide the layout of the output


@dataclass(slots=True)
class TrunkState:
    """Facts about the trunk, valid while its weights, settings and modules are unchanged."""

    digest: str
    modules: Sequence[Any]  # of the trunk, see `Look.modules`
    reason: str | None  # why no call can be cached
    coupling: str  # why rows of a call affect each other; "" if they do not
    hooks: Sequence[dict[int, Any]]  # of the modules in the trunk; a hit would skip them
    n_hooks: int  # torch's count of hooks ever registered, when last seen without foreign hooks; -1: check again
    sees_later: bool  # a token attends to later tokens of its row
    tables: Tables  # vocabulary and position limits of the model
    flags: Callable[[], Iterable[Any]]  # reads the config values that act like arguments
    #: By whether the caller passes the K/V cache: why its K/V is not kept, "" if it is; absent until it was seen.
    kv_refusals: dict[bool, str] = field(default_factory=dict)
    signatures: dict[tuple[Any, ...], CallSignature] = field(default_factory=dict)
    scopes: dict[tuple[str, ...], Scope] = field(default_factory=dict)  # by the fields of `Scope`


class Opened(NamedTuple):
    """What is known of a call before its rows are read."""

    state: TrunkState
    signature: CallSignature
    arguments: Mapping[str, Any]  # by name
    mask_4d: Tensor | None  # the mask as passed, if 4-D; `arguments` holds the equivalent 2-D mask
    autocast: str  # its dtype; "" without


class CallSignatures:
    """States and signatures of one trunk. Thread-safe."""

    def __init__(
        self,
        trunk: Trunk,
        arguments: Arguments,
        coupling: Coupling,
        causality: Causality,
        reader: RequestReader,
        head: Head,
        keeps_tokens: bool,
    ) -> None:
        """Start with no states. `keeps_tokens`: entries keep the states of all tokens, and K/V if the caller does."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self._trunk, self._arguments, self._reader = trunk, arguments, reader
        self._coupling, self._causality = coupling, causality
        self._pooled, self._observed = head.pooled, None if keeps_tokens else head.observed
        self.keeps_no_kv = trunk.makes_kv and not keeps_tokens
        #: Of a guessed adapter: `use_cache`, as passed and as configured, with which the trunk returned K/V; None: of
        #: another. Where a trial shows that it makes K/V as it is asked to, that is not needed.
        self.returning: set[tuple[Any, Any]] | None = set() if trunk.adapter.is_guess else None
        # Config values that are not part of the weights' digest.
        self._flags = (*trunk.more_outputs, "return_dict", "use_cache", "_attn_implementation")
        # Functions and mask functions of attention implementations, by name.
        self._attends, self._masks = ALL_ATTENTION_FUNCTIONS.get, ALL_MASK_ATTENTION_FUNCTIONS.get
        self._states: OrderedDict[str, TrunkState] = OrderedDict()  # by digest, newest last

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any], look: Look) -> Opened | str:
        """Return what is known of a call before its rows are read, or the reason for a bypass."""
        state = self.state(look.digest, look.modules)
        signature, arguments, mask_4d = self.find(args, kwargs, state)
        if reason := signature.reason or state.reason:
            return reason
        if self._observed is not None and self._observed.has_changed(look.digest):
            return "other_pooling"
        if self._pooled is not None and self._pooled.has_changed():
            return "other_pooling"
        # As in `_is_hooked`, without a call.
        if (RemovableHandle.next_id != state.n_hooks or any(state.hooks)) and self._is_hooked(state):
            return "hooked"  # a hit would not run the hooks
        is_cast = torch._C._is_any_autocast_enabled()
        autocast = _autocast_on(arguments["input_ids"].device.type) if is_cast else ""
        return Opened(state, signature, arguments, mask_4d, autocast)

    def computes_alike(self, state: TrunkState, scope: Scope, device: str) -> bool:
        """Whether the trunk has no hooks, and computes on a device as in calls of a scope."""
        is_alike = _autocast_on(device) == scope.dtype and self._trunk.attention == scope.attention
        return is_alike and not self._is_hooked(state)

    def _is_hooked(self, state: TrunkState) -> bool:
        n_hooks = RemovableHandle.next_id
        if n_hooks == state.n_hooks and not any(state.hooks):
            return False
        is_hooked = are_hooked(parts_of(self._trunk.module))
        state.n_hooks = -1 if is_hooked else n_hooks
        return is_hooked

    def state(self, digest: str, modules: Sequence[Any]) -> TrunkState:
        """Return the state of the trunk, given the digest and modules of its present weights."""
        known = self._states.get(digest)
        if known is not None and known.modules is modules:
            return known
        trunk, within = self._trunk, parts_of(self._trunk.module)
        reason = None if trunk.has_same_depth else "other_depth"
        reason = reason or ("other_attention" if trunk.has_changed_direction else None)
        directions = [vars(part).get("is_causal") for part in within] + [setting(trunk.config, "is_causal")]
        hooks = list(chain.from_iterable(map(_HOOKS, within)))
        coupling, tables = self._coupling.reason(digest), self._reader.tables()
        config, keys = trunk.config, keys_of(trunk.config, self._flags)
        flags = (
            partial(map, setting, repeat(config), self._flags) if keys is None else partial(map, vars(config).get, keys)
        )
        state = TrunkState(digest, modules, reason, coupling, hooks, -1, False in directions, tables, flags)
        self._states[digest] = state
        while len(self._states) > _MOST_STATES:
            self._states.popitem(last=False)
        return state

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: TrunkState
    ) -> tuple[CallSignature, Mapping[str, Any], Tensor | None]:
        """Return the signature of a call, its arguments by name, and its mask if that is 4-D: they hold the 2-D one."""
        values = (*args, *kwargs.values())
        types = tuple(map(type, values))
        key: tuple[Any, ...] = ()
        if _PLAIN.issuperset(types):  # the key holds the dtypes of tensors and the values of the rest
            are_tensors = tuple(map(is_, types, repeat(Tensor)))
            tensors = tuple(compress(values, are_tensors))
            rest = tuple(compress(values, map(not_, are_tensors)))
            flags = tuple(state.flags())
            attends = self._attends(flags[-1]), self._masks(flags[-1])  # functions may be registered at any time
            key = len(args), tuple(kwargs), types, rest, tuple(map(_DTYPE, tensors)), flags, attends
            signature = state.signatures.get(key)
            # A hit must not become part of a CUDA graph: reread the arguments, which gives the reason `traced`.
            is_captured = bool(tensors) and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
            if signature is not None and not is_captured:
                arguments = dict(zip(signature.names, values, strict=True))
                if signature.reason is not None or _fit_together(arguments, tensors):
                    return signature, arguments, None
        names = tuple(self._arguments.bind(args, kwargs))
        arguments, mask_4d = flatten(dict(zip(names, values, strict=True)))
        signature = self._make(names, arguments, state.digest)
        if key and signature.reason not in _OF_SHAPES:
            if len(state.signatures) >= _MOST_FORMS:
                state.signatures.clear()
            state.signatures[key] = signature
        return signature, arguments, mask_4d

    def notice_kv(self, arguments: Mapping[str, Any], state: TrunkState) -> None:
        """Record that the trunk returns K/V for calls like this one, and forget the state's signatures."""
        assert self.returning is not None
        self.returning.add(self._use_cache(arguments))
        state.signatures.clear()

    def _make(self, names: tuple[str, ...], arguments: Mapping[str, Any], digest: str) -> CallSignature:
        config = self._trunk.config
        reason = "traced" if any(map(is_strange, arguments.values())) else None
        reason = reason or find_reason_of(arguments, self._trunk, self._arguments.defaults)
        if reason is None and self.keeps_no_kv:
            reason = find_reason_of_kv(arguments, self._trunk)
        if reason is None and arguments["input_ids"].dtype not in _ID_DTYPES:
            reason = "input_shape"
        if reason is not None:
            return CallSignature(names, reason)
        attention, causal = self._trunk.attention, self._causality.of(digest)
        # The trunk may reject an unusual dtype, so a call with new dtypes must run once before hits are served.
        dtypes = [(name, one.dtype) for name in DECIDING if (one := arguments.get(name)) is not None]
        kind = arguments.get("return_dict"), setting(config, "return_dict"), arguments.get("use_cache"), *dtypes
        keeps_kv = self._trunk.makes_kv and not self.keeps_no_kv and self._is_kv_kept(arguments, causal)
        return CallSignature(names, None, attention, causal, keeps_kv, kind)

    def _is_kv_kept(self, arguments: Mapping[str, Any], causal: Causal) -> bool:
        asked, configured = self._use_cache(arguments)
        if self.returning is None or causal.makes_dynamic_cache or arguments.get(CACHE) is not None:
            return bool(configured if asked is None else asked) or arguments.get(CACHE) is not None
        return (asked, configured) in self.returning

    def _use_cache(self, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return `use_cache` as passed and as configured. A trunk may heed either, both or neither."""
        return arguments.get("use_cache"), setting(self._trunk.config, "use_cache")


def find_reason_now(trunk: Trunk) -> str | None:
    """Return the bypass reason that holds now for any arguments, or None."""
    if torch._C._is_tracing():  # by torch.jit.trace
        return "compiled"
    # A mode or transform must see the call computed. These checks take a microsecond.
    if _is_within_mode() or _is_transformed() is not None or forward_ad._current_level >= 0:
        return "traced"
    if _n_function_modes() and not all(isinstance(mode, DeviceContext) for mode in _function_modes()):
        return "traced"  # a default device changes nothing
    if trunk.module.training:
        return "training"
    return "gradients" if torch.is_grad_enabled() else None


def _fit_together(arguments: Mapping[str, Any], tensors: Sequence[Tensor]) -> bool:
    """Whether tensor arguments are (B, T), or (1, T) shared by all rows; the mask must be (B, T)."""
    shape = arguments["input_ids"].shape
    if len(shape) != 2:
        return False
    if any(map(ne, map(_SHAPE, tensors), repeat(shape))):
        mask = arguments.get("attention_mask")
        is_mask = mask is None or mask.shape == shape
        return is_mask and all(one.shape in (shape, (1, shape[1])) for one in tensors)
    return True


def _autocast_on(device: str) -> str:
    """Return the dtype to which autocast casts on a device; "" without autocast there."""
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
