"""MkDocs hook: pages link to files outside of docs/. The site includes configurations, and names other files."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the configurations, to which the results link."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "configs").glob("*.yaml")):
        files.append(File.generated(config, f"configs/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page without links that leave the site."""
    return _OUTSIDE.sub(_inside, markdown)


def _inside(found: re.Match[str]) -> str:
    text, path = found[1], found[2]
    if path.startswith("configs/"):
        return f"[{text}]({path})"
    return f"`{path}`" if text == path else f"{text} (`{path}`)"
