"""Results of `configure_optimizers`: one optimizer, and its schedulers that step per step or per epoch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.core.errors import TaskError
from shoal.integrations.lightning_module import BATCHES, REMEDY
from shoal.integrations.lightning_trainer import Length

__all__ = ["Schedules", "parsed"]

_made: "WeakKeyDictionary[Optimizer, Schedules]" = WeakKeyDictionary()
"""Optimizer -> its schedulers, until `LightningTask.scheduler` takes them."""


@dataclass(frozen=True)
class _Scheduled:
    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None

    @property
    def follows_metric(self) -> bool:
        return isinstance(self.scheduler, ReduceLROnPlateau)


class Schedules:
    """The LR schedulers of one optimizer, and the count of its module's batches.

    Args:
        schedulers: Schedulers with their intervals.
        model: Module.
        length: Length of the training.
    """

    def __init__(self, schedulers: list[_Scheduled], model: nn.Module, length: Length) -> None:
        self._schedulers = schedulers
        self._model = model
        self._length = length
        self._steps = 0

    @classmethod
    def of(cls, optimizer: Optimizer) -> "Schedules":
        """The schedulers that were returned with an optimizer."""
        return _made.pop(optimizer)

    def step(self) -> None:
        """Count an optimizer step. As in Trainer, `frequency` of a scheduler per step counts batches of the epoch."""
        self._steps += 1
        within = self._steps % self._length.steps
        batches = within * self._length.accumulate if within else self._length.batches
        for each in self._schedulers:
            if each.interval == "step" and batches % each.frequency == 0:
                each.scheduler.step()

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Step the schedulers per epoch, with the means of a validation.

        Raises:
            TaskError: There is no metric of the name that a scheduler monitors.
        """
        epoch = self._steps // self._length.steps
        for each in self._schedulers:
            if each.interval != "epoch" or epoch % each.frequency:
                continue
            if not each.follows_metric:
                each.scheduler.step()
            elif each.monitor is not None and each.monitor in metrics:
                each.scheduler.step(metrics[each.monitor])
            else:
                raise TaskError(
                    f"ReduceLROnPlateau monitors {each.monitor!r}, which validation_step does not log; it logs "
                    f"{', '.join(metrics)}"
                )
        self._set_count()

    def state_dict(self) -> dict[str, Any]:
        """Steps, and the states of the schedulers."""
        return {"steps": self._steps, "schedulers": [each.scheduler.state_dict() for each in self._schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._steps = state["steps"]
        for each, saved in zip(self._schedulers, state["schedulers"], strict=True):
            each.scheduler.load_state_dict(saved)
        self._set_count()

    def _set_count(self) -> None:
        self._model.get_buffer(BATCHES).fill_(self._length.batches_before(self._steps))


def parsed(returned: Any, model: nn.Module, length: Length) -> Optimizer:
    """The optimizer that `configure_optimizers` returned; its schedulers are kept for `Schedules.of`.

    Raises:
        TaskError: There are several optimizers or none, or a scheduler has no equal.
    """
    where = f"{type(model).__name__}.configure_optimizers"
    schedulers: list[Any] = []
    monitor: Any = None
    match returned:
        case [[*optimizers], [*schedulers]] | [[*optimizers], schedulers] if all(
            isinstance(one, Optimizer) for one in optimizers
        ):
            schedulers = schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]
        case {"optimizer": one, **others} | [{"optimizer": one, **others}]:
            optimizers, monitor = [one], others.get("monitor")
            schedulers = [others["lr_scheduler"]] if others.get("lr_scheduler") is not None else []
        case [*optimizers]:
            pass
        case _:
            optimizers = [returned]
    if len(optimizers) != 1:
        raise TaskError(f"{where} returns {len(optimizers)} optimizers, and arrays have one. {REMEDY}")
    if not isinstance(optimizers[0], Optimizer):
        raise TaskError(f"{where} must return a torch.optim.Optimizer, got {returned!r}")
    found = [_scheduled(one, monitor, where) for one in schedulers]
    if any(each.scheduler.optimizer is not optimizers[0] for each in found):
        raise TaskError(f"{where} returns a scheduler of another optimizer than the one that it returns")
    _made[optimizers[0]] = Schedules(found, model, length)
    return optimizers[0]


def _scheduled(given: Any, monitor: Any, where: str) -> _Scheduled:
    settings = dict(given) if isinstance(given, Mapping) else {"scheduler": given, "monitor": monitor}
    known = ("scheduler", "interval", "frequency", "monitor")
    found = _Scheduled(**{name: settings[name] for name in known if name in settings})
    if not isinstance(found.scheduler, LRScheduler):
        raise TaskError(
            f"{where} must return schedulers of torch.optim.lr_scheduler, got {found.scheduler!r}. {REMEDY}"
        )
    if found.interval not in ("step", "epoch") or not isinstance(found.frequency, int) or found.frequency < 1:
        raise TaskError(
            f"{where}: `interval` must be 'step' or 'epoch' and `frequency` a positive integer, got "
            f"{found.interval!r} and {found.frequency!r}"
        )
    if found.follows_metric and (found.interval == "step" or found.monitor is None):
        raise TaskError(f"{where}: ReduceLROnPlateau needs a `monitor` and the interval 'epoch'")
    return found
