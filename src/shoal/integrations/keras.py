"""A Keras callback that connects `Model.fit` in an opaque training with the study."""

from collections.abc import Mapping
from typing import Any

from shoal.integrations.optional import check_installed, numbers
from shoal.programs.trainable import checkpoint, report

try:
    from keras.callbacks import BackupAndRestore
except ImportError:  # the constructor says what to install
    BackupAndRestore = object

__all__ = ["KerasReportCallback", "ReportCheckpointCallback"]


class KerasReportCallback(BackupAndRestore):  # type: ignore[misc]  # its base has no types here
    """Saves the model, its optimizer and the epoch, and reports the logs, at the end of each epoch of `Model.fit`.

    `fit` continues after the saved epoch; the model must be built before. Budgets count epochs. If the trial
    must stop, the report ends the function, so `fit` does not return. The state of random generators, and with it the
    order of shuffled samples, is not saved.

    Import it as `shoal.integrations.keras.ReportCheckpointCallback`.

    Example:
        A training function that continues from its checkpoint::

            def train(config):
                model = build(config)
                model.fit(x, y, validation_data=valid, epochs=20, callbacks=[ReportCheckpointCallback()])

    Raises:
        ShoalError: Keras is not installed, or the program runs outside of a study.
    """

    def __init__(self) -> None:
        check_installed("keras", "ReportCheckpointCallback")
        super().__init__(str(checkpoint()), delete_checkpoint=False)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save, then report.

        Raises:
            TaskError: There are no logs.
            TrainingStopped: The trial stops now.
        """
        super().on_epoch_end(epoch, logs)
        report(numbers(logs or {}))


ReportCheckpointCallback = KerasReportCallback
