"""Which states of the last layer a model's head reads, and so what an entry must keep.

This is observed by running the head on random states, complete and as restored from an entry. No layer runs.

Reusing the whole output of a layer returns the answer of the request it was stored for. A pooled head (class, score,
embedding) may accept that for a request of the same meaning. A head that answers token by token may not: start and end
positions would index another text.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as _every_module

from llmcache.config import CacheConfig
from llmcache.errors import UnsafeReuseError
from llmcache.models.adapters import Trunk, device_of, is_from, special_ids, vocabulary_size
from llmcache.models.arguments import Arguments
from llmcache.models.callables import CallableTrunk
from llmcache.models.hashing import tensors_in
from llmcache.models.hooks import are_hooked
from llmcache.models.model_config import setting
from llmcache.models.packing import PAYLOADS, Payload, head_reads_padding
from llmcache.models.sentences import Pooled, find_pooled
from llmcache.models.twin import make_trial, untouched
from llmcache.support.arrays import Ids
from llmcache.support.threads import forkable

# Called dozens of times in every call.
_CONFIG, _FORWARD, _PRE_HOOKS = itemgetter("config"), attrgetter("forward"), attrgetter("_forward_pre_hooks")

#: One vector per request; an answer per token (span, tag, language model); all hidden states, since unknown.
Reads = Literal["pooled", "tokens", "states"]
PayloadName = Literal["sequence", "cls", "last", "mean", "row"]


@dataclass(frozen=True, slots=True)
class Head:
    """The states that a head reads."""

    name: str  # in errors
    reads: Reads
    payload: PayloadName = "sequence"  # the smallest that is enough
    why_unsafe: str = ""  # why it must not read another request's states; "" if it may
    pooled: Pooled | None = None  # the pooling layer of a sentence-transformers model, which reads no padding
    observed: "Observed | None" = None  # for a classifier
    is_own: bool = False  # a class of the user's, which may read states of padding


_BY_TOKEN = (
    "It answers token by token, so the answer would be the other request's: start and end positions of another text, "
    "next words of another sentence."
)
_NO_LOGITS = "Its output has no logits (rows, classes), by which answers are compared."
_TWO_SIDES = "Its decoder reads its own tokens beside the encoder's states, which must belong together."


# Class-name endings, first match wins.
_ENDINGS: tuple[tuple[str | tuple[str, ...], str, Reads], ...] = (
    ("ForQuestionAnswering", "span head", "tokens"),
    ("ForTokenClassification", "token head", "tokens"),
    ("ForMaskedLM", "masked language-model head", "tokens"),
    ("ForPreTraining", "pre-training head", "tokens"),
    (("ForCausalLM", "LMHeadModel", "DoubleHeadsModel", "ForConditionalGeneration"), "language-model head", "tokens"),
    ("ForSequenceClassification", "classifier", "pooled"),
    ("ForMultipleChoice", "multiple-choice head", "pooled"),
    ("ForNextSentencePrediction", "next-sentence head", "pooled"),
)
# By payload, where a head finds the row that it keeps; see `head_reads_padding`.
_PLACES: dict[str, str] = {"cls": "first", "last": "last", "sequence": ""}
_CANDIDATES: tuple[PayloadName, ...] = ("cls", "last", "sequence")
_MAX_STATES = 16  # digests whose result is kept


def find_head(model: nn.Module, trunk: Trunk) -> Head:
    """Return the head of a model, classified by class name, or by pooling for sentence-transformers."""
    within, pooled = set(trunk.module.modules()), find_pooled(model)
    is_own = not all(_is_known(part) for part in model.modules() if part not in within)
    for module in model.modules():
        if type(module).__name__ == "Pooling" and is_from(module, "sentence_transformers"):
            return Head("sentence embedding", "pooled", "sequence" if pooled is None else pooled.kept, pooled=pooled)
    if isinstance(trunk.module, CallableTrunk):
        return _of_callable(trunk.module)
    for module in model.modules():
        if not is_from(module, "transformers"):
            continue  # a user's own class with such a name may read anything
        for endings, name, reads in _ENDINGS:
            if type(module).__name__.endswith(endings):
                if reads == "pooled" and getattr(getattr(module, "config", None), "is_encoder_decoder", False):
                    return Head(f"encoder-decoder's {name}", "tokens", why_unsafe=_TWO_SIDES)
                if reads == "tokens":
                    return Head(name, reads, why_unsafe=_BY_TOKEN, pooled=None if is_own else pooled)
                observed = Observed(model, trunk, name == "multiple-choice head")
                return Head(name, reads, observed.payload, observed=observed)
    for module in model.modules():
        if hasattr(module, "decoder") and getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            return Head("decoder beside the encoder", "tokens", why_unsafe=_TWO_SIDES)
    return Head("hidden states", "states", is_own=is_own)


def refuse_unsafe(head: Head, config: CacheConfig) -> None:
    """Raise if approximate reuse, by `tau` or by a calibration, would give a head another request's states."""
    if not head.why_unsafe or config.allow_unsafe:
        return
    if config.tau is None:
        what, effect = "a calibration", "a hit would return what another request computed."
        cure = (
            "So no bound can hold: do without calibrate() and learn (exact repeats and shared prefixes are served all "
        )
        cure += "the same)"
    else:
        what, cure = f"tau={config.tau}", "Leave tau out (exact repeats are still served)"
        effect = "reusing a layer's whole output replaces everything above it by what the stored request computed."
    what += f" with a model that has a {head.name}: {effect} {head.why_unsafe}"
    raise UnsafeReuseError(f"{what} {cure}, or set allow_unsafe=True to measure what that costs.")


