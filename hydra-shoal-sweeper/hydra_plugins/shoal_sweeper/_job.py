"""The function of a trial, which runs the user's function as a job of Hydra."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

import shoal
from shoal.core.errors import TaskError
from shoal.core.repeats import FOLD

from ._space import overrides

__all__ = ["Job"]


class Job:
    """Function of a configuration of Shoal that calls the user's function with the composed one.

    The process of a trial may be a new one, so the state of Hydra's singletons, such as the configurations that the
    program stored in the `ConfigStore`, goes with it.

    Args:
        directory: Directory of the study; the job's own is `hydra.sweep.subdir` below it.
        metrics: Names of the values that the function returns, if it reports none.
        has_folds: Whether each trial has the number of a fold, which becomes the value `fold` of its configuration.
    """

    def __init__(
        self,
        function: TaskFunction,
        context: HydraContext,
        config: DictConfig,
        directory: Path,
        metrics: list[str],
        *,
        has_folds: bool,
    ) -> None:
        self._function, self._context, self._config = function, context, config
        self._directory, self._metrics = str(directory), metrics
        self._folds = {FOLD} if has_folds else set()
        self._singletons = Singleton.get_state()
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        self.__module__ = function.__module__  # of what is tuned, for the study
        self.__qualname__ = f"{file}.{getattr(function, '__qualname__', type(function).__qualname__)}"

    def __call__(self, config: Mapping[str, Any]) -> None:
        """Run the job, and report what the function returns if it has reported nothing."""
        Singleton.set_state(self._singletons)
        setup_globals()
        lines = overrides({f"++{name}" if name in self._folds else name: value for name, value in config.items()})
        composed = self._context.config_loader.load_sweep_config(self._config, lines)
        with open_dict(composed):
            composed.hydra.sweep.dir = self._directory
            composed.hydra.job.num = int(os.environ["SHOAL_TRIAL"])
            composed.hydra.job.id = os.environ["SHOAL_TRIAL"]
        job = run_job(
            hydra_context=self._context,
            task_function=self._function,
            config=composed,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        returned = job.return_value
        if shoal.step() == 0:
            shoal.report(self._values(returned))

    def _values(self, returned: Any) -> Mapping[str, Any]:
        if isinstance(returned, Mapping):
            return returned
        values = returned if len(self._metrics) > 1 else [returned]
        if returned is None or not isinstance(values, list | tuple) or len(values) != len(self._metrics):
            raise TaskError(
                f"{self.__qualname__.rpartition('.')[2]} reported nothing and returned {returned!r}; return the value "
                f"of {', '.join(self._metrics)}, or call shoal.report"
            )
        return dict(zip(self._metrics, values, strict=True))
