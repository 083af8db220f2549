"""Training runs with transformers' Trainer: seeded, resumable, with a progress bar on a terminal."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.support.files import write_whole
from experiments.support.progress import Progress
from llmcache import ConfigError

CHECKPOINTS = "checkpoints"
SAVE_EVERY = 200  # steps: frequent enough to lose little work, rare enough to cost little time


@dataclass(frozen=True, slots=True)
class Order:
    base: str  # model to start from, unless the recipe starts from scratch
    folder: Path  # of the new model; checkpoints go below it
    data_dir: Path | None  # data folder, or None for the hub
    seed: int = 0
    limit: int | None = None  # number of records to use, for trial runs
    epochs: float | None = None  # overrides the recipe's number


@dataclass(frozen=True, slots=True)
class Schedule:
    epochs: float
    batch_size: int  # examples per step
    learning_rate: float  # peak; it rises over the first tenth of the steps and falls linearly to 0
    weight_decay: float = 0.01


def train(
    model: nn.Module, examples: Sequence[Any], collate: Any, schedule: Schedule, folder: Path, seed: int, phase: str
) -> None:
    """Train a model in place and leave it in eval mode; resumes from the last checkpoint of `phase`."""
    # Imported here because it takes seconds, which listing the recipes' names should not cost.
    from transformers import PrinterCallback

    from experiments.prepare.trainer import Bar, SavingTrainer

    if not examples:
        raise ConfigError(f"prepare: {phase}: no examples to train on; give more data, or a higher limit")
    checkpoints = folder / CHECKPOINTS / phase
    trainer = SavingTrainer(
        model=model,
        args=_arguments(schedule, checkpoints, isinstance(examples[0], Mapping), seed),
        train_dataset=list(examples),
        data_collator=collate,
    )
    trainer.remove_callback(PrinterCallback)
    with Progress() as progress:
        trainer.add_callback(Bar(progress, f"Training ({phase})"))
        trainer.train(resume_from_checkpoint=_last(checkpoints))
    # Mixed precision wraps the model's forward permanently; figures and threshold need the model as it will serve.
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    model.eval().to("cpu")


def _arguments(schedule: Schedule, checkpoints: Path, is_by_length: bool, seed: int) -> Any:
    from transformers import TrainingArguments

    try:
        return TrainingArguments(
            output_dir=str(checkpoints),
            num_train_epochs=schedule.epochs,
            per_device_train_batch_size=schedule.batch_size,
            learning_rate=schedule.learning_rate,
            weight_decay=schedule.weight_decay,
            warmup_steps=0.1,
            lr_scheduler_type="linear",
            train_sampling_strategy="group_by_length" if is_by_length else "random",
            bf16=_has_fast_bf16(),
            use_cpu=not torch.cuda.is_available(),
            seed=seed,
            save_strategy="steps",
            save_steps=SAVE_EVERY,
            save_total_limit=1,
            logging_strategy="no",
            disable_tqdm=True,
            report_to=[],
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
    except ImportError as error:
        raise ConfigError("prepare: training needs a package: pip install 'llmcache-torch[exp]'") from error


def _last(checkpoints: Path) -> str | None:
    """Return the folder of the last complete checkpoint; its state is written last."""
    whole = [path.parent for path in checkpoints.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda path: int(path.name.partition("-")[2]))) if whole else None


class Padding:
    """Batches tokenised examples of different lengths: tensors (B, T), and labels (B,)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return dict(self._tokenizer.pad(list(examples), return_tensors="pt"))


def begin(folder: Path, options: Mapping[str, Any]) -> None:
    """Create a model's folder, and record the options of its checkpoints."""
    note = folder / CHECKPOINTS / "options.json"
    if note.is_file() and (other := json.loads(note.read_text(encoding="utf-8"))) != options:
        raise ConfigError(
            f"{folder}: a training with {as_words(other, options)} was interrupted here; "
            "give that again, or delete the folder"
        )
    note.parent.mkdir(parents=True, exist_ok=True)
    write_whole(note, json.dumps(options))


def as_words(options: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Return the options that differ from `others`, as typed: `--limit 24, no --epochs`."""
    differing = [name for name in options if options[name] != others.get(name)]
    return ", ".join(f"no --{name}" if options[name] is None else f"--{name} {options[name]}" for name in differing)


def _has_fast_bf16() -> bool:
    """Whether the hardware computes bfloat16 products: a GPU that supports it, or the CPU's own instructions."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    can = torch.cpu.get_capabilities()
    return bool(can.get("avx512_bf16") or can.get("amx_bf16"))
