"""Small fakes of the clients of MLflow and W&B: what the trackers call, with the limits of the real ones.

Each writes its calls to a file, as the follower is another process.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = Path(os.environ.get("FAKE_TRACKER", os.devnull))


def said(*call: Any) -> None:
    with FILE.open("a") as file:
        file.write(json.dumps(call) + "\n")


class Metric:
    def __init__(self, key: str, value: float, timestamp: int, step: int) -> None:
        self.row = [key, value, timestamp, step]


class Param:
    def __init__(self, key: str, value: str) -> None:
        assert isinstance(value, str)
        assert len(value) <= 6000
        self.row = [key, value]


class MlflowClient:
    """Keeps its runs in the file of calls."""

    def __init__(self, tracking_uri: str | None = None) -> None:
        said("client", tracking_uri)

    def _calls(self, name: str) -> list[list[Any]]:
        return [call for call in map(json.loads, FILE.read_text().splitlines()) if call[0] == name]

    def get_experiment_by_name(self, name: str) -> Any:
        found = [call for call in self._calls("experiment") if call[1] == name]
        return SimpleNamespace(experiment_id="7") if found else None

    def create_experiment(self, name: str) -> str:
        said("experiment", name)
        return "7"

    def search_runs(self, experiment_ids: list[str], filter_string: str) -> list[Any]:
        assert experiment_ids == ["7"]
        wanted = dict(part.split(" = ") for part in filter_string.replace("tags.`", "").replace("`", "").split(" AND "))
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=run))
            for _, run, _, tags in self._calls("run")
            if all(tags.get(name) == value.strip("'") for name, value in wanted.items())
        ]

    def create_run(self, experiment_id: str, tags: dict[str, str], run_name: str) -> Any:
        run = f"run{len(self._calls('run'))}"
        said("run", run, run_name, tags)
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run_id: str, status: str) -> None:
        said("status", run_id, status)

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000
        said("batch", run_id, [metric.row for metric in metrics], [param.row for param in params])

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        said("tag", run_id, key, value)

    def set_terminated(self, run_id: str, status: str) -> None:
        said("end", run_id, status)


class Run:
    """A run of W&B."""

    def __init__(self, run: str) -> None:
        self.run, self.summary, self.step = run, self, 0

    def log(self, values: dict[str, float], step: int) -> None:
        said("log", self.run, values, step)

    def update(self, values: dict[str, Any]) -> None:
        said("summary", self.run, values)

    def finish(self) -> None:
        said("finish", self.run)


def init(**given: Any) -> Run:
    said("init", {name: value for name, value in given.items() if name != "settings"})
    return Run(given["id"])
