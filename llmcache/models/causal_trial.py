"""Finds by trial what a trunk does with a row's later tokens, its padding, and K/V of earlier calls.

The trial runs a copy of the trunk on tokens that are made up. Windows are made small in the copy, so that a short row
leaves them. What a trial cannot show is not allowed.

Sizes: B rows, T tokens per row, N tokens that are run, P columns of the K/V cache, H K/V heads, D hidden width, D_h
width of a head.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from llmcache.models.adapters import CACHE, Trunk, device_of, first_position
from llmcache.models.arguments import Arguments
from llmcache.models.callables import CallableTrunk
from llmcache.models.causal import UNTRIED, Causal
from llmcache.models.kv_state import cache_in, describe, new_cache, own_of, restore
from llmcache.models.model_config import setting
from llmcache.models.rope import LAYOUTS, rotate, steady_length
from llmcache.models.segments import run_segments, windows
from llmcache.models.trials import Tried, rounding_of, trial_rows
from llmcache.models.twin import make_trial, untouched
from llmcache.models.weights import Weights

#: Keys and values (B, H, P, D_h) by layer.
_Kv = Sequence[tuple[Tensor, Tensor]]

_N_TOKENS = 19  # of a row, at most, padding included
_N_COPIED = 40  # of a row that is continued from a copy, at most
_N_TIMED = 4  # forwards of one length; the fastest counts
#: Most token columns that a forward is taken to cost.
MOST_OF_FORWARD = 2**16
_SHIFT = 7  # columns of padding, positions
_FAR = 512  # most columns between a packed segment and its beginning
#: Settings of windows that are larger than this in a trial.
_WINDOWS = {"sliding_window": 8, "attention_chunk_size": 10, "window_size": 8}


class Causality:
    """Finds what a trunk allows, for each attention implementation; again after edits beyond weight values.

    Thread-safe.
    """

    def __init__(self, trunk: Trunk, weights: Weights) -> None:
        self._trunk, self._weights = trunk, weights
        self._tried: dict[str, Tried[Causal]] = {}  # by `Trunk.attention`

    def of(self, digest: str) -> Causal:
        """Return what the trunk allows with its present settings and weights, whose digest this is."""
        if not (self._trunk.makes_kv or self._trunk.adapter.is_guess):
            return UNTRIED
        attention = self._trunk.attention
        if attention not in self._tried:
            self._tried[attention] = Tried(self._weights, partial(look_at, self._trunk))
        return self._tried[attention].of(digest)


def look_at(trunk: Trunk) -> Causal:
    """Return what a trial shows of a trunk with its present settings, in six forwards or a few more."""
    if isinstance(trunk.module, CallableTrunk):
        return Causal(reason="it is called as a whole")
    try:
        with untouched(device_of(trunk.module)):
            of_layers = tuple(window for _, window in windows(trunk.config, trunk.depth))
            return replace(_Trial(trunk).find(), windows=of_layers)
    except Exception as error:  # whatever an odd model raises
        return Causal(reason=f"it could not be tried ({type(error).__name__}: {error})")


class _Trial:
    """A copy of a trunk, and what it made of a first call of three rows.

    The first row is whole. The second is its beginning after padding. The third begins alike, and padding ends it.
    A forward of so few tokens takes about as long as reading the weights: one answers several questions.
    """

    def __init__(self, trunk: Trunk) -> None:
        self._module: Any = make_trial(trunk.module, runs_functions=True)
        self._trunk = replace(trunk, module=self._module)
        self._names = Arguments(self._module.forward).names
        if self._module.config is not trunk.config:
            for part in (self._module.config, *self._module.modules()):
                _shrink_windows(part)
        limits = setting(trunk.config, "max_position_embeddings"), steady_length(self._module)
        self._longest = min((limit for limit in limits if limit), default=_FAR)
        self._n = min(_N_TOKENS, self._longest - first_position(trunk.module) - 1)
        self._n_own = self._n - _SHIFT  # tokens of a padded row
        self._n_common = 2 * self._n_own // 3  # tokens that the rows begin with
        self._ids = trial_rows(trunk, 2, self._n)  # of the first row, and the third's if it had no padding
        self._ids[1, : self._n_common] = self._ids[0, : self._n_common]
        self._keeps_kv = CACHE in self._names
        self._made: Any = None  # the K/V cache that it makes if it is asked to keep K/V
        states, kv = self._begin()
        self._states, self._padded, self._other = states[:1], states[1, _SHIFT:], states[2, : self._n_own]
        self._kv: _Kv = [(keys[:1], values[:1]) for keys, values in kv]
        self._here = self._columns(self._kv, 0)
        self._shifted = self._columns([(keys[1:], values[1:]) for keys, values in kv], _SHIFT)
        self._tolerance = 10 * rounding_of(self._module, self._states)

    def find(self) -> Causal:
        """Return what the trial shows."""
        found = self._look_at_padding()
        if not self._begins_alike():
            return replace(found, reason="its tokens attend to later ones")
        shapes = {(keys.shape, values.shape) for keys, values in self._kv}
        if len(self._kv) != self._trunk.depth or len(shapes) > 1 or self._kv[0][0].shape[2] != self._n:
            return self._look_at_copies(replace(found, rotates=""))
        found = replace(found, is_causal=True, makes_dynamic_cache=_shows(self._makes_dynamic_cache))
        if not _shows(self._cuts):
            reason = "the rest of a row comes out differently after a known beginning"
            return replace(found, rotates="", reason=reason)
        packs = _shows(self._packs)
        of_segment = 0 if packs else self._cost_of_forward()
        return replace(found, cuts=True, packs=packs, of_segment=of_segment, steps=_shows(self._steps), reason="")

    def _begin(self) -> tuple[Tensor, _Kv]:
        """Run the three rows; with K/V if a `DynamicCache` can keep all columns, made by the trunk or passed."""
        n, (first, other) = self._n_own, self._ids
        ids = torch.stack([first, torch.cat([other[n:], first[:n]]), torch.cat([other[:n], first[n:]])])
        self._mask = torch.ones_like(ids)
        self._mask[1, :_SHIFT] = self._mask[2, n:] = 0
        for makes_cache in (True, False) if self._keeps_kv else ():
            with suppress(Exception):  # its cache is of another kind
                if not makes_cache or _is_plain(DynamicCache(config=self._module.config)):
                    return self._run(ids, makes_cache=makes_cache, attention_mask=self._mask)
        self._keeps_kv = False
        return self._run(ids, attention_mask=self._mask)

    def _run(self, ids: Tensor, kv: _Kv = (), makes_cache: bool = False, **arguments: Any) -> tuple[Tensor, _Kv]:
        """Run the copy on tokens (B, N) after known K/V; return their states (B, N, D), and the K/V of all."""
        kv_cache: Any = None if makes_cache else _cache_of(kv)
        of_kv = {CACHE: kv_cache, "use_cache": True} if self._keeps_kv else {"use_cache": False}
        taken = {name: value for name, value in (of_kv | arguments).items() if name in self._names}
        output = self._module(input_ids=ids, **taken)
        if makes_cache:
            kv_cache = self._made = cache_in(output)
        if not _is_plain(kv_cache) or any(layer.keys is None for layer in kv_cache.layers):
            raise TypeError("another kind of K/V cache")
        states = output if isinstance(output, Tensor) else output[0]
        return states, [(layer.keys, layer.values) for layer in kv_cache.layers]

    def _is_close(self, one: Tensor, other: Tensor) -> bool:
        """Whether vectors (..., D) differ, in the mean, by at most the tolerance as a share of their length."""
        one, other = one.float(), other.float()
        share = (one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        return bool(share.mean() <= self._tolerance)

    def _begins_alike(self) -> bool:
        """Whether the third row's states begin like the first's, although other tokens follow."""
        return self._is_close(self._other[: self._n_common], self._states[0, : self._n_common])

    def _cuts(self) -> bool:
        for n_known in (self._n_common, self._n - 1):
            known = [(keys[:, :, :n_known], values[:, :, :n_known]) for keys, values in self._kv]
            states, kv = self._run(self._ids[:1, n_known:], known)
            has_grown = all(len(keys[0, 0]) == len(values[0, 0]) == self._n for keys, values in kv)
            if not (has_grown and self._is_close(states, self._states[:, n_known:])):
                return False
        return True

    def _steps(self) -> bool:
        """Try two tokens after the others, one by one, with a K/V cache of the config if that keeps windows."""
        kv_cache = new_cache(self._trunk)
        if _is_plain(kv_cache):
            return True
        ids, n_known = self._ids[:1], self._n - 2
        self._go_on(ids[:, :n_known], kv_cache, 0)
        states = torch.cat([self._go_on(ids[:, : n + 1], kv_cache, n) for n in (n_known, n_known + 1)], dim=1)
        return self._is_close(states, self._states[:, n_known:])

    def _look_at_copies(self, found: Causal) -> Causal:
        """Return what K/V caches show that blocks cannot hold."""
        own_cache = None
        if not self._keeps_kv and CACHE in self._names:
            with suppress(Exception):  # whatever an odd model raises
                kind = type(self._make(use_cache=True))
                own_cache = kind if issubclass(kind, DynamicCache) and kind is not DynamicCache else None
        found = replace(found, makes_dynamic_cache=_shows(self._makes_dynamic_cache))
        reason = "it keeps something else than one column of K/V per token, the same in each layer"
        if _shows(partial(self._copies, partial(new_cache, self._trunk, own_cache or DynamicCache))):
            return replace(found, copies=True, own_cache=own_cache, reason=reason)
        return replace(found, reason=f"{reason}, and a copy of that is not continued as the whole row is")

    def _copies(self, new: Callable[[], DynamicCache]) -> bool:
        """Try beginnings of two lengths, each continued twice, as a copy must not change what is kept.

        The row is longer than others, since layers may choose a number of tokens that they attend to.
        """
        n = min(_N_COPIED, self._longest - first_position(self._module) - 1)
        ids, kv_cache = trial_rows(self._trunk, 1, n), new()
        whole = self._go_on(ids, kv_cache, 0)
        _, kept = describe(kv_cache.layers, own_of(kv_cache))
        for n_known in (self._n_common, n - 1):
            kv_cache = new()
            begun = self._go_on(ids[:, :n_known], kv_cache, 0)
            described, tensors = describe(kv_cache.layers, own_of(kv_cache))
            for _ in range(2):
                copied = new()
                restore(copied, described, tensors)
                states = torch.cat([begun, self._go_on(ids, copied, n_known)], dim=1)
                _, found = describe(copied.layers, own_of(copied))
                pairs = zip(found, kept, strict=True)
                # A state may matter little to so short a row, and much to a longer one.
                are_kept = all(self._is_close(one.reshape(1, -1), other.reshape(1, -1)) for one, other in pairs)
                if not (are_kept and self._is_close(states, whole)):
                    return False
        return True

    def _go_on(self, ids: Tensor, kv_cache: DynamicCache, n_known: int) -> Tensor:
        """Run the tokens of a row (1, n) after those that a K/V cache holds; return their states.

        Raises:
            ValueError: It is another K/V cache that was filled.
        """
        arguments: dict[str, Any] = {CACHE: kv_cache, "use_cache": True}
        if n_known and "position_ids" in self._names:
            arguments["position_ids"] = torch.arange(n_known, ids.shape[1], device=ids.device)[None]
        output = self._module(input_ids=ids[:, n_known:], **arguments)
        if not (cache_in(output) is kv_cache and kv_cache.get_seq_length() == ids.shape[1]):
            raise ValueError("another K/V cache")
        states: Tensor = output[0]
        return states

    def _packs(self) -> bool:
        """Try three segments in a row: two that follow the common beginning, and one that follows the first."""
        n_far = max(0, min(_FAR, self._longest - 2 * self._n))  # columns that no token sees
        room = (0, 0, 0, n_far)
        known = [(pad(keys, room), pad(values, room)) for keys, values in self._here]
        n, n_common = self._n_own - self._n_common, self._n_common
        n_past = n_common + n_far
        places = [(0, n_common), (1, n_common), (0, n_common + n)]  # row and first column of each segment
        sees = torch.zeros(3 * n, n_past + 3 * n, dtype=torch.bool)
        sees[:, :n_common] = True
        sees[:, n_past:] = torch.ones(n, n, dtype=torch.bool).tril().repeat(3, 3)
        sees[:, n_past:] &= torch.eye(3, dtype=torch.bool).repeat_interleave(n, 0).repeat_interleave(n, 1)
        sees[2 * n :, n_past : n_past + n] = True

        def joined(rows: Tensor | Sequence[Tensor]) -> Tensor:
            return torch.cat([rows[row][first : first + n] for row, first in places])[None]

        positions = torch.arange(self._n).expand(2, -1)
        to = self._ids.device
        output = run_segments(
            self._module, joined(self._ids), joined(positions).to(to), _cache_of(known), sees.to(to), self._trunk
        )
        return self._is_close(output[0], joined((self._states[0], self._other)))

    def _cost_of_forward(self) -> int:
        """Return how many token columns take as long as one more forward, which reads all weights again."""
        (row,) = trial_rows(self._trunk, 1, self._n)

        def seconds(ids: Tensor) -> float:
            started = perf_counter()
            self._run(ids)[0].cpu()
            return perf_counter() - started

        with suppress(Exception):  # whatever an odd model raises
            one, every = (min(seconds(row[None, :n]) for _ in range(_N_TIMED)) for n in (1, self._n))
            if every > one:
                return min(round(one * (self._n - 1) / (every - one)), MOST_OF_FORWARD)
        return MOST_OF_FORWARD

    def _look_at_padding(self) -> Causal:
        """Return what the padded rows show, and how keys are rotated, if that shows where they stand."""
        expected = self._states[0, : self._n_own]
        if not self._begins_alike():  # padding matters, or the tokens that follow
            padded = self._other
            expected, self._other = self._run(self._ids[:, : self._n_own])[0]
            if not self._is_close(padded, self._other):
                return UNTRIED
        is_same = knows_padding = self._is_close(self._padded, expected)
        is_near, rotates = self._are_close(self._shifted, self._here), self._find_rotation(self._shifted)
        if (is_near or not rotates) and self._keeps_kv and "position_ids" in self._names:
            positions = torch.arange(_SHIFT, _SHIFT + self._n_common, device=self._ids.device)[None]
            later = self._run(self._ids[:1, : self._n_common], position_ids=positions)[1]
            rotates = self._find_rotation(later)
            is_by_column = _distance(self._shifted, later) < _distance(self._shifted, self._here)
        else:
            is_by_column = not (self._kv and is_same and is_near)
        if not is_same and "position_ids" in self._names:  # do the positions alone differ?
            ids = torch.cat([self._ids[1, self._n_own :], self._ids[0, : self._n_own]])[None]
            mask = self._mask[1:2]
            states, _ = self._run(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
            knows_padding = self._is_close(states[0, _SHIFT:], expected)
        return Causal(
            knows_padding=knows_padding, counts_padding=not is_same, is_by_column=is_by_column, rotates=rotates
        )

    def _make(self, **asked: bool) -> Any:
        """Return the K/V cache that the copy makes if it is passed none."""
        return cache_in(self._module(input_ids=self._ids[:1, :1], **asked))

    def _makes_dynamic_cache(self) -> bool:
        kv_cache = self._make(use_cache=True) if self._made is None else self._made
        usual = DynamicCache(config=self._module.config)
        is_usual = type(kv_cache) is DynamicCache and [*map(type, kv_cache.layers)] == [*map(type, usual.layers)]
        heeds_config = (self._make() is not None) == bool(setting(self._module.config, "use_cache"))
        return is_usual and heeds_config and self._make(use_cache=False) is None

    def _find_rotation(self, later: _Kv) -> str:
        """Return the layout by which `rotate` makes the keys of all layers `_SHIFT` positions later; "" if none."""
        scales = "llama_4_scaling_beta" in (setting(self._trunk.config, "rope_parameters") or ())  # by position
        if not later or scales or steady_length(self._module) is not None:
            return ""
        offsets = self._ids.new_full((1, self._n_common), _SHIFT)

        def fits(layout: str) -> bool:
            rotated = [(rotate(keys, offsets, self._module, layout), values) for keys, values in self._here]
            return self._are_close(later, rotated)

        return next((layout for layout in LAYOUTS if _shows(partial(fits, layout))), "")

    def _columns(self, kv: _Kv, first: int) -> _Kv:
        """Return the K/V of the tokens that row 0 begins with, from a column on."""
        own = slice(first, first + self._n_common)
        return [(keys[:1, :, own], values[:1, :, own]) for keys, values in kv]

    def _are_close(self, one: _Kv, other: _Kv) -> bool:
        pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
        return all(self._is_close(mine, theirs) for mine, theirs in pairs)


def _shows(trial: Callable[[], bool]) -> bool:
    """Return what a trial shows; False if the trunk refuses it."""
    try:
        return trial()
    except Exception:  # whatever an odd model raises
        return False


def _is_plain(kv_cache: Any) -> bool:
    """Whether a K/V cache keeps all columns of each layer, and nothing else."""
    return type(kv_cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in kv_cache.layers)


def _shrink_windows(part: Any) -> None:
    for name, size in _WINDOWS.items():
        value = vars(part).get(name)
        if type(value) is int and value > size:
            setattr(part, name, size)


def _cache_of(kv: _Kv) -> DynamicCache:
    """Return a K/V cache with K/V by layer."""
    kv_cache = DynamicCache()
    for number, (keys, values) in enumerate(kv):
        kv_cache.update(keys, values, number)
    return kv_cache


def _distance(one: _Kv, other: _Kv) -> float:
    """Return how far K/V of the same tokens is apart."""
    pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
    return sum(float((mine.float() - theirs.float()).norm()) for mine, theirs in pairs)
