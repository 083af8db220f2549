"""The settings of a cache: typed, validated, readable from YAML.

An invalid setting raises `ConfigError` with the key, the value and the fix. Components (index, policy, fingerprint,
codec) are given as a name, or as `{name: ..., option: value}`.
"""

import difflib
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from llmcache.errors import ConfigError
from llmcache.support.registry import Component, without_secrets
from llmcache.support.yaml_file import read_yaml

GIB = 1024**3
_BYTES = TypeAdapter(ByteSize)

# Fingerprints with their own similarity, each computed by one index that serves no other fingerprint.
_OWN_INDEX = {"simhash": "binary", "minhash": "lsh"}


#: Settings that the paper's cache does not support, with the reason.
_NOT_WITH_TAU = {
    "exact": "the paper's cache finds a repeat like any other similar request",
    "prefix": "shared prefixes are served only without tau",
    "gate": "the gate belongs to calibrated reuse",
    "learn": "either you choose the threshold, or a calibration does",
    "draft": "its limit is chosen by a calibration",
    "audit": "the audit checks a calibration, and tau is your own choice",
    "recalibrate": "it renews a calibration, and tau is your own choice",
    "max_drop": "it limits the loss of a calibration",
    "delta": "it belongs to the bound of a calibration",
    "sources": "every computed request may serve others",
    "share_calibration": "tau is your own choice, not a calibration",
    "store": "entries may derive from other requests' states, so they stay in memory",
    "auto_bypass": "every call is looked up, as in the paper",
    "engine": "every layer is hooked, and a graph has no layers",
}


