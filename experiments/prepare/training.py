"""One training run with transformers' Trainer: seeded, resumable, with a progress bar where there is a terminal."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from llmcache.errors import ConfigError

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class Order:
    """What a recipe is asked for.

    Attributes:
        base: Model to begin with, where the recipe does not begin from nothing.
        folder: Of the new model; checkpoints go below it.
        data_dir: Data folder, or None for the hub.
        seed: Of everything drawn.
        limit: Use that many records only, to try things out.
        epochs: Instead of the recipe's own number.
    """

    base: str
    folder: Path
    data_dir: Path | None
    seed: int = 0
    limit: int | None = None
    epochs: float | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how hard.

    Attributes:
        epochs: Passes over the examples.
        batch_size: Examples a step.
        learning_rate: Highest; it rises over the first tenth of the steps and falls to 0 in a line.
        weight_decay: Of AdamW.
    """

    epochs: float
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.01


def train(
    model: nn.Module, examples: Sequence[Any], collate: Any, schedule: Schedule, folder: Path, seed: int, phase: str
) -> None:
    """Train a model in place. A run that was interrupted goes on from its last checkpoint.

    Args:
        model: A transformers model that returns its loss.
        examples: What `collate` makes batches of. Mappings with `input_ids` are grouped by length.
        collate: `(examples) -> inputs`, labels included.
        schedule: How long and how hard.
        folder: Of the model; checkpoints go below it.
        seed: Of the order and of dropout.
        phase: Names the checkpoints, where a model is trained in several phases.

    Raises:
        ConfigError: `accelerate`, which the Trainer needs, is missing.
    """
    import torch
    import transformers

    checkpoints = folder / CHECKPOINTS / phase
    try:
        args = transformers.TrainingArguments(
            output_dir=str(checkpoints),
            num_train_epochs=schedule.epochs,
            per_device_train_batch_size=schedule.batch_size,
            learning_rate=schedule.learning_rate,
            weight_decay=schedule.weight_decay,
            warmup_steps=0.1,
            lr_scheduler_type="linear",
            train_sampling_strategy="group_by_length" if isinstance(examples[0], Mapping) else "random",
            bf16=_has_fast_bf16(),
            use_cpu=not torch.cuda.is_available(),
            seed=seed,
            save_strategy="steps",
            save_steps=200,
            save_total_limit=1,
            logging_steps=50,
            report_to=[],
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
    except ImportError as error:
        raise ConfigError("prepare: training needs a package: pip install 'llmcache[exp]'") from error
    trainer = transformers.Trainer(model=model, args=args, train_dataset=list(examples), data_collator=collate)
    trainer.train(resume_from_checkpoint=any(checkpoints.glob("checkpoint-*")))
    model.eval().to("cpu")


class Padding:
    """Makes a batch of tokenised examples of different lengths: tensors (B, T), and labels (B,)."""

    def __init__(self, tokenizer: Any) -> None:
        """Pad as `tokenizer` does."""
        self._tokenizer = tokenizer

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pad and stack."""
        return dict(self._tokenizer.pad(list(examples), return_tensors="pt"))


def finish(folder: Path) -> None:
    """Drop the checkpoints of a model that is done."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def _has_fast_bf16() -> bool:
    """Whether bfloat16 products are done in hardware: on a GPU of the kind, or with the CPU's own instructions."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    can = torch.cpu.get_capabilities()
    return bool(can.get("avx512_bf16") or can.get("amx_bf16"))
