"""How many functions and files of the library a call enters: what somebody has to read who follows it.

Comprehensions, which Python 3.11 runs as functions, are not counted. The calibrated hit is one that is not audited.
`pytest --log-cli-level=INFO tests/calls/test_length_of_path.py` prints the figures.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import llmcache
from llmcache import LLMCache
from tests.contract.streams import calibrated, classifier, requests

logger = logging.getLogger(__name__)

HOME = str(Path(llmcache.__file__).parent)
#: By kind of call: most functions, most files.
MOST = {"exact hit": (41, 12), "miss": (57, 16), "calibrated hit": (73, 18)}


def entered(run: Callable[[], Any]) -> tuple[int, int]:
    """Run a function; return how many functions and files of the library it entered."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, given: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME) and not code.co_name.startswith("<"):
            seen.add(code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return len(seen), len({code.co_filename for code in seen})


def check(kind: str, cache: LLMCache, rows: torch.Tensor, rung: str | None) -> None:
    """Count the last of many calls: the first ones do what is done once."""
    counts = []
    with torch.inference_mode():
        for row in rows:
            counts.append(entered(lambda row=row: cache.model(input_ids=row[None])))  # type: ignore[misc]
            if cache.last[0].rung != rung:
                counts.pop()
    assert len(counts) > 20
    functions, files = sorted(counts)[len(counts) // 2]
    logger.info("%s: %d functions in %d files", kind, functions, files)
    assert functions <= MOST[kind][0] and files <= MOST[kind][1], (functions, files)


def test_an_exact_hit_and_a_miss() -> None:
    cache = LLMCache.wrap(classifier())
    rows = requests(150)[0]
    check("miss", cache, rows, None)
    check("exact hit", cache, rows[50:], "exact")


@pytest.mark.slow
def test_a_calibrated_hit() -> None:
    with calibrated(audit=0) as cache:
        check("calibrated hit", cache, requests(200, seed=1)[0], "semantic")
