"""From settings and a model to the parts that serve its calls; what does not fit together is refused here."""

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from llmcache.audit.audit import Audit
from llmcache.audit.recompute import RecomputeQueue
from llmcache.audit.recomputer import Compute, Recomputer
from llmcache.banks.bank import Bank
from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.compression import CODECS, Codec
from llmcache.banks.memory import Memory
from llmcache.banks.stores import MEMORY, STORES
from llmcache.banks.stores.seal import Seal
from llmcache.banks.tier import BreakEven, Tier
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.observer import Observer
from llmcache.calibration.requirements import check_settings, refuse_coupled, refuse_unsafe
from llmcache.calibration.sharing import SharedCalibration
from llmcache.calibration.training import CalibrationFitter
from llmcache.config import CacheConfig
from llmcache.counters import Counters
from llmcache.errors import ConfigError, UnsupportedModelError
from llmcache.execution.break_even import measure
from llmcache.execution.components import Calibrated, Components
from llmcache.execution.cost import PATIENCE, PATIENCE_OF_TAU, CostModel
from llmcache.fingerprint import FINGERPRINTS, Fingerprint, Learned
from llmcache.fingerprint.token_vectors import TokenVectors
from llmcache.matching import DECISIONS
from llmcache.matching.answers import Reading, find_answers, read_logits
from llmcache.matching.content_gate import ContentGate
from llmcache.matching.decision import Decision, thresholds
from llmcache.matching.index import INDEXES
from llmcache.models.adapters import Trunk, device_of, first_attention, locate, special_ids, vocabulary_size
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head, find_head
from llmcache.models.payloads import PAYLOADS, Payload
from llmcache.models.twin import run_unseen
from llmcache.models.weights import Weights
from llmcache.policies import POLICIES
from llmcache.request.rows import id_dtype
from llmcache.reuse.base import Rung
from llmcache.reuse.chooser import NeighbourChooser
from llmcache.reuse.exact import Exact
from llmcache.reuse.paper import Paper
from llmcache.reuse.prefix.block_pool import BlockPool
from llmcache.reuse.semantic import Fixed, Semantic


def assemble(
    model: nn.Module,
    config: CacheConfig,
    tokenizer: Any = None,
    answer_of: Reading = read_logits,
    own_rungs: Sequence[Callable[[CacheBanks], Rung]] = (),
) -> Components:
    """Build the parts that the settings and the model ask for; what does not suit is refused."""
    trunk, head, payload = _inspect(model, config)
    layers = _choose_layers(trunk, payload, config)
    codec: Codec = config.compression.build(CODECS)
    fingerprint, decision = _make_matching(config)  # also where they serve nothing yet: a wrong name is told now
    searched_by = None if config.tau is None else fingerprint
    is_exact = config.serves_exact and codec.is_lossless(next(trunk.module.parameters()).dtype)
    prefix = _make_blocks(trunk, payload, config, lambda: banks.spent)
    # Entries are needed where something else may read them, or was named to keep them.
    is_plain = not own_rungs and config.compression.name == "none"
    is_in_blocks = prefix is not None and is_exact and is_plain and layers[-1] == trunk.depth - 1
    counters, weights = Counters(), Weights(trunk.module)
    coupling = Coupling(trunk, weights)
    with suppress(RuntimeError):  # weights that cannot be read yet are read at the first call that can
        digest = weights.digest()  # now, so that the first request does not wait for it
        if head.observed is not None:
            head.observed.was_of(digest)
        if weights.unreadable is None and (reason := coupling.reason(digest)) and config.tau is not None:
            refuse_coupled(f"tau={config.tau}", reason)
    keeps_entries = is_exact and not codec.n_fit  # of a codec that is fitted, other processes know nothing
    tier = _open_tier(trunk, payload, config, layers, counters, is_of_use=keeps_entries or prefix is not None)
    banks = _make_banks(trunk, payload, config, layers, searched_by, prefix, tier if keeps_entries else None)
    observer = None
    if config.tau is not None and decision.reads_answers:
        observer = Observer(banks, find_answers(config.answer, head, model), answer_of)
        if banks.elsewhere is not None:
            banks.elsewhere.answered_by = Weights(model, without=trunk.module).digest
    gate = _make_gate(trunk, config, tokenizer)
    chooser = NeighbourChooser(banks, decision, None if observer is None else observer.answers, gate)
    rungs = _choose_rungs(banks, trunk, config, is_exact, chooser, own_rungs)
    if not rungs and config.learn is None and prefix is None:
        raise ConfigError(
            f"no rung is left: exact={config.serves_exact}, tau={config.tau}, compression={config.compression.name!r} "
            "(lossless rungs do not serve states that compression changed); set tau, or compression 'none'"
        )
    parts = Components(
        trunk,
        head,
        payload,
        banks,
        rungs,
        fingerprint=searched_by,
        is_per_layer=config.fingerprint_per_layer,
        attention=first_attention(trunk) if searched_by is not None and searched_by.reads_attention else None,
        weights=weights,
        coupling=coupling,
        gate=gate,
        prefix=prefix,
        is_in_blocks=is_in_blocks,
        observer=observer,
        tier=tier,
        counters=counters,
    )
    if config.auto_bypass and config.mode != "paper":  # which is the reference, and measured as written
        parts.cost = CostModel(trunk.depth, PATIENCE if config.tau is None else PATIENCE_OF_TAU)
    return parts