def _of_callable(trunk: CallableTrunk) -> Head:
    structure = trunk.function.structure
    if structure is not None and structure.is_by_token:
        return Head("callable that answers by token", "tokens", why_unsafe=_BY_TOKEN)
    if structure is None or structure.answer is None:
        return Head("callable without logits", "pooled", "row", why_unsafe=_NO_LOGITS)
    return Head("classifier", "pooled", "row")


class Observed:
    """Observes which states a head reads, and again after changes. Thread-safe."""

    def __init__(self, model: nn.Module, trunk: Trunk, takes_choices: bool) -> None:
        """Run a copy of the model without its trunk; `takes_choices`: ids are (B, choices, T)."""
        self._model, self._trunk, self._takes_choices = model, trunk, takes_choices
        self._lock = forkable(threading.Lock(), is_waited_for=False)
        self._known: dict[str, bool] = {}  # by digest of the trunk's weights, whether `payload` is enough
        self._find_readers()
        #: The smallest payload that is enough; whether answers depend on states of padding, or may.
        self.payload, self.reads_padding = self._observe()

    def add_digest(self, digest: str) -> None:
        """Record the digest of the trunk's weights for which `payload` was observed."""
        self._known[digest] = True

    def has_changed(self, digest: str) -> bool:
        """Whether the head may now read more than `payload` keeps; `digest` is of the trunk's present weights."""
        now = self._state()
        is_as_seen = len(now) == len(self._seen) and all(map(is_, now, self._seen))
        if not is_as_seen or (is_enough := self._known.get(digest)) is None:
            with self._lock:
                if not is_as_seen or len(self._known) > _MAX_STATES:
                    self._known.clear()
                    self._find_readers()
                is_enough = self._observe()[0] == self.payload
                self._known[digest] = is_enough
        return not is_enough

    def _find_readers(self) -> None:
        """Find the modules that may read the trunk's last states: all outside of it, and its pooler."""
        trunk = self._trunk.module
        within = set(trunk.modules())
        pooler = getattr(trunk, "pooler", None)
        self._parts = [part for part in self._model.modules() if part not in within]
        self._parts += pooler.modules() if isinstance(pooler, nn.Module) else ()
        self._readers = [part for part in self._parts if trunk not in set(part.modules())]
        self._configs = [vars(part) for part in self._parts if "config" in vars(part)]
        covered = {id(vars(part).get("config")) for part in within}  # by the digest of the trunk's weights
        own = {id(one): one for one in self.configs if id(one) not in covered and hasattr(one, "__dict__")}
        self._own_configs = [vars(one) for one in own.values()]
        self._children = [part._modules for part in (*self._parts, trunk)]
        pairs = [(vars(part), name) for part in self._parts for name in _settings_of(part)]
        self._settings = [space for space, _ in pairs], [name for _, name in pairs]
        self._seen = self._state()

    def _state(self) -> tuple[Any, ...]:
        """Return what decides which rows the head reads, except the trunk's config: parts, forwards, hooks, flags."""
        configs = tuple(map(_CONFIG, self._configs))
        is_hooked = any(map(_PRE_HOOKS, self._readers)) or bool(_every_module._global_forward_pre_hooks)
        return (  # runs in each call, so without Python functions of our own
            *chain.from_iterable(map(dict.values, self._children)),
            *map(_FORWARD, map(type, self._parts)),
            is_hooked and are_hooked(self._readers, only_before=True),
            *map(dict.get, *self._settings),
            *configs,
            *chain.from_iterable(map(dict.values, self._own_configs)),
        )

    @property
    def configs(self) -> list[Any]:
        """The configs of the modules outside the trunk, with their text parts: by these a head finds what it reads."""
        read = (one for one in map(_CONFIG, self._configs) if hasattr(one, "pad_token_id"))
        configs = {id(one): one for one in read}.values() or [self._trunk.config]
        composed = (one.get_text_config() for one in configs if getattr(type(one), "sub_configs", None))
        return [*configs, *composed]

    def _observe(self) -> tuple[PayloadName, bool]:
        """Return the smallest payload that is enough, else `sequence`, and whether the head reads padding."""
        trunk = self._trunk
        # A user's own head, or a hook, may read other rows in requests longer than the trial.
        is_known = not trunk.adapter.is_guess and all(map(_is_known, self._parts))
        if not is_known or are_hooked(self._readers, only_before=True):
            return "sequence", True
        try:
            with untouched(device_of(trunk.module)):
                pad_ids = {setting(one, "pad_token_id") for one in self.configs}
                fake = _FakeTrunk(trunk, pad_ids)
                trial = make_trial(self._model, {trunk.module: fake})
                cases = []
                for call in _calls(trunk, self._takes_choices, next(iter(pad_ids))):
                    with suppress(Exception):  # a model may refuse some calls
                        cases.append((call, _outputs_of(trial, call)))
                enough = next((name for name in _CANDIDATES if _is_enough(trial, fake, name, cases)), None)
                return enough or "sequence", enough is None
        except Exception:  # an unusual model may raise anything
            return "sequence", True


