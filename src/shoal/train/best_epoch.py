"""The best epoch of a trial in training, and its weights until they are on the disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from shoal.core.epoch_order import LAST_EPOCHS, EpochOrder
from shoal.core.trial import Report
from shoal.fuse.frozen import is_shared, large_frozen
from shoal.fuse.rows import bytes_of, data_address
from shoal.train.checkpoint import Weights

__all__ = ["BestEpoch", "best_bytes"]


def best_bytes(model: nn.Module, of_best: EpochOrder) -> int:
    """Return the bytes on the device of the copy of a model's weights that a trial has of its best epoch."""
    hosted = set(map(id, large_frozen(model)))
    own = [each for each in model.parameters() if id(each) not in hosted and not is_shared(each)]
    return bytes_of([*own, *model.buffers()]) if of_best.objectives else 0


@dataclass
class BestEpoch:
    """The best epoch of a trial so far.

    Its weights are copied when it ends, and written with the next checkpoint. A trial that continues from a checkpoint
    computes later ones again, so that a crash changes nothing.

    Args:
        order: As `WorkerContext.of_best`.
        epoch: Its number; 0 without one.
        weights: Copy of its weights; None if they are on the disk, or those of the checkpoint that is written next.
    """

    order: EpochOrder = LAST_EPOCHS
    epoch: int = 0
    weights: Weights | None = None
    _metrics: Mapping[str, float] = field(default_factory=dict)
    _saved: int = 0  # best epoch as of the newest checkpoint

    @property
    def kept(self) -> frozenset[int]:
        """The best epochs as of now and as of the newest checkpoint, whose weights stay on the disk."""
        return frozenset({self.epoch, self._saved} - {0})

    def note(self, report: Report, start: int) -> bool:
        """Note an epoch that is better than all before it since `start`; return whether it is."""
        if report.epoch <= start or not self.order.improves(report.metrics, self._metrics):
            return False
        self.epoch, self._metrics, self.weights = report.epoch, report.metrics, None
        return True

    def keep(self, now: Weights, model: nn.Module) -> None:
        """Copy the weights of the model, those of the best epoch, but for frozen parameters that trials share.

        A large frozen part that is not shared, such as a pretrained base model, is copied to the host.
        """
        shared = {data_address(each) for each in model.parameters() if not each.requires_grad and is_shared(each)}
        shared.discard(0)  # that of every tensor without storage
        hosted = {data_address(each) for each in large_frozen(model)} - shared - {0}
        self.weights = replace(now, best=self.epoch).copied(shared, hosted)

    def mark_saved(self) -> None:
        """Note that a checkpoint has been submitted, and with it the weights."""
        self._saved, self.weights = self.epoch, None
