"""The state machine of a small study, without an engine: events in, rows and commands out."""

from pathlib import Path
from typing import Any

from shoal.algorithms.grid import Grid
from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.event import Reported
from shoal.core.space import Space, grid
from shoal.core.trial import Report
from shoal.host.fleet import Fleet
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.history import History
from shoal.plan.schedule.registry import make_policy
from shoal.spec import StudySpec
from shoal.study.core import StudyCore
from shoal.study.devices import DeviceTracker
from shoal.study.event import Due
from shoal.study.state import CoreConfig

JOB = "job-00001"
GPU = Cluster((Node("node", 16, (Device("gpu", "gpu", 35, 4),)),))
"""A device with memory for two trials, of 10 bytes each beside 10 of their process."""


class Machine:
    """The state machine of a study of three trials of five epochs, of which two run; trial 0 has reported an epoch."""

    def __init__(self) -> None:
        algorithm, history = Grid(5), History("")
        algorithm.bind(Space({"x": grid([1.0, 2.0, 3.0])}), metric="loss", mode="min", seed=0, data_seed=0)
        history.put("net", "data", 32, "gpu", Profile({1: 1.0, 2: 1.1, 4: 1.2}, 10, 1, 10, 10, 1.0, 1.0, mixing=1.05))
        self.core = StudyCore(
            CoreConfig(
                Path("study"), StudySpec(metric="loss", mode="min"), {}, algorithm, make_policy("fifo"), history,
                DeviceTracker(Fleet(GPU), lambda names: GPU, None, Path("study")),
                packer=ArrayPacker(), key=lambda _: FusionKey("net", "data", 32),
            )
        )  # fmt: skip
        self.plan(0.0)
        self.report(0.5, Report(0, 1, {"loss": 1.0}))
        self.plan(1.0)
        self.first, self.second = self.members
        self.third = 3 - self.first - self.second

    def step(self, event: Any, now: float) -> tuple[list[Any], list[Any]]:
        step = self.core.step(event, now)
        return list(step.rows), list(step.commands)

    def plan(self, now: float) -> list[Any]:
        return [command for due in Due for command in self.step(due, now)[1]]

    def reported(self, *reports: Report) -> Reported:
        return Reported(JOB, reports)

    def report(self, now: float, *reports: Report) -> None:
        self.step(self.reported(*reports), now)

    @property
    def members(self) -> list[int]:
        job, _ = self.core.state.running[JOB]
        return [member.trial.number for member in self.core.state.trials.present(job).members]
