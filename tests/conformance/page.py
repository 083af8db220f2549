"""The classes of docs/extending.md, one of each kind; `tests/test_docs.py` runs the page itself."""

import ast
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def _classes() -> dict[str, Any]:
    """Return what the examples import and define, without running the rest."""
    names: dict[str, Any] = {"__name__": __name__}
    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        nodes = [one for one in ast.parse(example).body if isinstance(one, ast.Import | ast.ImportFrom | ast.ClassDef)]
        exec(compile(ast.Module(nodes, []), PAGE.name, "exec"), names)
    return names


_CLASSES = _classes()
Policy, Rung, Store, Index, Fingerprint, Codec, Model = (
    _CLASSES[name] for name in ("RandomReplacement", "SameTokens", "Shared", "Scan", "Words", "BFloat16", "MyModel")
)
