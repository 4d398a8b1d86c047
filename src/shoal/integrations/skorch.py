"""A skorch callback that connects `NeuralNet.fit` in an opaque training with the study."""

from typing import Any

from shoal.integrations.optional import check_installed, numbers
from shoal.programs.trainable import checkpoint, report, step

try:
    from skorch.callbacks import Callback
except ImportError:  # the constructor says what to install
    Callback = object

__all__ = ["ReportCheckpointCallback", "SkorchReportCallback"]

_NO_METRICS = ("epoch", "dur", "batches", "train_batch_count", "valid_batch_count")
"""Values of each row of a history that measure nothing."""


class SkorchReportCallback(Callback):  # type: ignore[misc]  # its base has no types here
    """Saves parameters, optimizer and history, and reports the last row of the history, at the end of each epoch.

    Training continues from them: `fit` loads them first. skorch then trains `max_epochs` more, so leave out those
    that are done. Budgets count epochs. If the trial must stop, the report ends the function, so `fit` does not return.

    Import it as `shoal.integrations.skorch.ReportCheckpointCallback`.

    Example:
        A training function that continues from its checkpoint::

            def train(config):
                callbacks = [ReportCheckpointCallback()]
                net = NeuralNetClassifier(Model, max_epochs=20 - shoal.step(), callbacks=callbacks, **config)
                net.fit(x, y)

    Raises:
        ShoalError: skorch is not installed.
    """

    def __init__(self) -> None:
        check_installed("skorch", "ReportCheckpointCallback")

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:  # noqa: N803
        """Load the checkpoint, if there is one."""
        if step():
            net.load_params(**_files())

    def on_epoch_end(self, net: Any, dataset_train: Any = None, dataset_valid: Any = None, **kwargs: Any) -> None:
        """Save, then report.

        Raises:
            TrainingStopped: The trial stops now.
        """
        net.save_params(**_files())
        report(numbers({name: value for name, value in net.history[-1].items() if name not in _NO_METRICS}))


ReportCheckpointCallback = SkorchReportCallback


def _files() -> dict[str, str]:
    """The files of a checkpoint, as `save_params` and `load_params` take them."""
    files = {"f_params": "parameters.pt", "f_optimizer": "optimizer.pt", "f_history": "history.json"}
    return {kind: str(checkpoint() / name) for kind, name in files.items()}