class _FakeTrunk(nn.Module):
    """Replaces a trunk in a trial: returns random states, complete or as restored from an entry with `payload`."""

    def __init__(self, trunk: Trunk, pad_ids: Iterable[int | None]) -> None:
        super().__init__()
        module = trunk.module
        pooler = getattr(module, "pooler", None)
        self.config, self.pooler = trunk.config, None if pooler is None else make_trial(pooler)
        self.payload: Payload | None = None
        self.n_placed = 0
        self._arguments = Arguments(module.forward)
        self._width, self._pad_ids = setting(trunk.config, "hidden_size"), pad_ids
        self._dtype = next(one.dtype for one in module.parameters() if one.is_floating_point())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as Output

        ids, mask = (self._arguments.get(args, kwargs, name) for name in ("input_ids", "attention_mask"))
        random = torch.randn(*ids.shape, self._width, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        states = random.to(ids.device, self._dtype)
        if self.payload is not None:
            for row, own_ids in enumerate(ids.tolist()):
                valid = np.arange(len(own_ids)) if mask is None else np.flatnonzero(mask[row].tolist())
                self._place(self.payload, states[row], valid, np.array(own_ids))
        output = Output(states, None if self.pooler is None else self.pooler(states))
        return output.to_tuple() if self._arguments.get(args, kwargs, "return_dict") is False else output

    def _place(self, payload: Payload, states: Tensor, valid: Ids, ids: Ids) -> None:
        """Overwrite a row's states (T, D) by those restored from an entry of it."""
        if not head_reads_padding(_PLACES[payload.name], valid, ids, *self._pad_ids):
            states[:] = payload.place([payload.take(states, valid)], [valid], len(states))[0]
            self.n_placed += 1


def _is_enough(
    trial: nn.Module, fake: _FakeTrunk, name: PayloadName, cases: Sequence[tuple[Any, list[Tensor]]]
) -> bool:
    """Whether the answers stay bit-equal if the trunk's states are restored from entries with this payload."""
    fake.payload, fake.n_placed = PAYLOADS[name](), 0
    try:
        found = [tensor for call, _ in cases for tensor in _outputs_of(trial, call)]
    except Exception:  # rows that are not kept are NaN, which int8 layers, for example, refuse
        return False
    expected = [tensor for _, answer in cases for tensor in answer]
    return fake.n_placed > 1 and len(found) == len(expected) and all(map(torch.equal, found, expected))


def _outputs_of(trial: nn.Module, call: Mapping[str, Tensor]) -> list[Tensor]:
    """Return all tensors of a model's output; sentence-transformers models take one dict of arguments."""
    is_one = "input_ids" not in Arguments(trial.forward).names and is_from(trial, "sentence_transformers")
    return list(tensors_in(trial(dict(call)) if is_one else trial(**call)))


def _calls(trunk: Trunk, takes_choices: bool, pad_id: int | None) -> Iterator[dict[str, Tensor]]:
    """Yield calls: a row without padding, padded on either side, or with a hole, alone and beside another row."""
    special, device = special_ids(trunk), device_of(trunk.module)
    content = [one for one in range(min(vocabulary_size(trunk), len(special) + 64)) if one not in special]
    full = torch.tensor((content * 6)[:6], device=device)
    for hidden in ([], [4, 5], [0, 1], [2]):
        mask = torch.ones_like(full)
        mask[hidden] = 0
        row = full.masked_fill(mask == 0, 0 if pad_id is None else pad_id)
        for rows, masks in ((row[None], mask[None]), (torch.stack([full, row]), torch.stack([mask | 1, mask]))):
            call = {"input_ids": rows, "attention_mask": masks}
            yield {name: value[None] if takes_choices else value for name, value in call.items()}


def _settings_of(part: nn.Module) -> list[str]:
    """Return attributes that may decide which rows a module reads; user classes are left out: they may record calls."""
    plain = (name for name, value in vars(part).items() if isinstance(value, str | int | float | None))
    return ["forward", *(name for name in plain if _is_known(part) and name != "training")]


def _is_known(part: nn.Module) -> bool:
    return any(is_from(part, package) for package in ("transformers", "torch", "peft", "sentence_transformers"))