def _inspect(model: nn.Module, config: CacheConfig) -> tuple[Trunk, Head, Payload]:
    """What is hooked, what reads its output, and what of a state is kept for that."""
    trunk = locate(model, config.adapter)
    vocabulary_size(trunk)  # each call reads tokens by it
    head = find_head(model, trunk)
    if config.tau is not None:
        refuse_unsafe(f"tau={config.tau}", head, config)
    payload = _choose_payload(trunk, head, config)
    _refuse_shared(trunk, payload)
    return trunk, head, payload


def make_calibrated(
    parts: Components, model: nn.Module, config: CacheConfig, tokenizer: Any, answer_of: Reading, compute: Compute
) -> Calibrated:
    """Build what calibrates a cache; `compute` runs the wrapped model in a namespace, on tokenised inputs."""
    check_settings(parts.head, config)
    digest = parts.weights.digest()
    if parts.weights.unreadable is None:
        refuse_coupled("a calibration", parts.coupling.reason(digest))
    names = _names(model)
    if config.audit and names is not None and "input_ids" not in names:
        raise ConfigError(
            f"audit={config.audit}: a hit is computed again from input_ids, which {type(model).__name__}.forward() "
            f"does not take ({', '.join(sorted(names)) or 'nothing'}): name its argument so, or set audit=0"
        )
    fingerprint, decision = _make_matching(config)
    assert isinstance(fingerprint, Learned)
    tokens = TokenVectors(parts.trunk, parts.payload, partial(run_unseen, parts.trunk.module))
    fingerprint.bind(tokens.embed, tokens.think)
    answers = find_answers(config.answer, parts.head, model)
    chooser = NeighbourChooser(parts.banks, decision, answers, parts.gate)
    head = Weights(model, without=parts.trunk.module)
    if parts.banks.elsewhere is not None:
        parts.banks.elsewhere.answered_by = head.digest
    fitter = CalibrationFitter(parts.banks, fingerprint, tokens, chooser, answers)

    calibrated = CalibratedReuse(fitter, head, parts.counters, config)
    observer = Observer(parts.banks, answers, answer_of, head)
    recomputer = Recomputer(
        parts.banks,
        parts.trunk,
        parts.weights,
        fingerprint,
        calibrated,
        observer,
        parts.counters,
        compute,
        RecomputeQueue(getattr(parts.trunk.config, "pad_token_id", None) or 0, names),
    )
    audit = Audit(recomputer, config)
    observer.learner = audit
    sharing = None
    if config.share_calibration and parts.tier is not None:
        special = special_ids(parts.trunk, tokenizer)
        sharing = SharedCalibration(parts.tier, parts.banks, calibrated, audit.alarm, config, special)
    return Calibrated(fingerprint, observer, calibrated, audit, sharing)


