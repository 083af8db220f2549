"""Runs the trunk, or the whole model, by ONNX Runtime, on a graph that is exported once and kept in a folder.

The weights are part of the graph, so it is valid for one digest. A kept graph is compared with the model at each start.

Sizes: B rows, T tokens of a call.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
import threading
import warnings
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from llmcache.engines.engine import Eager
from llmcache.engines.graphs import TYPES, GraphEngine, GraphTwin
from llmcache.models.adapters import device_of
from llmcache.request.rows import Row
from llmcache.support.folder import why_untrusted
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

HOME = "LLMCACHE_HOME"  # environment variable: the folder of kept graphs; default: llmcache in the user's cache folder
_FORMAT = 4  # of kept graphs; rises when the export changes
_OPSET, _OPSET_OF_ROPE = 23, 18  # 23 has attention as one operator, and a RoPE that takes one row only
_FILE, _DIGEST = "model.onnx", "sha256"  # of a kept graph
_SCOPES = "pkg.torch.onnx.name_scopes"  # of a node: paths of the modules that it computes for, outermost first
Precision = Literal["float32", "int8"]
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
#: Rows and tokens of the calls on which a graph is compared with the model.
_SHAPES = ((1, 1), (1, 2), (1, 7), (1, 16), (1, 33), (1, 128), (1, 512), (2, 5), (2, 24), (3, 12), (4, 64), (16, 3))
_TIMED = (1, 32)  # rows and tokens of a call that engines are timed on
_N_TIMED = 7


def open_session(path: Path) -> Any:
    """Return a plain session on a CPU, with torch's number of threads.

    Raises:
        Exception: Whatever ONNX Runtime raises for a file that is no graph.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # as in `OnnxGraph._open`
    return onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )


def find_missing() -> str | None:
    """Return the name of a package that is needed and not installed, or None."""
    return next((name for name in ("onnxruntime", "onnx", "onnxscript") if find_spec(name) is None), None)


def engine_name() -> str:
    """Return the name of the float32 engine, which is part of keys."""
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"


