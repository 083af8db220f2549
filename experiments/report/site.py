"""MkDocs hooks: pages link to files outside of docs/. The site includes configurations, and names other files."""

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_OUTSIDE = r"\[([^\]]*)\]\({up}(?!\.\./)([^)#]+)\)"


def on_config(config: Any) -> Any:
    """Link to the repository that the environment names."""
    if url := os.environ.get("LLMCACHE_REPOSITORY"):
        config.repo_url, config.repo_name = url, "Source"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the configurations, to which the results link."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "configs").glob("*.yaml")):
        files.append(File.generated(config, f"configs/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page without links that leave the site."""
    up = "../" * page.file.src_uri.count("/")

    def inside(found: re.Match[str]) -> str:
        text, path = found[1], found[2]
        if path.startswith("configs/"):
            return f"[{text}]({up}{path})"
        return f"`{path}`" if text == path else f"{text} (`{path}`)"

    return re.sub(_OUTSIDE.format(up=re.escape(f"{up}../")), inside, markdown)
