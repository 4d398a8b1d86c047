"""Callback of `transformers.Trainer` that reports its evaluations and saves what a trial continues from."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from shoal.core.errors import TaskError
from shoal.integrations.optional import numbers
from shoal.programs.trainable import checkpoint, report

__all__ = ["ReportCheckpointCallback"]


class ReportCheckpointCallback(TrainerCallback):
    """Has the Trainer save a checkpoint after each evaluation, and then reports the metrics of that evaluation.

    Budgets count evaluations (`eval_strategy`). If the trial must stop, the report ends the function, so `train` does
    not return. `save_strategy` is best "no"; `save_total_limit=1` keeps the directory of the trial small. In a training
    on several processes the first one reports.

    Import it as `shoal.integrations.transformers.ReportCheckpointCallback`.

    Example:
        A training function that continues from its checkpoint::

            def train(config):
                callback = ReportCheckpointCallback()
                args = TrainingArguments(
                    shoal.checkpoint(), eval_strategy="epoch", save_strategy="no", save_total_limit=1, **config
                )
                trainer = Trainer(model, args, train_dataset=train, eval_dataset=valid, callbacks=[callback])
                trainer.train(resume_from_checkpoint=callback.resume_from_checkpoint)
    """

    def __init__(self) -> None:
        self._metrics: dict[str, float] | None = None

    @property
    def resume_from_checkpoint(self) -> str | None:
        """The checkpoint to continue from, for `Trainer.train(resume_from_checkpoint=...)`; None if there is none.

        Raises:
            ShoalError: The program runs outside of a study.
        """
        found: str | None = get_last_checkpoint(str(checkpoint()))
        return found

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the arguments.

        Raises:
            TaskError: Checkpoints of the Trainer would not be in the directory of the trial, or not be made after each
                evaluation, or there are no evaluations.
        """
        if Path(args.output_dir).resolve() != checkpoint().resolve():
            raise TaskError(
                f"`output_dir` is {str(args.output_dir)!r}, where the study does not find the checkpoints of the "
                "Trainer; write TrainingArguments(output_dir=shoal.checkpoint(), ...)"
            )
        if args.eval_strategy == "no":
            raise TaskError("`eval_strategy` is 'no', so there is nothing to report; write eval_strategy='epoch'")
        if args.save_strategy == "best":
            raise TaskError(
                "`save_strategy` is 'best', but a trial continues from its last evaluation; write save_strategy='no'"
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Keep the metrics, and ask for a checkpoint, which the Trainer makes next."""
        self._metrics = numbers(metrics or {})
        control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the metrics of the evaluation before.

        Raises:
            TrainingStopped: The trial stops now.
        """
        metrics, self._metrics = self._metrics, None
        if metrics is not None and state.is_world_process_zero:
            report(metrics)
