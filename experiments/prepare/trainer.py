"""Transformers' Trainer for the recipes. Importing it takes seconds, so it is imported only to train."""

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from experiments.support.files import written_by_others
from experiments.support.progress import Progress


class SavingTrainer(Trainer):
    """Raises `OSError`, which a user can act on, if a checkpoint cannot be written."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with written_by_others(Path(str(self.args.output_dir))):
            super()._save_checkpoint(model, trial)


class Bar(TrainerCallback):
    """Shows the steps done, in place of the Trainer's own output."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._what = what

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress.advance(self._what, state.global_step, state.max_steps)
