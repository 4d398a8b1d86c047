"""The sweeper and its configuration. Hydra imports this module at the start of each program, so it imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.errors import CompactHydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from shoal import Study

__all__ = ["ShoalSweeper", "ShoalSweeperConf"]

_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


@dataclass
class ShoalSweeperConf:
    """The configuration `hydra.sweeper`. None stands for the default of `shoal.tune`.

    Args:
        params: Key -> sweep, such as `lr: tag(log, interval(1e-4, 1e-1))`; overrides of the command line replace them.
        n: Number of trials, for an algorithm that takes one; 20 by default.
        algorithm: Name in `shoal.algorithms.ALGORITHMS`; or the name and its arguments,
            `{name: asha, max_epochs: 27}`; or `{_target_: shoal.ASHA, ...}`. By default random search. `epochs` is
            1 for a function, which is one report or the value that it returns.
        metric: Name of the value that the function returns or reports; or a list of names.
        mode: "min" or "max"; for several metrics a list.
        repeats: As for `shoal.tune`, like `timeout`, `keep`, `devices` and `backend`.
        study: Further arguments of `shoal.tune`.
        task: A `shoal.Task` as `{_target_: my.Task}`, to train trials as arrays instead of calling the function.
    """

    _target_: str = "hydra_plugins.shoal_sweeper.sweeper.ShoalSweeper"
    _recursive_: bool = False
    params: Any = None
    n: int | None = None
    algorithm: Any = None
    metric: Any = "value"
    mode: Any = "min"
    repeats: Any = None
    timeout: Any = None
    keep: Any = None
    devices: Any = None
    backend: Any = None
    study: Any = None
    task: Any = None


ConfigStore.instance().store(group="hydra/sweeper", name="shoal", node=ShoalSweeperConf, provider="shoal")


class ShoalSweeper(Sweeper):
    """Runs a multirun as a study in `hydra.sweep.dir`, or resumes the study that is there."""

    def __init__(self, **_: Any) -> None:
        """Take the settings, which `sweep` reads from the configuration, where interpolations find their values."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Refuse a launcher that would take no part."""
        if (launcher := config.hydra.launcher._target_) != _LAUNCHER:
            name = config.hydra.runtime.choices["hydra/launcher"]
            raise CompactHydraException(
                f"hydra/launcher={name} has no part in a study of Shoal, whose back ends start the trials; leave it "
                f"out, and name a back end instead of {launcher}: hydra.sweeper.backend=local, ray or slurm"
            )
        self.hydra_context, self.config, self._function = hydra_context, config, task_function

    def sweep(self, arguments: Sequence[str]) -> "Study":
        """Run the study to its end, or to its timeout.

        Args:
            arguments: Overrides of the command line, which replace those of `params`.
        """
        from ._study import run_study  # imports torch

        assert self.hydra_context is not None
        assert self.config is not None
        return run_study(self.hydra_context, self._function, self.config, arguments)