class _Settings(BaseModel):
    """Settings by name. The error for an unknown setting lists the known ones; pydantic's names only the setting."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)  # it may hold a password

    @model_validator(mode="before")
    @classmethod
    def _are_known(cls, given: Any) -> Any:
        unknown = [key for key in given if key not in cls.model_fields] if isinstance(given, Mapping) else []
        if unknown:
            raise ValueError("; ".join(_unknown(str(key), list(cls.model_fields)) for key in unknown))
        return given


class PrefixOptions(_Settings):
    """How prefixes are stored."""

    block: int = Field(default=16, ge=1)  # tokens


class AuditOptions(_Settings):
    """How much of calibrated reuse is audited, and when."""

    rate: float = Field(default=0.01, ge=0.0, le=1.0)
    share: float = Field(default=0.02, ge=0.0, le=1.0)
    in_background: bool = True

    def __bool__(self) -> bool:
        return self.rate > 0


class StoreOptions(Component):
    """A store, and from which length of a request it is read."""

    least_tokens: int | None = Field(default=None, ge=0)


class EngineOptions(_Settings):
    """What computes the trunk, and where its graph is kept."""

    name: Literal["eager", "onnxruntime", "auto"] = "eager"
    folder: Path | None = None


class DraftOptions(_Settings):
    """What drafts, and how near the vector of an embedding must be."""

    engine: Literal["onnxruntime", "model"] = "onnxruntime"
    precision: Literal["int8"] = "int8"  # of onnxruntime's products
    min_cosine: float = Field(default=0.98, ge=-1.0, le=1.0)
    model: Any = Field(default=None, exclude=True, repr=False)  # of the engine `model`; saves leave it out

    @model_validator(mode="after")
    def _model_drafts_alone(self) -> Self:
        if self.model is not None and self.engine != "model":
            raise ValueError(f"a model drafts by itself: leave engine={self.engine!r} out")
        return self


class CacheConfig(_Settings):
    """The settings of one cache. With the defaults, only lossless rungs serve.

    Attributes:
        tau: Use the paper's layer-wise cache: the least similarity (`>=`, to six digits) at which a stored state
            replaces a layer's output, one number or one per layer. A cosine, -1 to 1; for `minhash` a Jaccard
            similarity, over 0, at most 1, and much lower. A hit returns the stored request's answer, without a bound.
            None: serve repeats, shared prefixes and, after a calibration, approximate hits.
        exact: Serve requests whose tokens, types and positions were seen before, from their own states. None: yes
            without `tau`, no with it.
        prefix: Serve the longest prefix that a request shares with a stored one from K/V, and run the layers on the
            remaining tokens. For calls that keep K/V of causal models in the adapter table; other calls ignore it.
            True, false, or `{block: 16}`: tokens per block, since prefixes are stored in whole blocks.
        payload: Which hidden states an entry keeps of each request: all tokens (`sequence`), the first (`cls`), the
            last valid one (`last`) or their mean. `auto` keeps what the model's head reads.
        layers: With `tau`, the layers that have a bank. `all` (or `auto`) is Algorithm 1 as written: each bank is
            searched when its layer is reached, and a hit skips that layer. `last`, or a list of layer numbers (negative
            numbers count from the end): the banks of these layers are searched before layer 0, the deepest first, and a
            hit resumes after that layer. With `last` a hit skips all layers, and an entry keeps what the head reads.
        fingerprint: With `tau`, the vector that similarity is measured on: `mean` (or `auto`), `simhash`, `pca`,
            `attention` (layer 0 has to run first) or `minhash` (token shingles). `mean` and `simhash` take `per_layer:
            true`: each bank is searched by the states that enter its layer, not by the embedding output.
        answer: The kind of answer: `class`, `labels` (any number of them), `score` or `embedding`. `auto` follows the
            model's head, and assumes `embedding` for an unknown head.
        gate: Compare tokens too (`ContentGate` and its options): true, false or options. Needs the tokenizer.
        learn: Compute this many first requests, and calibrate on them in a background thread. None: calibrate when
            `calibrate` is called.
        draft: A cheaper answer, served where that changes few answers: calibrations choose limits for sources and draft
            together, so that `max_drop` covers both, and leave out what does not pay. `int8`: a copy of the trunk with
            int8 products in ONNX Runtime, short for `{engine: onnxruntime, precision: int8}`. Or another model with
            the same labels and token ids (a distilled student), for classes, labels and scores; then saves leave the
            model out, and `LLMCache.load(..., draft=model)` takes it. An embedding has no margin, so an int8 draft
            serves all requests or none; with `{min_cosine: 0.98}`, a vector at a smaller cosine has changed, in a
            draft or of a source. None: no draft.
        max_drop: Largest loss that a calibration allows, a fraction of 1.
        delta: Probability, between 0 and 1, that the loss exceeds `max_drop` in spite of the calibration.
        sources: Which stored requests serve others after a calibration: `frozen`, those it was made with, for which the
            bound holds; or `growing`, later misses of this process as well, without a bound.
        audit: Least probability with which a hit of calibrated reuse is recomputed, 0 to 1, to see whether its answer
            changed: up to 3.5 times as high for risky hits, and 20 times for the first 100 requests and while changed
            answers make a wrong claim likely. 0: no audit. Or `{rate: 0.01, share: 0.02, in_background: true}`. In the
            background, a thread recomputes while no call is under way and none was for 20 ms; otherwise only
            `cache.drain()` does. If calls leave no such gap for a second, calls do the work, for at most `share` of
            their time, 0 to 1; if that is not enough, fewer hits are drawn.
        share_calibration: One calibration for all caches on a `store` that have the same model and settings. A cache
            publishes its own, looks for another's once a second, also instead of learning one (`learn`), and follows
            the alarms of the others. Each cache audits its own hits, on its own account.
        recalibrate: Number of requests after which a calibration is renewed from the newest audited requests, if these
            are enough for its claim. None: never.
        index: With `tau`: `flat` (exact), `hnsw` (a graph), `binary` (for `simhash` only), `lsh` (for `minhash` only;
            its threshold defaults to the least tau), or `auto`: the fingerprint's own index, else `flat`, and from some
            30,000 entries on an inverted file.
        policy: Which entry or prefix block is evicted when the budget is used up: `lru`, `lfu`, `fifo`, `s3_fifo`
            (new entries are on probation: a scan evicts no others), `gdsf` (uses times the cost of computing, per
            byte), `ttl` (`ttl_s`, seconds), `staleness` (the weight of a match halves every `half_life_s` seconds), or
            `divergence` (recomputes a share `check_rate` of approximate reuses to check them; entries over `limit` are
            expelled at once).
        store: Where entries and prefix blocks are kept: `memory`, this process only; or also in a store behind memory,
            which outlives the process and may be shared: `disk` (a `folder` of this machine), `redis` (the `url` of a
            server), or a registered store (`llmcache.STORES`). Secrets are read from the environment
            (`llmcache.memory.stores.seal`). Each takes `least_tokens`: shorter requests are computed, not read from it;
            None: decided from the times of reading and computing measured in service; 0: all are read.
        compression: With `tau`, the codec of stored states: `none`, `fp16`, `int8`, `pca` or `autoencoder`. The last
            two keep `dim` float16 numbers per row of a layer. They are fitted on the first `fit_on` rows to be stored
            in the layer, again after a change of weights, in the call that stores the last of them, which takes up to
            a few seconds per layer. States stored uncompressed until then are packed too.
            `Stats.reconstruction_error` measures the loss.
        auto_bypass: Stop searching for approximate hits in calls of a length at which searches take more time than hits
            save. One call in 64 is still searched, so that searching resumes once it pays. The log states the numbers.
            Exact repeats and prefixes are always looked up, and misses always stored. With a draft, the calibration
            decides instead.
        max_entries: Largest number of entries in the bank (`tau`: in each); None: no limit. Blocks are not counted.
        max_bytes: Budget of all states, in bytes, or a text such as `500MB` or `2GiB`. Without `tau`, a namespace that
            holds less than an equal share of it loses no entry to another. A decoder's requests are kept in blocks,
            which may fill what the bank leaves; the bank takes at most one half, and blocks are evicted for it. With
            `tau` each bank has an equal share. Fingerprints and bookkeeping are not included: 4 bytes per dimension,
            some 1 kB per request and some 2 kB per block.
        device: Where entries are kept: `cpu`, or `model` for the model's own device.
        engine: What computes the trunk for rows without a hit: `eager`, the model itself; `onnxruntime`, a graph of the
            trunk in float32, exported once and kept by the digest of the weights; or `auto`, the one that takes less
            time here. The graph is compared with the model on a dozen shapes, and states of the two are never mixed.
            Calls that it does not cover, and all calls after weights were edited, run eagerly
            (`stats().engine.eager`). If no graph can be made, a warning says why. Or `{name: onnxruntime, folder:
            /var/cache/llmcache}`: where graphs are kept; else in `LLMCACHE_HOME`, `~/.cache/llmcache` by default.
        adapter: The family whose row of the adapter table describes the model, registered families included
            (`register_adapter`). `auto`: the row that names the class of its trunk, else guessed from the modules.
        allow_unsafe: Permit approximate reuse with span, token and language-model heads, which replaces their answers
            by those of another input. For experiments.
    """

    tau: float | dict[int, float] | None = None
    exact: bool | None = None
    prefix: PrefixOptions | None = PrefixOptions()
    payload: Literal["auto", "sequence", "cls", "last", "mean"] = "auto"
    layers: Literal["auto", "last", "all"] | list[int] = "auto"
    fingerprint: Component = Component(name="auto")
    answer: Literal["auto", "class", "labels", "score", "embedding"] = "auto"
    gate: bool | dict[str, Any] = False
    learn: int | None = Field(default=None, ge=1)
    draft: DraftOptions | None = None
    max_drop: float = Field(default=0.005, gt=0.0, lt=1.0)
    delta: float = Field(default=0.05, gt=0.0, lt=1.0)
    sources: Literal["frozen", "growing"] = "frozen"
    audit: AuditOptions = AuditOptions()
    share_calibration: bool = False
    recalibrate: int | None = Field(default=None, ge=1)
    index: Component = Component(name="auto")
    policy: Component = Component(name="lru")
    store: StoreOptions = StoreOptions(name="memory")
    compression: Component = Component(name="none")
    auto_bypass: bool = True
    max_entries: int | None = Field(default=None, ge=1)
    max_bytes: int = Field(default=GIB, ge=1)
    device: Literal["cpu", "model"] = "cpu"
    engine: EngineOptions = EngineOptions()
    adapter: str = "auto"
    allow_unsafe: bool = False

    @field_validator("prefix", mode="before")
    @classmethod
    def _on_or_off(cls, value: Any) -> Any:
        return (PrefixOptions() if value else None) if isinstance(value, bool) else value

    @field_validator("max_bytes", mode="before")
    @classmethod
    def _bytes_of_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            if not re.fullmatch(r"\s*\d*\.?\d+\s*\w*\s*", value):  # pydantic reads '1,000MB' as 1
                raise ValueError(value)
            return int(_BYTES.validate_python(value))
        except ValueError as error:  # pydantic's errors are of this kind
            raise ValueError("give a number of bytes, or a text such as '500MB' or '2GiB'") from error

    @field_validator("audit", mode="before")
    @classmethod
    def _rate_alone(cls, value: Any) -> Any:
        return value if isinstance(value, Mapping | AuditOptions) else {"rate": value}

    @field_validator("engine", "fingerprint", "index", "policy", "store", "compression", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("draft", mode="before")
    @classmethod
    def _model_alone(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"engine": "onnxruntime", "precision": value}
        if value is None or isinstance(value, DraftOptions):
            return value
        given = value if isinstance(value, Mapping) else {"model": value}
        return {"engine": "model", **given} if "model" in given else given

    @field_validator("tau")
    @classmethod
    def _tau_is_a_similarity(cls, value: float | dict[int, float] | None) -> float | dict[int, float] | None:
        if value == {}:
            raise ValueError("no layer is named: leave tau out, or give a number")
        for tau in _values(value):
            if not -1.0 <= tau <= 1.0:  # also refuses NaN
                raise ValueError("tau is a similarity: give a cosine from -1 to 1 (a Jaccard over 0 for 'minhash')")
        return value

    @model_validator(mode="after")
    def _tau_is_alone(self) -> Self:
        """Reject settings that the paper's cache does not support, unless they are off."""
        if self.tau is None:
            return self
        for name, cure in _NOT_WITH_TAU.items():
            given = getattr(self, name)
            if isinstance(given, Component | EngineOptions):
                given = given.name not in ("auto", "eager", "memory")
            if name in self.model_fields_set and given:
                raise ValueError(f"{name} with tau={self.tau}: {cure}; leave {name} out, or tau")
        if self.fingerprint.name == "learned":
            raise ValueError("fingerprint 'learned' is fitted by a calibration: leave tau out, and set learn")
        return self

    @model_validator(mode="after")
    def _is_of_tau(self) -> Self:
        """Reject settings that only the paper's cache supports."""
        given = {
            "compression": self.compression.name != "none",
            "layers": self.layers not in ("auto", "last"),
            "fingerprint": self.fingerprint.name not in ("auto", "learned"),
            "index": self.index.name != "auto",
        }
        if self.tau is None and (named := ", ".join(name for name, is_given in given.items() if is_given)):
            raise ValueError(f"{named} without tau: only for the paper's cache; set tau, or leave {named} out")
        return self

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        if self.share_calibration and self.store.name == "memory":
            raise ValueError("share_calibration=True with store 'memory': name a store that other caches can use")
        if self.recalibrate is not None and not self.audit:
            raise ValueError(
                f"recalibrate={self.recalibrate} with audit=0: it needs audits; raise audit, or leave recalibrate out"
            )
        for fingerprint, index in _OWN_INDEX.items():
            if (self.fingerprint.name == fingerprint) != (self.index_component.name == index):
                raise ValueError(
                    f"fingerprint {fingerprint!r} and index {index!r} go together: set both, or index 'auto' "
                    f"(got {self.fingerprint.name!r} and {self.index.name!r})"
                )
        if self.fingerprint.name == "minhash" and min(_values(self.tau), default=1.0) <= 0:
            raise ValueError(f"tau={self.tau} with 'minhash' is a Jaccard similarity: give a number over 0, at most 1")
        return self

    @property
    def serves_exact(self) -> bool:
        """Whether the exact rung serves, with None resolved."""
        return self.tau is None if self.exact is None else self.exact

    @property
    def fingerprint_component(self) -> Component:
        """The fingerprint to build, with `auto` resolved."""
        if self.fingerprint.name != "auto":
            return self.fingerprint
        return Component(name="mean" if self.tau is not None else "learned", **self.fingerprint.options)

    @property
    def index_component(self) -> Component:
        """The index to build, with `auto` resolved; the default threshold of `lsh` is the least tau."""
        auto = _OWN_INDEX.get(self.fingerprint.name, "auto")
        name = auto if self.index.name == "auto" else self.index.name
        served = {"threshold": min(_values(self.tau))} if name == "lsh" and self.tau is not None else {}
        return Component(name=name, **{**served, **self.index.options})

    def with_draft(self, model: Any) -> Self:
        """Return these settings with the model that drafts, which no file holds.

        Raises:
            ConfigError: They name another draft, or none.
        """
        if self.draft is None or self.draft.engine != "model":
            was = None if self.draft is None else self.draft.engine
            raise ConfigError(f"draft: this cache was saved with the draft {was!r}, and no model: leave draft out")
        return self.model_copy(update={"draft": self.draft.model_copy(update={"model": model})})

    @classmethod
    def make(cls, source: "CacheConfig | Mapping[str, Any] | str | Path | None", **overrides: Any) -> Self:
        """Return settings from a file, a mapping or other settings, with single keys replaced.

        Raises:
            ConfigError: A setting is invalid (the message has key, value and fix), or the file cannot be read.
            FileNotFoundError: `source` is a path that does not exist.
        """
        values = {**_as_mapping(source), **overrides}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(explain(error, list(cls.model_fields))) from error

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Return settings from a YAML file that holds one mapping."""
        return cls.make(path)


def _values(tau: float | Mapping[int, float] | None) -> list[float]:
    if tau is None:
        return []
    return list(tau.values()) if isinstance(tau, Mapping) else [tau]


def _as_mapping(source: CacheConfig | Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if source is None:
        return {}
    if isinstance(source, CacheConfig):
        return {name: getattr(source, name) for name in source.model_fields_set}
    if isinstance(source, Mapping):
        return dict(source)
    return read_yaml(source)


def explain(error: ValidationError, known: list[str]) -> str:
    """Return a one-line message with the key, value and fix of each invalid setting; `known`: valid names."""
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(_unknown(key, known))
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {message} (got {_shown(without_secrets(problem['input']))})" if key else message)
    return "; ".join(dict.fromkeys(lines))


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{key}: unknown setting; {hint}known: {', '.join(known)}"


def _shown(value: Any) -> str:
    short = reprlib.Repr()
    short.maxlevel, short.maxdict, short.maxstring, short.maxlong, short.maxother = 4, 12, 200, 60, 200
    return " ".join(short.repr(value).split())  # a module's has several lines
