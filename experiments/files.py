"""Files that are there as a whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file; a reader sees the old text or the new, never a part. Safe beside other writers.

    Raises:
        OSError: It could not be written; what was there before is untouched.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
