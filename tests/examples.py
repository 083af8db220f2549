"""Examples of the pages in docs/, and tiny models under the names that these load."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, tokenizer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
N_LOG = 240  # requests of the user's own


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, heading: str | None = None) -> list[str]:
    """Return the Python examples of a page, or of the part below a heading of level 2 ("": before the first)."""
    text = text_of(page)
    if heading == "":
        text = text.partition("\n## ")[0]
    elif heading is not None:
        (text,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def save_models(folder: Path, words: list[str]) -> None:
    """Save tiny models under the names that the examples load."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    made = {
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english": CLASSIFIERS["distilbert"],
        "HuggingFaceTB/SmolLM2-135M-Instruct": GENERATORS["llama"],
        "bare": BARE["bert"],
    }
    known = tokenizer(words=words)
    known.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    known.model_max_length, known.model_input_names = 48, ["input_ids", "attention_mask"]
    for name, make in made.items():
        build(make).save_pretrained(folder / name)
        known.save_pretrained(folder / name)
    parts = [modules.Transformer(str(folder / "bare")), modules.Pooling(32, pooling_mode="mean")]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder / "sentence-transformers/all-MiniLM-L6-v2"))


def run(folder: Path, page: Path, *headings: str, **given: Any) -> dict[str, Any]:
    """Run a page's examples in order, all or those below headings, with tiny models; return the names they defined."""
    words = sorted(set(re.findall(r"[a-z]+", " ".join(re.findall(r'"([a-z ]+)"', "\n".join(blocks(page)))))))
    save_models(folder, words)
    rng = np.random.default_rng(0)
    defined = {**given, "log": [" ".join(rng.choice(words, 6)) for _ in range(N_LOG if words else 0)]}
    for heading in headings or [None]:
        for number, example in enumerate(blocks(page, heading)):
            exec(compile(example, f"{page.name}, {heading or 'all'}, example {number}", "exec"), defined)
    return defined
