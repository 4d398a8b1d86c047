"""What a plan looks at where thousands of trials wait."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shoal.algorithms.grid import Grid
from shoal.core.array import FusionKey
from shoal.core.command import StartJob
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import DeviceError
from shoal.core.event import Ended, Outcome, Reported
from shoal.core.request import Request
from shoal.core.rows import TrialRow
from shoal.core.space import Space, grid
from shoal.core.trial import Report, Trial, TrialState
from shoal.host.fleet import Fleet
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.history import History
from shoal.plan.packing import NoPacking
from shoal.plan.partition import MAX_ARRAYS
from shoal.plan.schedule.base import JobState, JobView, Plan
from shoal.plan.schedule.knapsack import Fifo
from shoal.spec import StudySpec
from shoal.study.core import StudyCore
from shoal.study.devices import DeviceTracker
from shoal.study.event import Due
from shoal.study.planning import BEHIND, CLASSES_PER_DEVICE, HORIZON
from shoal.study.preview import preview
from shoal.study.state import CoreConfig

SLOT = Cluster((Node("node", 16.0, (Device("cpu:0", "cpu", 100, 4),)),))
PROGRAM = FusionKey("program", "", 1, opaque=True)


class Counting(Fifo):
    """Counts the waiting jobs that each plan is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[int] = []

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        self.shown.append(sum(job.state is JobState.WAITING for job in jobs))
        return super().plan(jobs, cluster, now)


class Study:
    """The state machine of a study of trials with known keys on one slot; `memory` says what each key takes."""

    def __init__(self, trials: int, key: Callable[[Trial], FusionKey], memory: Callable[[int], int]) -> None:
        algorithm, history, self.policy = Grid(1), History(""), Counting()
        values = [float(number) for number in range(trials)]
        algorithm.bind(Space({"x": grid(values)}), metric="loss", mode="min", seed=0, data_seed=0)
        for number in range(trials):
            known = key(Trial(number, {"x": float(number)}, 0, 0))
            profile = Profile({1: 1.0}, 10, 0, 0, memory(number), 1.0, 1.0)
            history.put(known.structure, known.data, known.batch_size, "cpu", profile)
        devices = DeviceTracker(Fleet(SLOT), lambda names: SLOT, None, Path("study"))
        self.core = StudyCore(
            CoreConfig(
                Path("study"), StudySpec(metric="loss", mode="min"), {}, algorithm, self.policy, history, devices,
                packer=ArrayPacker(NoPacking()), key=key,
            )
        )  # fmt: skip
        self.asked = 0
        self.core.step(Due.PROPOSE, 0.0)

    def plan(self, now: float) -> tuple[list[int], dict[int, str]]:
        """The trials that start, and the changed reasons of the others."""
        step = self.core.step(Due.PLAN, now)
        begun = [m.trial.number for x in step.commands if isinstance(x, StartJob) for m in x.job.members]
        return begun, {x.number: x.reason for x in step.rows if isinstance(x, TrialRow) and x.reason}

    def ask(self, verb: str, *trials: int) -> None:
        """Let a person ask for something."""
        self.asked += 1
        self.core.step(Request(f"{self.asked}", verb, trials=trials), 0.0)

    def end(self, now: float) -> None:
        """End the running job, whose trial has trained its epoch."""
        ((job, _),) = self.core.state.running.values()
        (member,) = job.members
        report = Report(member.trial.number, 1, {"loss": 1.0}, 1.0, TrialState.PAUSED)
        self.core.step(Reported(job.id, (report,)), now)
        self.core.step(Ended(job.id, Outcome.FINISHED), now)


def test_of_a_thousand_programs_a_plan_is_shown_the_first() -> None:
    study = Study(1000, lambda trial: PROGRAM, lambda number: 60)
    begun, reasons = study.plan(0.0)
    assert begun == [0]
    most = MAX_ARRAYS
    assert study.policy.shown == [most]
    assert reasons == {
        **dict.fromkeys(range(1, most), "waits for a free device: cpu:0 is busy"),
        **dict.fromkeys(range(most, 1000), BEHIND),
    }
    study.end(1.0)
    begun, reasons = study.plan(1.0)
    assert (begun, study.policy.shown) == ([1], [most, most])
    assert reasons == {most: "waits for a free device: cpu:0 is busy"}, "the others wait as before"


def own_key(trial: Trial) -> FusionKey:
    return FusionKey(f"net {trial.config['x']:g}", "", 32)


def test_of_many_structures_a_plan_looks_at_the_first_and_at_more_while_a_device_is_idle() -> None:
    """Only the last of them fits."""
    trials = 3 * HORIZON
    study = Study(trials, own_key, lambda number: 60 if number == trials - 1 else 101)
    begun, _ = study.plan(0.0)
    idle = CLASSES_PER_DEVICE
    assert study.policy.shown == [HORIZON + idle, 2 * HORIZON + idle, trials]
    assert begun == [trials - 1]
    study.plan(1.0)
    assert study.policy.shown[-1] == HORIZON, "no device is idle"


def test_trials_behind_those_that_fit_nowhere_are_no_reason_of_their_own() -> None:
    study = Study(1000, lambda trial: PROGRAM, lambda number: 101)
    with pytest.raises(DeviceError, match=r"^1000 trials can never start: can never run here: needs 0 MB"):
        study.plan(0.0)


def test_reasons_of_trials_behind_do_not_outlast_their_cause() -> None:
    study = Study(200, lambda trial: PROGRAM, lambda number: 60)
    study.plan(0.0)
    study.ask("pause study")
    study.end(1.0)
    assert set(study.plan(1.0)[1].values()) == {"the study is paused by a user"}
    study.ask("resume study")
    begun, reasons = study.plan(2.0)
    behind = {*range(MAX_ARRAYS + 1, 200)}
    assert (begun, {number for number, why in reasons.items() if why == BEHIND}) == ([1], behind)
    study.ask("pause", 199)
    study.plan(3.0)
    assert study.core.state.trials[199].reason.startswith("paused by ")
    study.ask("resume", 199)
    study.plan(4.0)
    assert study.core.state.trials[199].reason == BEHIND


def test_a_preview_has_a_reason_for_every_trial_that_fits_nowhere() -> None:
    key = FusionKey("net", "", 32)
    study = Study(100, lambda trial: key, lambda number: 101)
    study.core.state.trials.set_keys(dict.fromkeys(range(100), key))
    found = preview(study.core.state)
    assert (found.trials, [(len(each.trials), each.reason.partition(":")[0]) for each in found.failed]) == (
        0,
        [(100, "can never run here")],
    )
