"""A Lightning callback that connects `Trainer.fit` in an opaque training with the study."""

from typing import Any

from shoal.integrations.optional import check_installed, numbers
from shoal.trainable import checkpoint, report

try:
    from lightning.pytorch import Callback
except ImportError:  # the constructor says what to install
    Callback = object

__all__ = ["LightningReportCallback", "ReportCheckpointCallback"]


class LightningReportCallback(Callback):  # type: ignore[misc]  # its base has no types here
    """Saves a Lightning checkpoint and reports `trainer.callback_metrics` after each validation of `Trainer.fit`.

    Budgets count validations. If the trial must stop, the report ends the function, so `fit` does not return. The
    sanity check and `Trainer.validate` are not reported. In a training on several processes the first one reports.

    Import it as `shoal.integrations.lightning.ReportCheckpointCallback`.

    Example:
        A training function that goes on from its checkpoint::

            def train(config):
                callback = ReportCheckpointCallback()
                trainer = Trainer(max_epochs=20, callbacks=[callback], enable_checkpointing=False, logger=False)
                trainer.fit(Model(config), data, ckpt_path=callback.ckpt_path)

    Raises:
        ShoalError: Lightning is not installed.
    """

    def __init__(self) -> None:
        check_installed("lightning", "ReportCheckpointCallback")
        super().__init__()

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint to go on from, for `Trainer.fit(ckpt_path=...)`; None if there is none.

        Raises:
            ShoalError: The program runs outside of a study.
        """
        path = checkpoint() / "lightning.ckpt"
        return str(path) if path.exists() else None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save, then report.

        Raises:
            TaskError: No metric was logged.
            TrainingStopped: The trial stops now.
        """
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        trainer.save_checkpoint(checkpoint() / "lightning.ckpt")
        if trainer.is_global_zero:
            report(numbers(trainer.callback_metrics))


ReportCheckpointCallback = LightningReportCallback
