"""`llmcache info`: versions and hardware, for bug reports."""

import platform

import typer

from llmcache import __version__


def command() -> None:
    """Print the versions, the number of threads and the device in use."""
    import faiss
    import torch
    import transformers

    cuda = f"cuda ({torch.cuda.get_device_name()})" if torch.cuda.is_available() else ""
    rows = {
        "llmcache": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "faiss": faiss.__version__,
        "threads": f"{torch.get_num_threads()} torch, {faiss.omp_get_max_threads()} faiss",
        "device": cuda or ("mps" if torch.backends.mps.is_available() else "cpu"),
    }
    for name, value in rows.items():
        typer.echo(f"{name:<14}{value}")
