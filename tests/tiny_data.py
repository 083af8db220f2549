"""Tiny versions of all data sets of the experiments, in their published formats."""

import json
import random
from pathlib import Path
from typing import Any

from tests.tiny_models import save_bert

NAMES = ("Ada Lovelace", "Paris", "Zoë", "1999", "Rome")


def passage(seed: int) -> str:
    """Return sentences that repeat a few names, long enough for clozes."""
    rng = random.Random(seed)
    return " ".join(f"{name} went to {rng.choice(NAMES)} by train in winter ." for name in rng.choices(NAMES, k=10))


def write_data(folder: Path) -> Path:
    """Write all data sets; return the folder."""

    def write(name: str, text: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")

    def article(title: str, seed: int) -> dict[str, Any]:
        context = passage(seed)
        asked = []
        for turn, name in enumerate(NAMES):
            answers = [{"text": name, "answer_start": context.index(name)}] if turn % 2 and name in context else []
            question = f"who or what is {name} in {turn}?"
            asked.append(
                {"id": f"{title}-{turn}", "question": question, "answers": answers, "is_impossible": not answers}
            )
        return {"title": title, "paragraphs": [{"context": context, "qas": asked}]}

    for name, seeds in (("train-subset", range(6)), ("eval", range(10, 13))):
        write(f"squad_v2/{name}.json", json.dumps({"data": [article(f"{name} {seed}", seed) for seed in seeds]}))
    for name, n in (("train", 40), ("dev", 8), ("test", 8)):
        lines = [
            {
                "id": f"{name}-{i}",
                "question": {
                    "stem": f"train {i % 3} went to",
                    "choices": [{"text": NAMES[(i + j) % 5], "label": "ABCD"[j]} for j in range(4)],
                },
                "answerKey": "ABCD"[i % 4],
            }
            for i in range(n)
        ]
        write(f"openbookqa/{name}.jsonl", "\n".join(map(json.dumps, lines)))
    for name in ("wikitext-2_train.tokens", "wikitext-103_valid", "wikitext-103_test"):
        write(f"wikitext/{name}.txt", "\n".join(f" {passage(seed)} \n" for seed in range(20)))
    asked = [(f"went to {NAMES[i % 5]} by train {i}", f"intent {i % 5}") for i in range(60)]
    write("banking77/train.csv", "text,category\n" + "".join(f"{text},{label}\n" for text, label in asked[:40]))
    write("banking77/test.csv", "text,category\n" + "".join(f"{text},{label}\n" for text, label in asked[40:]))
    for name, part in (("train", asked[:40]), ("valid", asked[40:50]), ("test", asked[50:])):
        write(f"snips/{name}.seq.in", "".join(f"{text}\n" for text, _ in part))
        write(f"snips/{name}.label", "".join(f"{label}\n" for _, label in part))
    examples = [{"text": text, "intent": label, "entities": []} for text, label in asked]
    write("hwu64/train.json", json.dumps({"rasa_nlu_data": {"common_examples": examples}}))
    return folder


def save_base(folder: Path) -> Path:
    """Save a tiny BERT whose tokenizer knows the words of all data sets."""
    text = " ".join(passage(seed) for seed in range(20))
    return save_bert(folder, f"{text} who or what is in ? 0 1 2 3 4 5 6 7 8 9")