class OnnxGraph(GraphEngine):
    """The exported graph of one trunk, or of a model. Thread-safe; a forked process opens the graph anew."""

    def __init__(
        self, twin: GraphTwin, eager: Eager, folder: Path | None = None, precision: Precision = "float32"
    ) -> None:
        """Open the graph that is kept for these weights, or export it; compare it with the model.

        Graphs are kept in `folder`; None: `engines` in the folder of `LLMCACHE_HOME`. With `precision` "int8", weights
        have one scale per output, and activations one per call, so that a row's output depends on the call, and need
        not agree with the model's. If the export fails, it may raise anything; `ValueError` if an output differs.
        """
        super().__init__(twin, eager)
        import onnxruntime

        self._runtime = onnxruntime
        self.name = engine_name()
        self._precision: Precision = precision
        device, dtype = device_of(twin.module), next(iter(twin.module.parameters())).dtype
        self._provider = _PROVIDERS.get(device.type, "")
        if self._provider not in self._runtime.get_available_providers():
            raise ValueError(f"this onnxruntime does not compute on {device.type}")
        if dtype != torch.float32:
            raise ValueError(f"the graph takes float32 weights, not {dtype}")
        self._opening = forkable(threading.Lock(), is_waited_for=False)
        self._sessions: dict[tuple[int, int], Any] = {}  # by process and number of threads
        self._is_open = True
        key = self._key()
        if precision != "float32":  # what it answers hangs on all that the key covers
            self.name += f" {precision} {key}"
        kept = (folder or _home() / "engines") / key
        self.path = kept / _FILE
        if not (self.path.is_file() and self._is_fit()):
            with tempfile.TemporaryDirectory(prefix="llmcache-") as made:
                _export(twin, Path(made) / _FILE)
                if precision == "int8":
                    _quantise(Path(made), twin.place)
                (Path(made) / _DIGEST).write_text(_digest_of(Path(made)))
                _keep(Path(made), kept)
            self._sessions.clear()
            self._compare()

    @property
    def n_graphs(self) -> int:
        """1, or 0 after the graph failed or was closed."""
        return int(self._is_open)

    @property
    def holds_weights(self) -> bool:  # type: ignore[override]
        """False after the graph failed: calls then run with the model's own weights."""
        return self._is_open

    @property
    def nbytes(self) -> int:
        """Bytes of its files, nearly all of them weights."""
        return sum(one.stat().st_size for one in self.path.parent.iterdir())

    def close(self) -> None:
        """Run all calls eagerly from now on, and free the graph."""
        self._is_open = False
        self._sessions = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Return the trunk's output, of the graph."""
        arguments = self.twin.arguments.bind(args, kwargs)
        try:
            made = self.compute(arguments)
        except Exception as error:  # whatever a provider raises
            output = self.run_eagerly("failed", args, kwargs, rows)  # raises if the input is wrong
            self.close()
            with self._lock:
                self._n_failed += 1
            logger.warning("llmcache: the graph of ONNX Runtime failed; calls run eagerly from now on", exc_info=error)
            return output
        with self._lock:
            self._n_requests += len(rows)
        return self.twin.pack(made, arguments)

    def compute(self, arguments: Mapping[str, Any]) -> list[Tensor]:
        """Return the graph's tensors for a call's arguments by name."""
        ids, given, kinds = arguments["input_ids"], arguments.get("attention_mask"), arguments.get(TYPES)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids) if given is None else given}
        if self.twin.takes_types:
            inputs[TYPES] = torch.zeros_like(ids) if kinds is None else kinds
        feed = {name: one.to("cpu", torch.int64).numpy() for name, one in inputs.items()}
        return [torch.from_numpy(one).to(ids.device) for one in self._session().run(None, feed)]

    def _session(self) -> Any:
        """Return the session of this process and torch's number of threads, opened at first use."""
        key = os.getpid(), torch.get_num_threads()
        if (session := self._sessions.get(key)) is not None:  # without the lock: opening another one takes a second
            return session
        with self._opening:
            if key not in self._sessions:  # a parent's sessions stay: they would wait for threads that are not here
                self._sessions[key] = self._open(key[1])
            return self._sessions[key]

    def _open(self, n_threads: int) -> Any:
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = n_threads, 1
        options.log_severity_level = 4  # not of each bad input
        # Else its threads go on spinning for a while after a run, and hold up torch and a draft's session.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        # On a CPU the fused operator takes five times the time of a sum and a norm.
        device = device_of(self.twin.module)
        left_out = ["SkipLayerNormFusion"] if device.type == "cpu" else []
        settings = {} if device.type == "cpu" else {"device_id": device.index or 0, "use_tf32": 0}
        return self._runtime.InferenceSession(
            self.path, options, providers=[(self._provider, settings)], disabled_optimizers=left_out
        )

    def _key(self) -> str:
        """Return a digest of all that the graph depends on."""
        twin = self.twin
        versions = [torch.__version__, transformers.__version__]
        # Of the modules: ONNX Runtime comes in distributions of several names.
        made_by = [import_module(name).__version__ for name in ("onnx", "onnxscript", "onnxruntime")]
        precision = [self._precision, *made_by, _has_vnni()] if self._precision == "int8" else []
        facts = [_FORMAT, twin.digest, twin.head, twin.attention, twin.names, twin.takes_types, versions, *precision]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def _is_fit(self) -> bool:
        """Whether the kept graph is intact and computes as the model does."""
        try:
            if reason := why_untrusted(self.path.parent.parent):
                raise ValueError(reason)
            if _digest_of(self.path.parent) != (self.path.parent / _DIGEST).read_text():
                raise ValueError("its files are damaged, or another graph's")
            self._compare()
        except Exception as error:  # a damaged file, or a foreign one
            logger.warning("llmcache: the graph in %s is not used: %s", self.path.parent, error)
            return False
        return True

    def _compare(self) -> None:
        """Compare the graph with the model; `ValueError` if they differ, or in int8 if it gives no numbers."""
        with torch.inference_mode(False), torch.no_grad():
            for inputs in calls_to_compare(self.twin):
                made = self.compute(inputs)
                if self._precision == "float32":
                    self.twin.compare(made, inputs)
                elif not all(bool(one.isfinite().all()) for one in made):
                    raise ValueError("it gives infinite values or none")


