"""Tracking of a study in Weights & Biases."""

from typing import Any

from shoal.callbacks.base import Callback, EpochReport, StudyInfo, TrialResult
from shoal.core.errors import ShoalError
from shoal.core.trial import Config
from shoal.integrations.open_runs import OpenRuns, run_name
from shoal.integrations.optional import check_installed

__all__ = ["WandbCallback"]


class WandbCallback(Callback):
    """Write a run of Weights & Biases for each trial, with its config and metrics; the study is their group.

    Needs `wandb`. A resumed study continues its runs by their ids. Offline, each part of a run is a directory of its
    own, and `wandb sync` joins them. If the follower was killed, what is delivered twice keeps its step, which W&B
    ignores.

    Args:
        project: Name of the project; None: W&B's own setting.
        entity: Name of the user or team; None: W&B's own setting.
        mode: "online" or "offline"; None: W&B's own setting.
        directory: Directory of W&B's files; None: the study's directory.

    Raises:
        ShoalError: `mode` is another word.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: str | None = None,
        directory: str | None = None,
    ) -> None:
        if mode not in (None, "online", "offline"):
            raise ShoalError(f'`mode` must be "online", "offline" or None, got {mode!r}')
        self._given = {"project": project, "entity": entity, "mode": mode}
        self._directory = directory

    def on_study_begin(self, study: StudyInfo) -> None:
        """Import the library."""
        check_installed("wandb", "WandbCallback")
        import wandb

        self._wandb: Any = wandb
        self._study = study
        self._runs: OpenRuns[Any] = OpenRuns(self._opened, lambda run: run.finish(), most=4)

    def on_report(self, trial: int, config: Config, report: EpochReport) -> None:
        """Log the metrics of an epoch."""
        self._runs.get(trial, config).log(dict(report.metrics), step=report.epoch)

    def on_trial_end(self, trial: int, config: Config, result: TrialResult) -> None:
        """Finish the run of a trial."""
        run = self._runs.get(trial, config)
        run.summary.update({"state": str(result.state), "reason": result.reason})
        self._runs.close(trial)

    def on_study_end(self, study: StudyInfo) -> None:
        """Finish the runs that are open."""
        self._runs.close_all()

    def _opened(self, trial: int, config: Config) -> Any:
        return self._wandb.init(
            id=f"{self._study.id}-{trial}",
            name=run_name(trial),
            group=self._study.name,
            config=dict(config),
            dir=self._directory or str(self._study.directory),
            reinit="create_new",
            resume="allow",
            settings=self._wandb.Settings(silent=True, console="off"),
            **self._given,
        )
