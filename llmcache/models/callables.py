"""Models without a trunk: an ONNX Runtime session, an `ORTModel` of Optimum, or another callable, held in two modules.

The whole model is a `CallableModel`. In it is a `CallableTrunk`, whose forward the cache replaces: it returns a tuple
of tensors with one row per request. What the callable takes and returns is found at wrapping, in a few trial calls.

Sizes: B rows of a call, T tokens of a row, V vocabulary, D width of a token's vector, C logits.
"""

import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmcache.config import CacheConfig
from llmcache.errors import ConfigError, UnsupportedModelError
from llmcache.models.arguments import DECIDING, names_of
from llmcache.models.output_formats import name_of
from llmcache.models.structure import Structure, fields_of, tensor_of
from llmcache.support.arrays import Floats, Ids

_DEFAULTS = {"attention_mask": torch.ones_like, "token_type_ids": torch.zeros_like}
_UNNAMED = 2**18  # vocabulary if nothing names it
_N_WORDS = 64  # ids that made-up calls use then: nearly every vocabulary has them
_WIDTH = 128  # D of made-up vectors
_SAME, _CLOSE = 1e-5, 1e-4  # largest difference in calls of the same, and of another shape, as a share of the largest
_READ = ("_token_id", "max_position_embeddings")  # endings of names in a config
_DYNAMIC = b"DynamicQuantize"  # how names of operators begin that have one scale a call
_NOT_WITH = ("tau", "draft", "engine", "adapter", "payload")
#: In an ONNX file, before the name of another file that holds weights: a field `location`, then the name's length.
_OUTSIDE = re.compile(rb"\n\x08location\x12([\x80-\xff]?)([\x01-\x7f])", re.DOTALL)


@dataclass
class Unfit:
    """An output that the cache cannot take apart, returned to the caller as it is."""

    output: Any