def calls_to_compare(twin: GraphTwin) -> list[dict[str, Tensor]]:
    """Return calls of a dozen shapes: whole rows, padded ones on either side, and ones with two token types."""
    most = getattr(twin.trunk.config, "max_position_embeddings", None) or _SHAPES[5][1]
    calls = []
    for n_rows, n_tokens in _SHAPES:
        n_tokens = min(n_tokens, max(1, most // 2))
        inputs = twin.inputs(n_rows, n_tokens)
        for row in range(1, n_rows):
            padding = slice(n_tokens - n_tokens // 3, None) if row % 2 else slice(0, n_tokens // 3)
            inputs["attention_mask"][row, padding] = 0
        if twin.takes_types and n_rows % 2:
            inputs[TYPES][:, n_tokens // 2 :] = int(twin.trunk.config.type_vocab_size > 1)
        calls.append(inputs)
    return calls


def is_faster(engine: OnnxGraph) -> bool:
    """Whether the graph takes less time than the model on one row of 32 tokens: medians of calls in turns."""
    given = engine.twin.inputs(*_TIMED)
    took: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for _ in range(_N_TIMED):
            for times, run in zip(took, (engine.twin.run, engine.compute), strict=True):
                started = perf_counter()
                run(given)
                times.append(perf_counter() - started)
    return median(took[1]) < median(took[0])


class _Exported(nn.Module):
    """The twin as the exporter takes it: inputs by position, tensors out."""

    def __init__(self, twin: GraphTwin) -> None:
        super().__init__()
        self.module = twin.module
        self._run = twin.run

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Any:
        given = {"input_ids": input_ids, "attention_mask": attention_mask, TYPES: token_type_ids}
        return self._run({name: one for name, one in given.items() if one is not None})


def _export(twin: GraphTwin, path: Path) -> None:
    """Write a graph with any number of rows and tokens."""
    logger.info("llmcache: a %s is exported for ONNX Runtime", type(twin.trunk.module).__name__)
    inputs = twin.inputs(2, 8)
    inputs["attention_mask"][1, 6:] = 0
    has_rope = any("rope_type" in vars(part) for part in twin.module.modules())
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    with _quiet("torch.onnx"), torch.inference_mode(False), torch.no_grad():
        program = torch.onnx.export(
            _Exported(twin).eval(),
            tuple(inputs.values()),
            dynamo=True,
            input_names=list(inputs),
            output_names=list(twin.names),
            dynamic_shapes=(sizes,) * len(inputs),
            opset_version=_OPSET_OF_ROPE if has_rope else _OPSET,
            verbose=False,
        )
        assert program is not None
        program.model = untransposed(program.model)
        program.save(path, external_data=True)  # one file holds at most 2 GB


def untransposed(graph: Any) -> Any:
    """Return a graph (`onnx_ir.Model`, changed) in which attention takes states (B, T, D), without transposing them."""
    from onnxscript.rewriter import pattern, rewrite

    def apart(op: Any, query: Any, key: Any, value: Any, mask: Any, a: Any, b: Any, c: Any, whole: Any) -> Any:
        inputs = ((query, a), (key, b), (value, c))
        heads = (op.Transpose(op.Reshape(states, shape), perm=[0, 2, 1, 3]) for states, shape in inputs)
        made = op.Attention(*heads, mask, _outputs=["made"], _allow_other_attributes=True)
        return op.Reshape(op.Transpose(made, perm=[0, 2, 1, 3]), whole)

    def together(op: Any, query: Any, key: Any, value: Any, mask: Any, made: Any, whole: Any, **shapes: Any) -> Any:
        heads = dict(zip(("q_num_heads", "kv_num_heads"), n_heads(made), strict=True))
        return op.Reshape(op.Attention(query, key, value, mask, **made.producer().attributes, **heads), whole)

    def n_heads(made: Any) -> list[Any]:
        return [None if one.shape is None else one.shape[1] for one in made.producer().inputs[:2]]  # of (B, H, T, d)

    def is_known(context: Any, query: Any, key: Any, value: Any, made: Any, **others: Any) -> bool:
        have_rows = all(one.shape is not None and one.shape.rank() == 3 for one in (query, key, value))
        return have_rows and all(isinstance(n, int) for n in n_heads(made))

    return rewrite(graph, [pattern.RewriteRule(apart, together, is_known)])


def _quantise(folder: Path, trunk: str) -> None:
    """Replace a float32 graph by one whose products in the trunk, at this path of the module, are int8."""
    made = quantise(folder / _FILE, folder / f"int8-{_FILE}", trunk)
    for one in folder.iterdir():
        if not one.name.startswith("int8-"):
            one.unlink()
    made.rename(folder / _FILE)


def quantise(graph: Path, path: Path, trunk: str | None = None) -> Path:
    """Write a float32 graph with dynamic int8 products, one scale for each column of the weights; return its path.

    A head's products stay in float32: it has few, and margins are read from what they return. What returns an output is
    of the head, and in a graph of ours all that is not within `trunk`, a path of the module. A last product without a
    name is not told apart, and is int8 too.

    Raises:
        Exception: Whatever onnx and ONNX Runtime raise for a file that is no graph.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    made = onnx.load(graph, load_external_data=False).graph
    outputs = {one.name for one in made.output}
    last = [one for one in made.node if outputs & set(one.output)]
    outputs |= {name for one in last if one.op_type == "Add" for name in one.input}  # a product, and its bias
    place = None if trunk is None else f"module.{trunk}".rstrip(".")
    head = [one for one in made.node if outputs & set(one.output) or not (place is None or _is_within(one, place))]
    is_apart = any(one.data_location == onnx.TensorProto.EXTERNAL for one in made.initializer)
    with _quiet(None):  # the root logger is told to advise a step for graphs of images
        quantize_dynamic(
            graph,
            path,
            per_channel=True,
            # Without VNNI a sum of two products of 8 bits exceeds 16 bits and saturates.
            reduce_range=not _has_vnni(),
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],  # not attention: its int8 operator is another
            nodes_to_exclude=[
                name for one in head if one.name for name in (one.name, f"{one.name}_MatMul")
            ],  # of a Gemm
            use_external_data_format=is_apart,
        )
    return path


def _is_within(node: Any, path: str) -> bool:
    """Whether a node computes for the module at this path; also if its graph does not tell for which it does."""
    scopes = next((one.value for one in node.metadata_props if one.key == _SCOPES), None)
    return scopes is None or path in literal_eval(scopes)


def _has_vnni() -> bool:
    """Whether the processor sums int8 products in 32 bits."""
    return platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_vnni_supported()


@contextmanager
def _quiet(name: str | None) -> Iterator[None]:
    """Silence remarks of a logger (None: the root's), and warnings, which are about the inside of a tool."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def _digest_of(folder: Path) -> str:
    """Return the SHA-256 of a graph's files."""
    made = hashlib.sha256()
    for one in sorted(folder.glob("*.onnx*")):
        with one.open("rb") as file:
            made.update(hashlib.file_digest(file, "sha256").digest())
    return made.hexdigest()


def _keep(made: Path, kept: Path) -> None:
    """Move an exported graph to where it is kept, replacing what does not fit."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=kept.parent))
    shutil.copytree(made, fresh, dirs_exist_ok=True)
    shutil.rmtree(kept, ignore_errors=True)
    try:
        fresh.rename(kept)
    except OSError:  # another process was faster
        shutil.rmtree(fresh)
        if not (kept / _FILE).is_file():
            raise


def _home() -> Path:
    named = os.environ.get(HOME) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "llmcache"
    return Path(named).expanduser()
