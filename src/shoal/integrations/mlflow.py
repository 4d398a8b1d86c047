"""Tracking of a study in MLflow."""

from typing import Any

from shoal.callbacks.base import Callback, EpochReport, StudyInfo, TrialResult
from shoal.core.space import flatten
from shoal.core.trial import Config, TrialState
from shoal.integrations.open_runs import run_name
from shoal.integrations.optional import check_installed

__all__ = ["MLflowCallback"]

_METRICS_PER_CALL = 1000
"""Largest number of metrics in a call of `log_batch`."""

_MAX_VALUE_LENGTH = 6000
"""Longest value of a parameter, in characters."""


class MLflowCallback(Callback):
    """Write an MLflow run for the study, and nested in it a run for each trial, with the trial's config and metrics.

    Needs `mlflow-skinny` with `sqlalchemy` and `alembic`, or `mlflow`. Runs are found again by their tags
    `shoal.study` and `shoal.trial`, so a resumed study continues its runs. MLflow stores metrics with equal step, time
    and value once, so a report that is delivered twice is stored once.

    Args:
        tracking_uri: Store, such as "sqlite:////home/me/mlflow.db" or the address of a server; None: MLflow's own
            setting (MLFLOW_TRACKING_URI, or `mlflow.db` in the working directory).
        experiment: Name of the experiment; made if it does not exist. None: the name of the study's directory.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        self._tracking_uri, self._experiment = tracking_uri, experiment
        self._buffer: dict[str, list[Any]] = {}  # id of a run -> metrics

    def on_study_begin(self, study: StudyInfo) -> None:
        """Connect to the store, and find or make the run of the study."""
        check_installed("mlflow", "MLflowCallback")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._study = Metric, Param, study
        self._client = MlflowClient(self._tracking_uri)
        name = self._experiment or study.name
        found = self._client.get_experiment_by_name(name)
        self._experiment_id = self._client.create_experiment(name) if found is None else found.experiment_id
        runs = self._client.search_runs(
            [self._experiment_id], f"tags.`shoal.study` = '{study.id}' AND tags.`shoal.trial` = 'none'"
        )
        tags = {"shoal.study": study.id, "shoal.trial": "none", "shoal.directory": str(study.directory)}
        self._parent = runs[0].info.run_id if runs else self._create_run(study.name, tags)
        self._client.update_run(self._parent, status="RUNNING")
        self._runs: dict[int, str] = {}

    def on_trial_begin(self, trial: int, config: Config) -> None:
        """Make the run of a trial, with its config."""
        self._run_id(trial, config)

    def on_report(self, trial: int, config: Config, report: EpochReport) -> None:
        """Buffer the metrics of an epoch."""
        metrics = self._buffer.setdefault(self._run_id(trial, config), [])
        for name, value in report.metrics.items():
            metrics.append(self._metric(name, value, int(report.time * 1000), report.epoch))

    def on_trial_end(self, trial: int, config: Config, result: TrialResult) -> None:
        """Set the status of a trial's run."""
        run = self._run_id(trial, config)
        self._send(run)
        self._client.set_tag(run, "shoal.state", str(result.state))
        if result.reason:
            self._client.set_tag(run, "shoal.reason", result.reason[:_MAX_VALUE_LENGTH])
        failed = result.state is TrialState.FAILED
        self._client.set_terminated(run, "FAILED" if failed else "FINISHED")

    def flush(self) -> None:
        """Send the buffered metrics."""
        for run in list(self._buffer):
            self._send(run)

    def on_study_end(self, study: StudyInfo) -> None:
        """Set the status of the study's run."""
        self._client.set_terminated(self._parent, "FINISHED" if study.finished else "KILLED")

    def _send(self, run: str) -> None:
        metrics = self._buffer.pop(run, [])
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            self._client.log_batch(run, metrics=metrics[start : start + _METRICS_PER_CALL])

    def _run_id(self, trial: int, config: Config) -> str:
        """Id of a trial's run, which is made unless an earlier process of the study has made it."""
        if trial not in self._runs:
            query = f"tags.`shoal.study` = '{self._study.id}' AND tags.`shoal.trial` = '{trial}'"
            runs = self._client.search_runs([self._experiment_id], query)
            self._runs[trial] = runs[0].info.run_id if runs else self._create_trial_run(trial, config)
        return self._runs[trial]

    def _create_trial_run(self, trial: int, config: Config) -> str:
        tags = {"mlflow.parentRunId": self._parent, "shoal.study": self._study.id, "shoal.trial": str(trial)}
        run = self._create_run(run_name(trial), tags)
        params = [self._param(name, str(value)[:_MAX_VALUE_LENGTH]) for name, value in flatten(config).items()]
        if params:
            self._client.log_batch(run, params=params)
        return run

    def _create_run(self, name: str, tags: dict[str, str]) -> str:
        return str(self._client.create_run(self._experiment_id, tags=tags, run_name=name).info.run_id)
