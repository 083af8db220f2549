"""What a trunk does with a row's later tokens, its padding, and K/V of earlier calls, found by trial.

The trial runs a copy of the trunk on tokens that are made up. Windows are made small in the copy, so that a short row
leaves them. What a trial cannot show is not allowed.

Sizes: B rows, T tokens per row, N tokens that are run, P columns of the K/V cache, H K/V heads, D hidden width, D_h
width of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from llmcache.models.adapters import CACHE, Trunk, device_of, first_position
from llmcache.models.arguments import Arguments
from llmcache.models.callables import CallableTrunk
from llmcache.models.kv_state import describe, new_cache, restore
from llmcache.models.model_config import setting
from llmcache.models.packing import parts_of
from llmcache.models.rope import LAYOUTS, rotate, steady_length
from llmcache.models.segments import run_segments, windows
from llmcache.models.trials import Tried, rounding_of, trial_rows
from llmcache.models.twin import make_trial, untouched
from llmcache.models.weights import Weights

#: Keys and values (B, H, P, D_h) by layer.
_Kv = Sequence[tuple[Tensor, Tensor]]

_N_TOKENS = 40  # of a row, at most
_SHIFT = 7  # columns of padding, positions
_FAR = 512  # most columns between a packed segment and its beginning
#: Settings of windows that are larger than this in a trial.
_WINDOWS = {"sliding_window": 8, "attention_chunk_size": 16, "window_size": 8}


@dataclass(frozen=True, slots=True)
class Causal:
    """What a trial of a trunk has shown. By default nothing.

    Attributes:
        is_causal: A later token does not change the states of earlier ones, and the trunk fills a `DynamicCache`: one
            column of K/V per token, in every layer.
        cuts: After a beginning whose K/V is known, the rest of a row has the states that it has in the whole row.
            Without `knows_padding`: if the call has no padding.
        packs: `run_segments` gives each segment the states that it has alone.
        knows_padding: Tokens that the mask leaves out affect others only by their number, and not if positions are
            passed.
        counts_padding: They do so by their number.
        is_by_column: A token's position, if none is passed, is its column, padding included.
        copies: A K/V cache that keeps something else (states) can be copied after a beginning, and the copy continued:
            the rest of a row without padding has the states that it has in the whole row.
        rotates: How `rotate` makes the keys of tokens at other positions, one of `LAYOUTS`; "" if it does not.
        makes_dynamic_cache: It makes a `DynamicCache` of its config if it is passed no cache, and `use_cache` is True
            as passed, or else in its config; none if that is False.
        windows: By layer, to how many tokens a token attends, itself included; None: to all.
        reason: Why it does not cut, in words; "" if it does.
    """

    is_causal: bool = False
    cuts: bool = False
    packs: bool = False
    copies: bool = False
    knows_padding: bool = False
    counts_padding: bool = True
    is_by_column: bool = True
    rotates: str = ""
    makes_dynamic_cache: bool = False
    windows: tuple[int | None, ...] = ()
    reason: str = "it was not tried"


UNTRIED = Causal()


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
    """Return what a trial shows of a trunk with its present settings; at most fifteen forwards of up to 94 tokens."""
    if isinstance(trunk.module, CallableTrunk):
        return Causal(reason="it is called as a whole")
    try:
        with untouched(device_of(trunk.module)):
            of_layers = tuple(window for _, window in windows(trunk.config, trunk.depth))
            return replace(_Trial(trunk).find(), windows=of_layers)
    except Exception as error:  # whatever an odd model raises
        return Causal(reason=f"it could not be tried ({type(error).__name__}: {error})")


class _Trial:
    """A copy of a trunk, and the states and K/V of two rows that it was run on."""

    def __init__(self, trunk: Trunk) -> None:
        self._module: Any = make_trial(trunk.module, runs_functions=True)
        self._trunk = replace(trunk, module=self._module)
        self._names = Arguments(self._module.forward).names
        if self._module.config is not trunk.config:
            for part in (self._module.config, *self._module.modules()):
                _shrink_windows(part)
        limits = setting(trunk.config, "max_position_embeddings"), steady_length(self._module)
        self._longest = min((limit for limit in limits if limit), default=_FAR)
        self._n = min(_N_TOKENS, self._longest - _SHIFT - first_position(trunk.module) - 1)
        self._n_common = self._n // 3  # tokens that both rows begin with
        self._ids = trial_rows(trunk, 2, self._n)
        self._ids[1, : self._n_common] = self._ids[0, : self._n_common]
        self._keeps_kv = CACHE in self._names
        try:
            self._states, self._kv = self._run(self._ids)
        except Exception:  # its cache is of another kind
            self._keeps_kv = False
            self._states, self._kv = self._run(self._ids)
        self._tolerance = 10 * rounding_of(self._module, self._states)
        self._here = self._columns(self._kv, 0)
        self._later: _Kv = ()  # the same tokens, `_SHIFT` positions later
        if self._keeps_kv and "position_ids" in self._names:
            positions = torch.arange(_SHIFT, _SHIFT + self._n_common, device=self._ids.device)[None]
            self._later = self._run(self._ids[:1, : self._n_common], position_ids=positions)[1]

    def find(self) -> Causal:
        """Return what the trial shows."""
        found = self._look_at_padding()
        if not self._is_close(self._states[1, : self._n_common], self._states[0, : self._n_common]):
            return replace(found, reason="its tokens attend to later ones")
        shapes = {tensor.shape[::2] for layer in self._kv for tensor in layer if tensor is not None}
        if len(self._kv) != self._trunk.depth or shapes != {self._ids.shape}:
            found = replace(found, copies=_shows(self._copies), makes_dynamic_cache=_shows(self._makes_dynamic_cache))
            return replace(found, reason="it keeps something else than one column of K/V per token and layer")
        found = replace(found, is_causal=True, makes_dynamic_cache=_shows(self._makes_dynamic_cache))
        if not _shows(self._cuts):
            return replace(found, reason="the rest of a row comes out differently after a known beginning")
        return replace(found, cuts=True, packs=_shows(self._packs), rotates=self._find_rotation(), reason="")

    def _run(self, ids: Tensor, kv: _Kv = (), **arguments: Any) -> tuple[Tensor, _Kv]:
        """Run the copy on tokens (B, N) after known K/V; return their states (B, N, D), and the K/V of all."""
        kv_cache: Any = _cache_of(kv)
        of_kv = {CACHE: kv_cache, "use_cache": True} if self._keeps_kv else {"use_cache": False}
        taken = {name: value for name, value in (of_kv | arguments).items() if name in self._names}
        output = self._module(input_ids=ids, **taken)
        states = output if isinstance(output, Tensor) else output[0]
        return states, [(layer.keys, layer.values) for layer in kv_cache.layers]

    def _is_close(self, one: Tensor, other: Tensor) -> bool:
        """Whether vectors (..., D) differ, in the mean, by at most the tolerance as a share of their length."""
        one, other = one.float(), other.float()
        share = (one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        return bool(share.mean() <= self._tolerance)

    def _cuts(self) -> bool:
        for n_known in (self._n_common, self._n - self._n_common):
            known = [(keys[:1, :, :n_known], values[:1, :, :n_known]) for keys, values in self._kv]
            states, kv = self._run(self._ids[:1, n_known:], known)
            has_grown = all(len(keys[0, 0]) == len(values[0, 0]) == self._n for keys, values in kv)
            if not (has_grown and self._is_close(states, self._states[:1, n_known:])):
                return False
        return True

    def _copies(self) -> bool:
        """Try beginnings of two lengths, each continued twice, as a copy must not change what is kept."""
        _, whole = self._go_on(new_cache(self._trunk), 0, self._n)
        for n_known in (self._n_common, self._n - 1):
            kv_cache = new_cache(self._trunk)
            described, kept = self._go_on(kv_cache, 0, n_known)
            for _ in range(2):
                copied = new_cache(self._trunk)
                restore(copied, described, kept)
                _, found = self._go_on(copied, n_known, self._n)
                pairs = zip(found, whole, strict=True)
                # A state may matter little to so short a row, and much to a longer one.
                if not all(self._is_close(one.reshape(1, -1), other.reshape(1, -1)) for one, other in pairs):
                    return False
        return True

    def _go_on(self, kv_cache: DynamicCache, begin: int, end: int) -> tuple[list[Any], list[Tensor]]:
        """Run tokens of row 0 after what a K/V cache holds; return what it keeps then, by `describe`.

        Raises:
            ValueError: The states are not those of the whole row, or it is another K/V cache that was filled.
        """
        output = self._module(input_ids=self._ids[:1, begin:end], past_key_values=kv_cache, use_cache=True)
        is_filled = parts_of(output).get(CACHE, output[1]) is kv_cache and kv_cache.get_seq_length() == end
        if not (is_filled and self._is_close(output[0], self._states[:1, begin:end])):
            raise ValueError("states differ")
        return describe(kv_cache.layers)

    def _packs(self) -> bool:
        """Try three segments in a row: two that follow the common beginning, and one that follows the first."""
        n_far = max(0, min(_FAR, self._longest - 2 * self._n))  # columns that no token sees
        room = (0, 0, 0, n_far)
        known = [(pad(keys, room), pad(values, room)) for keys, values in self._here]
        n, n_common = self._n // 6, self._n_common
        n_past = n_common + n_far
        places = [(0, n_common), (1, n_common), (0, n_common + n)]  # row and first column of each segment
        sees = torch.zeros(3 * n, n_past + 3 * n, dtype=torch.bool)
        sees[:, :n_common] = True
        sees[:, n_past:] = torch.ones(n, n, dtype=torch.bool).tril().repeat(3, 3)
        sees[:, n_past:] &= torch.eye(3, dtype=torch.bool).repeat_interleave(n, 0).repeat_interleave(n, 1)
        sees[2 * n :, n_past : n_past + n] = True

        def joined(rows: Tensor) -> Tensor:
            return torch.cat([rows[row, first : first + n] for row, first in places])[None]

        positions = torch.arange(self._n).expand(2, -1)
        to = self._ids.device
        output = run_segments(
            self._module, joined(self._ids), joined(positions).to(to), _cache_of(known), sees.to(to), self._trunk
        )
        return self._is_close(output[0], joined(self._states))

    def _look_at_padding(self) -> Causal:
        """Return what a row padded before its tokens, and one padded after them, show."""
        n, (first, second) = _SHIFT, self._ids
        ids = torch.stack([torch.cat([second[-n:], first]), torch.cat([second, first[-n:]])])
        mask = torch.ones_like(ids)
        mask[0, :n] = mask[1, -n:] = 0
        states, kv = self._run(ids, attention_mask=mask)
        if not self._is_close(states[1, :-n], self._states[1]):
            return UNTRIED
        is_same = knows_padding = self._is_close(states[0, n:], self._states[0])
        kv = self._columns(kv, n)
        if self._later:
            is_by_column = _distance(kv, self._later) < _distance(kv, self._here)
        else:
            is_by_column = not (kv and is_same and self._are_close(kv, self._here))
        if not is_same and "position_ids" in self._names:  # do the positions alone differ?
            states, _ = self._run(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
            knows_padding = self._is_close(states[0, n:], self._states[0])
        return Causal(knows_padding=knows_padding, counts_padding=not is_same, is_by_column=is_by_column)

    def _makes_dynamic_cache(self) -> bool:
        def cache_of(**asked: bool) -> Any:
            parts = parts_of(self._module(input_ids=self._ids[:, :2], **asked))
            return parts.get(CACHE, parts.get(1))

        kv_cache, usual = cache_of(use_cache=True), DynamicCache(config=self._module.config)
        is_usual = type(kv_cache) is DynamicCache and [*map(type, kv_cache.layers)] == [*map(type, usual.layers)]
        heeds_config = (cache_of() is not None) == bool(setting(self._module.config, "use_cache"))
        return is_usual and heeds_config and cache_of(use_cache=False) is None

    def _find_rotation(self) -> str:
        """Return the layout by which `rotate` makes the keys of all layers at later positions; values do not change."""
        scales = "llama_4_scaling_beta" in (setting(self._trunk.config, "rope_parameters") or ())  # by position
        if not self._later or scales or steady_length(self._module) is not None:
            return ""
        offsets = self._ids.new_full((1, self._n_common), _SHIFT)

        def fits(layout: str) -> bool:
            rotated = [(rotate(keys, offsets, self._module, layout), values) for keys, values in self._here]
            return self._are_close(self._later, rotated)

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