class Config:
    """What the cache reads of a callable's config, by name."""

    vocab_size: int

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Function:
    """Calls a callable, and knows what it takes and returns. Neither copied with a module nor part of its digest."""

    def __init__(self, given: Any, config: Config, special: Sequence[int]) -> None:
        """Try a callable or session on made-up tokens; raise `UnsupportedModelError` if it raises for all of them."""
        self.given, self.config = given, config
        self._session = given if is_session(given) else None
        self._dtypes: dict[str, str] = {}
        self.takes: set[str] | None  # names of its arguments; None: any
        if self._session is not None:
            self._dtypes = {one.name: one.type for one in self._session.get_inputs()}
            self._outputs = [one.name for one in self._session.get_outputs()]
            self.takes = needed = set(self._dtypes)
        else:
            forward = getattr(given, "forward", given)
            self.takes, named = names_of(forward), inspect.signature(forward).parameters.values()
            needed = {one.name for one in named if one.default is one.empty}
        self._needed = [name for name in _DEFAULTS if name in needed]
        self._takes_arrays = self._session is not None
        #: None: its output cannot be taken apart into rows.
        self.structure: Structure | None = None
        self.coupling = ""  # why rows of a call affect each other
        self.heeds_mask = False  # padding that the mask hides has no effect on the rest
        self._try(special)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Function":
        return self

    def __call__(self, inputs: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
        """Return the callable's output; masks of ones and types of zeros are added or left out as it takes them."""
        ids, given = inputs.get("input_ids"), dict(inputs)
        if isinstance(ids, Tensor):
            given |= {name: _DEFAULTS[name](ids) for name in self._needed if name not in given}
            for name, make in _DEFAULTS.items():
                is_left_out = self.takes is not None and name not in self.takes and name in given
                if is_left_out and isinstance(given[name], Tensor) and torch.equal(given[name], make(given[name])):
                    del given[name]
        if self._takes_arrays:
            given = {name: one.cpu().numpy() if isinstance(one, Tensor) else one for name, one in given.items()}
        given |= more
        if self._session is None:
            return self.given(**given)
        for name, kind in self._dtypes.items():
            if isinstance(given.get(name), np.ndarray) and kind in ("tensor(int64)", "tensor(int32)"):
                given[name] = given[name].astype(kind[7:-1], copy=False)
        return dict(zip(self._outputs, self._session.run(None, given), strict=True))

    def rows(self, inputs: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
        """Return the output for a call as a tuple of tensors (B, ...), or `Unfit`."""
        output, ids = self(inputs, more), inputs.get("input_ids")
        parts = None
        if self.structure is not None and not more and isinstance(ids, Tensor) and ids.ndim == 2:
            parts = self.structure.take_apart(output, *ids.shape)
        return Unfit(output) if parts is None else parts

    # -- trials --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _try(self, special: Sequence[int]) -> None:
        n_rows, n_tokens = self._sizes()
        size = _N_WORDS if self.config.vocab_size == _UNNAMED else min(self.config.vocab_size, 4096)
        content = np.array(sorted({*range(size)} - {*special}) or [0])
        # No token twice, if there are enough: the largest value of a call is that of one row.
        ids = torch.from_numpy(np.resize(np.random.default_rng(0).permutation(content), (2 * n_rows, n_tokens)))
        rows = ids[:n_rows]
        output = self._first(rows)
        shorter = rows[:, : n_tokens - 3]
        try:
            other = self._run(shorter) if n_tokens > 3 else None
        except Exception:  # it may take one length only
            other = None
        structure = Structure.learn(output, rows, other, shorter)
        whole = None if structure is None else structure.take_apart(output, *rows.shape)
        if structure is None or whole is None or not structure.can_build(whole):
            return
        whole = tuple(one.clone() for one in whole)  # the callable may fill the same memory again
        self.structure = structure
        self.coupling = self._find_coupling(whole, ids, n_rows)
        with suppress(Exception):  # it may take no mask, or one length only
            self.heeds_mask = self._is_mask_heeded(whole, ids, n_rows)

    def _sizes(self) -> tuple[int, int]:
        """Return the rows and tokens of made-up calls; a session may take no others."""
        sizes = [2, 8]
        if self._session is not None:
            shape = next((one.shape for one in self._session.get_inputs() if one.name == "input_ids"), ())
            sizes = [one if isinstance(one, int) else size for one, size in zip(shape, sizes, strict=False)] or sizes
        return sizes[0], sizes[1]

    def _first(self, rows: Tensor) -> Any:
        """Return the output of the first call; find out whether the callable takes arrays, not tensors."""
        for takes_arrays in dict.fromkeys((self._takes_arrays, True)):
            self._takes_arrays = takes_arrays
            try:
                return self._run(rows)
            except Exception as error:
                cause = error
        raise UnsupportedModelError(
            f"{type(self.given).__name__}: a call with made-up tokens {tuple(rows.shape)} failed ({cause!r:.200}); it "
            "must take input_ids (rows, tokens) by name, as tensors or arrays on the CPU; if its vocabulary is small, "
            "give wrap() the tokenizer"
        ) from cause

    def _run(self, rows: Tensor, mask: Tensor | None = None) -> Any:
        takes_mask = self.takes is None or "attention_mask" in self.takes
        masked = {"attention_mask": torch.ones_like(rows) if mask is None else mask} if takes_mask else {}
        return self({"input_ids": rows, **masked}, {})

    def _row(self, rows: Tensor, number: int, mask: Tensor | None = None) -> list[Tensor]:
        assert self.structure is not None
        parts = self.structure.take_apart(self._run(rows, mask), *rows.shape)
        if parts is None:
            raise TypeError("it returned another kind of output than before")
        return [part[number].clone() for part in parts]

    def _find_coupling(self, whole: Sequence[Tensor], ids: Tensor, n_rows: int) -> str:
        """Return why rows of a call affect each other; "" if the first two come out alike beside others, and alone."""
        if n_rows == 1:
            return ""
        if _is_dynamic(self.given):
            return "its graph quantises all activations of a call by the largest"
        try:
            for number in (0, 1):  # the values that decide may be in either
                beside_others = ids[n_rows:].clone()
                beside_others[number] = ids[number]
                if not _are_alike([part[number] for part in whole], self._row(beside_others, number), _SAME):
                    return "in a trial, a row came out differently beside another row"
            if not _are_alike([part[0] for part in whole], self._row(ids[:1], 0), _CLOSE):
                return "in a trial, a row came out differently alone"
        except Exception as error:
            return f"whether rows affect each other could not be tried ({type(error).__name__}: {error})"
        return ""

    def _is_mask_heeded(self, whole: Sequence[Tensor], ids: Tensor, n_rows: int) -> bool:
        """Whether a row comes out alike with three more tokens that a mask hides, whichever they are."""
        assert self.structure is not None
        if self.takes is not None and "attention_mask" not in self.takes:
            return False
        n_tokens = ids.shape[1]
        for padding in (ids[-1:, :3], torch.full((1, 3), getattr(self.config, "pad_token_id", None) or 0)):
            padded = torch.cat([ids[:1], padding], dim=1)
            mask = torch.ones_like(padded)
            mask[:, n_tokens:] = 0
            rows, masks = padded.repeat(n_rows, 1), mask.repeat(n_rows, 1)
            parts = zip(self.structure.parts, self._row(rows, 0, masks), strict=True)
            own = [one[:n_tokens] if part.by_token else one for part, one in parts]
            if not _are_alike([part[0] for part in whole], own, _CLOSE):
                return False
        return True


class CallableTrunk(nn.Module):
    """The part of a `CallableModel` whose forward a cache replaces."""

    def __init__(self, function: Function, digest: str, embeddings: Tensor | None) -> None:
        """Hold the function; `digest` names its weights, `embeddings` (V, D) are vectors of its tokens."""
        super().__init__()
        self.function, self.digest = function, digest
        structure = function.structure
        #: Part of the digest, as another structure of the output makes other rows.
        self.form = "" if structure is None else repr((name_of(structure.kind), structure.names, structure.parts))
        self.table = None if embeddings is None else nn.Embedding.from_pretrained(embeddings)  # type: ignore[no-untyped-call]
        of_tokens = _WIDTH if embeddings is None else embeddings.shape[1]
        of_output = 1 if structure is None else max((1, *structure.parts[0].shape))
        #: D: those of tokens and those of outputs, padded with zeros, have the same width.
        self.width = max(of_tokens, of_output)

    @property
    def training(self) -> bool:
        """Whether the callable is a module in training mode."""
        return bool(getattr(self.function.given, "training", False))

    @training.setter
    def training(self, value: bool) -> None:
        """Ignore it: the callable is in the mode that its owner chose."""

    @property
    def config(self) -> Config:
        return self.function.config

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return (self,)

    def get_input_embeddings(self) -> nn.Embedding | None:
        return self.table

    def embed(self, ids: Ids) -> Floats:
        """Return vectors of m tokens, float32 (m, D): the given ones, else signs drawn from each token's number."""
        if self.table is not None:
            return self.widened(self.table.weight[torch.from_numpy(ids)].float().numpy())
        # Not from a random generator, whose numbers may differ in another version.
        drawn = b"".join(hashlib.shake_128(b"%d" % token).digest(_WIDTH // 8) for token in ids.tolist())
        bits = np.unpackbits(np.frombuffer(drawn, np.uint8)).reshape(len(ids), _WIDTH)
        return self.widened(bits.astype(np.float32) * 2 - 1)

    def widened(self, vectors: Floats) -> Floats:
        """Return vectors (m, ...) with zeros up to D."""
        return np.pad(vectors, ((0, 0), (0, self.width - vectors.shape[1])))

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
        more: Mapping[str, Any] | None = None,
        return_dict: None = None,
    ) -> Any:
        """Return a tuple of tensors (B, ...), or `Unfit`; `more`: the callable's other arguments, by name."""
        inputs = zip(DECIDING, (input_ids, attention_mask, token_type_ids, position_ids), strict=True)
        return self.function.rows({name: value for name, value in inputs if value is not None}, more or {})


class CallableModel(nn.Module):
    """A callable as a model, called by `cache(**inputs)`."""

    def __init__(self, given: Any, digest: str | None, embeddings: Any, tokenizer: Any) -> None:
        super().__init__()
        if digest is None:
            digest = _digest_of(given)
        elif not (isinstance(digest, str) and digest):
            raise ConfigError(f"digest={digest!r}: give a text that names all that decides answers")
        table, config = _checked(embeddings), getattr(given, "config", None)
        known = {name: one for name, one in vars(config or Config()).items() if name.endswith(_READ)}
        n_words = (getattr(config, "vocab_size", None), None if tokenizer is None else len(tokenizer))
        size = max((one for one in n_words if one), default=_UNNAMED if table is None else len(table))
        if table is not None and len(table) < size:
            raise ConfigError(f"embeddings: {len(table)} rows for a vocabulary of {size} tokens; give one for each")
        special = known.values() if tokenizer is None else tokenizer.all_special_ids
        function = Function(given, Config(**known, vocab_size=size), [one for one in special if isinstance(one, int)])
        self.trunk, structure = CallableTrunk(function, digest, table), function.structure
        n_logits = None if structure is None or structure.answer is None else structure.parts[0].shape[0]
        self.config = Config(num_labels=n_logits) if config is None or n_logits == 1 else config
        self.eval()

    def forward(self, **inputs: Any) -> Any:
        """Return the callable's output for tensors or arrays by name."""
        given: dict[str, Any] = {name: tensor_of(inputs.pop(name)) for name in DECIDING if name in inputs}
        if inputs.get("return_dict") in (None, True):  # what every model of transformers takes, and returns without
            inputs.pop("return_dict", None)
        rows = self.trunk(**given, **({"more": inputs} if inputs else {}))
        structure = self.trunk.function.structure
        return rows.output if isinstance(rows, Unfit) or structure is None else structure.build(rows)

    @property
    def path(self) -> str | None:
        """Path of the file that a session was read from; None if there is none."""
        path: str | None = _graph_of(self.trunk.function.given)[0]
        return path

    @property
    def nbytes(self) -> int:
        """Bytes of that file and of the files that it names; 0: unknown."""
        return 0 if self.path is None else sum(one.stat().st_size for one in _files_of(self.path))

    @property
    def is_dynamic(self) -> bool:
        """Whether it is a session whose graph quantises by the values of a call, as dynamic int8 does."""
        return _is_dynamic(self.trunk.function.given)

    def copy(self, tokenizer: Any) -> "CallableModel":
        """Return another model of the same callable, which no cache wraps.

        Raises:
            UnsupportedModelError: It does not take a call any more.
        """
        table = None if self.trunk.table is None else self.trunk.table.weight
        return CallableModel(self.trunk.function.given, self.trunk.digest, table, tokenizer)

    def read(self, output: Any) -> Tensor:
        """Return the logits (B, C) of an output; see `Structure.answer`."""
        structure = self.trunk.function.structure
        assert structure is not None
        return torch.as_tensor(fields_of(output)[structure.answer])


def is_session(value: Any) -> bool:
    """Whether a value is an `InferenceSession` of ONNX Runtime, by its methods."""
    return all(callable(getattr(value, name, None)) for name in ("run", "get_inputs", "get_outputs"))


@contextmanager
def enclosed(model: Any, digest: str | None, embeddings: Any, tokenizer: Any) -> Iterator[nn.Module]:
    """Within this context, give the model to wrap; if it raises, take an enclosed callable out of its module again.

    `ConfigError`: no digest is given or found, or nothing to call. `UnsupportedModelError`: it cannot be called.
    """
    module, holder = model, _holder_of(model) if isinstance(model, nn.Module) else None
    if holder is not None:  # sentence-transformers with the backend onnx
        part, name = holder
        setattr(part, name, CallableModel(vars(part)[name], digest, embeddings, tokenizer))
    elif _is_pipeline(model):
        raise ConfigError("wrap the pipeline's model, LLMCache.wrap(pipeline.model); then call the pipeline as before")
    elif digest is not None or not isinstance(model, nn.Module):
        module = CallableModel(model, digest, embeddings, tokenizer)
    elif embeddings is not None:
        raise ConfigError("embeddings: only with a callable or a session, which has none; leave embeddings out")
    try:
        yield module
    except BaseException:
        if module is not model or holder is not None:
            release(module)
        raise


def release(model: nn.Module) -> Any:
    """Return what was enclosed: the callable, or the module with its own callable in it."""
    if isinstance(model, CallableModel):
        return model.trunk.function.given
    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, CallableModel):
                delattr(part, name)
                setattr(part, name, child.trunk.function.given)
    return model


def refuse_settings(model: nn.Module, config: CacheConfig) -> None:
    """Refuse settings that need layers."""
    given = ", ".join(one for one in _NOT_WITH if getattr(config, one) != CacheConfig.model_fields[one].default)
    if given and any(isinstance(part, CallableTrunk) for part in model.modules()):
        raise ConfigError(f"{given}: not with a callable or a session, which shows no layers; leave {given} out")


def _is_pipeline(given: Any) -> bool:
    """Whether a value is one of transformers' pipelines, which take texts and hold a model."""
    kinds = type(given).__mro__
    return any(one.__name__ == "Pipeline" and one.__module__.startswith("transformers.") for one in kinds)


def _holder_of(model: nn.Module) -> tuple[nn.Module, str] | None:
    """Return the part of a model that has an `ORTModel` as an attribute, and the attribute's name."""
    for part in model.modules():
        for name, value in vars(part).items():
            if hasattr(value, "config") and hasattr(value, "forward") and _session_of(value) is not None:
                return part, name
    return None


def _session_of(given: Any) -> Any:
    """Return the session that a value is, or has as `session` or `model`; None if there is none."""
    candidates = (given, getattr(given, "session", None), getattr(given, "model", None))
    return next((one for one in candidates if is_session(one)), None)


def _graph_of(given: Any) -> tuple[Any, Any]:
    """Return the path of the file that a session was read from, and the bytes that it was made of; None: unknown.

    Of what holds a session, only an `ORTModel` is known to answer by it alone.
    """
    is_ort = hasattr(given, "config") and hasattr(given, "forward")
    session = _session_of(given) if is_session(given) or is_ort else None
    path, content = (getattr(session, name, None) for name in ("_model_path", "_model_bytes"))
    return path if path and Path(path).is_file() else None, content


def _is_dynamic(given: Any) -> bool:
    """Whether a session's graph has an operator that quantises by the values of a call, as far as it can be read."""
    path, content = _graph_of(given)
    content = Path(path).read_bytes() if path else content
    return isinstance(content, bytes) and _DYNAMIC in content


def _digest_of(given: Any) -> str:
    """Return the SHA-256 of the file that a session was read from, and of the files that it names."""
    path, _ = _graph_of(given)
    if path is None:
        if not (callable(given) or is_session(given)):
            raise ConfigError(f"a {type(given).__name__} cannot be wrapped: give a model, a session or a callable")
        raise ConfigError(
            f"a {type(given).__name__} does not tell its weights apart from others: give "
            "digest='...', a text that names all that decides answers"
        )
    whole, *outside = _files_of(path)
    sha = hashlib.sha256(whole.read_bytes())
    for one in outside:
        with one.open("rb") as file:
            sha.update(hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()


def _files_of(path: Any) -> list[Path]:
    """Return an ONNX file, and the files that it names."""
    content, names = Path(path).read_bytes(), set()
    for one in _OUTSIDE.finditer(content):
        n_bytes = one[2][0] if not one[1] else (one[1][0] & 0x7F) + (one[2][0] << 7)  # a varint
        names.add(content[one.end() : one.end() + n_bytes].decode(errors="replace"))
    return [Path(path), *(Path(path).parent / name for name in sorted(names))]


def _checked(embeddings: Any) -> Tensor | None:
    """Return vectors of tokens as a tensor (V, D) of its own."""
    if embeddings is None:
        return None
    table = torch.as_tensor(embeddings).detach().cpu().float().clone()
    if table.ndim != 2 or not bool(table.isfinite().all()):
        raise ConfigError(f"embeddings: give a finite vector for each token, (V, D) (got {tuple(table.shape)})")
    return table


def _are_alike(some: Sequence[Tensor], others: Sequence[Tensor], tolerance: float) -> bool:
    """Whether tensors differ by at most this share of the largest value of each."""
    pairs = ((one.double().nan_to_num(), other.double().nan_to_num()) for one, other in zip(some, others, strict=True))
    return all(bool((one - other).abs().max() <= tolerance * one.abs().max()) for one, other in pairs)