def _names(model: nn.Module) -> set[str] | None:
    """What a model may be passed by name; None: anything."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return None if takes_all else {parameter.name for parameter in parameters}


def _make_gate(trunk: Trunk, config: CacheConfig, tokenizer: Any) -> ContentGate | None:
    if config.gate is False:
        return None
    if tokenizer is None:
        raise ConfigError(f"gate={config.gate}: it compares words, so give wrap() the tokenizer")
    options = {} if config.gate is True else config.gate
    try:
        return ContentGate(tokenizer, id_dtype(vocabulary_size(trunk)), **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"gate: {options}: {error}") from error


def _make_matching(config: CacheConfig) -> tuple[Fingerprint, Decision]:
    """Fingerprint and decision that the settings name; a fingerprint that could never be fitted is refused."""
    fingerprint: Fingerprint = config.fingerprint_component.build(FINGERPRINTS)
    if config.max_entries is not None and config.max_entries < fingerprint.n_fit:
        raise ConfigError(
            f"max_entries={config.max_entries}: fingerprint {config.fingerprint_component.name!r} is fitted on "
            f"{fingerprint.n_fit} stored requests, which would never be there; raise it, or lower fit_on"
        )
    if config.fingerprint_per_layer and not fingerprint.fits_any_layer:
        fitting = [name for name, kind in FINGERPRINTS.items() if kind.fits_any_layer]
        raise ConfigError(
            f"fingerprint_per_layer=True: fingerprint {config.fingerprint.name!r} cannot be taken from the states that "
            f"enter any layer; use one of {', '.join(fitting)}, or leave it out"
        )
    config.index_component.build(INDEXES, 8)  # made anew for each partition, once requests are there
    return fingerprint, config.decide_component.build(DECISIONS)


def _choose_payload(trunk: Trunk, head: Head, config: CacheConfig) -> Payload:
    name: str = config.payload
    if name == "auto":
        # Embeddings served losslessly keep all tokens: the caller may ask for token embeddings too.
        wants_all = config.mode == "paper" or (
            head.name == "sentence embedding" and config.tau is None and config.learn is None
        )
        name = "sequence" if wants_all or trunk.adapter.is_guess else head.payload
    if name == "mean" and trunk.adapter.is_guess:
        raise ConfigError(
            f"payload='mean': {type(trunk.module).__name__} is not in the adapter table, so whether a norm follows its "
            "last layer is unknown; register an adapter for it, or use payload='sequence'"
        )
    is_enough = name in ("sequence", head.payload) or head.reads == "states" or config.allow_unsafe
    if not is_enough:
        raise ConfigError(
            f"payload={name!r}: this model's {head.name} reads more than that; use payload={head.payload!r}, "
            "'sequence' or 'auto'"
        )
    return PAYLOADS[name]()


def _refuse_shared(trunk: Trunk, payload: Payload) -> None:
    """Refuse decoders that run one layer several times: it writes the K/V of all times to one place."""
    if len(set(trunk.layers)) < trunk.depth and trunk.makes_kv and not payload.fits_any_length:
        raise UnsupportedModelError(
            f"{type(trunk.module).__name__}: one layer is run at several places, so its K/V cannot be told apart; "
            "encoders that share layers, and classifiers, can be wrapped"
        )


def _choose_layers(trunk: Trunk, payload: Payload, config: CacheConfig) -> list[int]:
    last = trunk.depth - 1
    if config.layers == "all" or (config.layers == "auto" and config.mode == "paper" and not payload.fits_any_length):
        chosen = list(range(trunk.depth))
    elif config.layers in ("last", "auto"):
        chosen = [last]
    else:
        chosen = sorted({int(layer) + trunk.depth * (int(layer) < 0) for layer in config.layers})
    if not chosen or chosen[0] < 0 or chosen[-1] > last:
        raise ConfigError(f"layers={config.layers}: this model has layers 0 to {last}; name at least one of them")
    if payload.fits_any_length and chosen != [last]:
        raise ConfigError(
            f"layers={config.layers}: payload {payload.name!r} keeps one vector, from which no further layer can be "
            "computed; store the last layer only, or use payload='sequence'"
        )
    return chosen


def _device(trunk: Trunk, config: CacheConfig) -> torch.device:
    return device_of(trunk.module) if config.device == "model" else torch.device("cpu")


def _make_banks(
    trunk: Trunk,
    payload: Payload,
    config: CacheConfig,
    layers: Sequence[int],
    fingerprint: Fingerprint | None,
    prefix: BlockPool | None,
    tier: Tier | None,
) -> CacheBanks:
    """Where entries are kept: each layer gets an equal share of the budget, or of half of it beside prefixes."""
    max_bytes = max(1, config.max_bytes // len(layers) // (1 if prefix is None else 2))

    def make_bank() -> Bank:
        policy = config.policy.build(POLICIES)
        return Bank(Memory(_device(trunk, config)), policy, max_bytes, config.max_entries)

    return CacheBanks(
        {layer: make_bank() for layer in layers},
        lambda: config.compression.build(CODECS),
        fingerprint,
        lambda dim: config.index_component.build(INDEXES, dim),
        by_length=not payload.fits_any_length,
        by_layer=config.mode == "paper",
        make_way=prefix.make_way if prefix is not None else lambda: None,
        tier=tier,
        fingerprint_kind=config.fingerprint_component.model_dump_json(),
    )


def _make_blocks(trunk: Trunk, payload: Payload, config: CacheConfig, spent: Callable[[], int]) -> BlockPool | None:
    """Where prefixes are kept; None where they cannot serve, or nobody wants it."""
    # Whether a trunk that was recognised by its shape ignores padding, and what else it puts out, is not known.
    can_serve = trunk.adapter.is_causal and not trunk.adapter.is_guess and not payload.fits_any_length
    if not (config.prefix and can_serve and config.tau is None):
        return None
    return BlockPool(
        config.prefix_block, config.max_bytes, _device(trunk, config), lambda: config.policy.build(POLICIES), spent
    )


def _open_tier(
    trunk: Trunk,
    payload: Payload,
    config: CacheConfig,
    layers: Sequence[int],
    counters: Counters,
    is_of_use: bool,
) -> Tier | None:
    """What lies behind the memory of banks and blocks, if anything; what it could not serve rightly is refused."""
    if config.store.name == MEMORY:
        if config.store.options:
            raise ConfigError(f"store: {MEMORY!r} takes no options (got {', '.join(config.store.options)})")
        return None
    if config.mode == "paper":
        raise ConfigError(
            f"store={config.store.name!r} with mode 'paper', whose entries may rest on other requests' states: leave "
            "one of them out"
        )
    if not is_of_use:
        raise ConfigError(
            f"store={config.store.name!r}: nothing could be served from it with exact={config.serves_exact} and "
            f"compression={config.compression.name!r}: exact repeats need a lossless codec that is not fitted"
        )
    if POLICIES.find(config.policy.name).lets_entries_leave_early:
        raise ConfigError(
            f"store={config.store.name!r} with policy {config.policy.name!r}: what leaves memory for its age would "
            "come back from the store; use another policy"
        )
    settings = {
        "payload": payload.name,
        "layers": list(layers),
        "compression": config.compression.model_dump(),
        "prefix_block": config.prefix_block,
        "device": device_of(trunk.module).type,
        "versions": [torch.__version__, transformers.__version__],
    }
    seal = Seal.from_environment()
    tier = Tier(config.store.build(STORES), seal, json.dumps(settings), counters)
    if config.store_least_tokens is not None:
        tier.break_even = BreakEven(config.store_least_tokens)
    else:
        with counters.guard("measure what reading from the store takes"):
            tier.break_even = measure(trunk, tier, keeps_tokens=not payload.fits_any_length)
    return tier


def _choose_rungs(
    banks: CacheBanks,
    trunk: Trunk,
    config: CacheConfig,
    is_exact: bool,
    chooser: NeighbourChooser,
    own: Sequence[Callable[[CacheBanks], Rung]],
) -> list[Rung]:
    """Rungs in the order in which rows are offered to them, safest first."""
    try:
        tau = thresholds(config.tau, banks.layers, trunk.depth)
    except ValueError as error:
        raise ConfigError(f"tau: {error}") from error
    rungs: list[Rung] = []
    if is_exact:
        rungs.append(Exact(banks))
    rungs += [_make_own(make, banks, trunk.depth) for make in own]
    if tau:
        rungs.append(Paper(banks, tau) if config.mode == "paper" else Semantic(banks, chooser, Fixed(tau)))
    return rungs


def _make_own(make: Callable[[CacheBanks], Rung], banks: CacheBanks, depth: int) -> Rung:
    """A user's rung that can say where it is to be asked: calls ask it at each layer, and none is to fail there."""
    try:
        rung = make(banks)
        if not (isinstance(rung.name, str) and isinstance(rung.is_lossless, bool)):
            raise TypeError("name must be a text, is_lossless a truth value")
        for layer in range(depth):
            rung.applies_at(layer)
    except Exception as error:
        raise ConfigError(f"rungs: {make!r} makes no rung: {error!r}") from error
    return rung
