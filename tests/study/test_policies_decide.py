"""Policies that take turns decide as their papers say, by the losses in the journal; on a virtual clock."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from test_engine import MAKERS, Killed, Stage, backend
from turns import Decision, check_lengths, check_losses, check_rule, convergence, middle, stretches

from shoal.algorithms.grid import Grid
from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.core.event import TurnStats
from shoal.core.space import Space, grid
from shoal.core.trial import Report, Trial, TrialState
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal
from shoal.plan.packing import NoPacking
from shoal.plan.schedule.base import Policy
from shoal.plan.schedule.convergence import Convergence
from shoal.plan.schedule.registry import POLICIES
from shoal.plan.schedule.time_sharing import TimeSharing
from shoal.run.base import Event, WorkerContext
from shoal.run.virtual import Virtual
from shoal.spec import StudySpec

QUANTUM, EPOCHS = 0.1, 30
TAKE_TURNS = sorted(name for name, kind in POLICIES.items() if issubclass(kind, TimeSharing))


class Falling:
    """Trials of a job each, whose losses fall at different speeds; an epoch takes 0.022 s."""

    def key(self, trial: Trial) -> FusionKey:
        return FusionKey(f"net {trial.number}", "data", 32)

    def profile(self, key: FusionKey, kind: str) -> Profile:
        return Profile({1: 0.002}, 10, 1, base_memory=0, member_memory=1, compute=1.0, cores=1.0)

    def report(self, trial: Trial, epoch: int) -> Report:
        return Report(trial.number, epoch, {"loss": trial.config["rate"] ** (epoch - 1)})

    def error(self, trial: Trial, epoch: int) -> str:
        return ""

    def losses(self, trial: Trial, epoch: int) -> Sequence[float]:
        return [self.report(trial, epoch).metrics["loss"]]

    def start_seconds(self, job: object) -> float:
        return 0.01


class Watched(Virtual):
    """Kills the engine when there is something in the journal.

    Args:
        directory: of the study.
        die: whether to.
        checkpoints: what an earlier back end has saved.
        now: time at which that ended.
    """

    def __init__(
        self, directory: Path, die: Callable[[JournalView], bool], checkpoints: dict[int, int], now: float
    ) -> None:
        super().__init__(WorkerContext(directory, b"", checkpoint_seconds=0.0), Falling(), checkpoints, now)
        self.directory, self.die = directory, die

    def poll(self, timeout: float) -> list[Event]:
        with JournalView.read(self.directory) as journal:
            if self.die(journal):
                raise Killed
        return super().poll(timeout)


def never(journal: JournalView) -> bool:
    return False


def run(
    directory: Path,
    policy: Policy,
    die: Callable[[JournalView], bool] = never,
    checkpoints: dict[int, int] | None = None,
    now: float = 0.0,
) -> Watched:
    """Run three trials on one device, with what an earlier engine has left."""
    stage = Stage(directory, lambda: Grid(EPOCHS), Space({"rate": grid([0.9, 0.5, 0.99])}))
    carrier = Watched(directory, die, {} if checkpoints is None else checkpoints, now)
    if not directory.exists():
        study = StudySpec(metric="loss", mode="min", space=stage.space.to_json())
        journal = Journal.create(directory, study, task=b"", algorithm=b"", clock=carrier.clock)
    else:
        journal = Journal.open(directory, clock=carrier.clock)
    with closing(journal):
        engine = stage.engine(journal, carrier, policy, clock=carrier.clock, fuse=False, packing=NoPacking())
        engine.begin()
        engine.run()
    return carrier


def hermes_turn(turns: Sequence[TurnStats], suspensions: int) -> float:
    """Seconds of the next turn of a job: longer with each quarter by which its loss has fallen, and each suspension."""
    losses = list(map(middle, turns))
    fall = losses[0] - min(losses) if losses else 0.0
    quarters = sum(fall >= part * abs(losses[0]) > 0 for part in (0.25, 0.5, 0.75)) if losses else 0
    return QUANTUM * (1 + quarters + 0.1 * suspensions)


@pytest.mark.parametrize("name", TAKE_TURNS)
def test_who_runs_follows_from_the_recorded_losses(name: str, tmp_path: Path) -> None:
    run(tmp_path / "study", POLICIES[name](quantum=QUANTUM))
    with JournalView.read(tmp_path / "study") as journal:
        assert [(row.state, row.epoch) for row in journal.trials()] == [(TrialState.COMPLETE, EPOCHS)] * 3
    found = stretches(tmp_path / "study")
    suspensions = sum(stretch.suspended for stretch in found)
    assert suspensions >= 2
    if name == "convergence":
        assert check_rule(found, convergence) >= suspensions
    check_lengths(found, hermes_turn if name == "convergence" else lambda turns, count: QUANTUM)
    check_losses(tmp_path / "study", found)


def test_suspended_jobs_and_their_losses_survive_a_kill_of_the_engine(tmp_path: Path) -> None:
    """After it the job with the highest recorded convergence runs, not the oldest."""
    directory, checkpoints = tmp_path / "study", dict[int, int]()

    def third_job_had_a_turn(journal: JournalView) -> bool:
        return len(journal.quanta()) == 3

    with pytest.raises(Killed):
        run(directory, Convergence(quantum=QUANTUM), third_job_had_a_turn, checkpoints)
    before = stretches(directory)
    run(directory, Convergence(quantum=QUANTUM), checkpoints=checkpoints, now=1000.0)
    with JournalView.read(directory) as journal:
        assert [(row.state, row.epoch) for row in journal.trials()] == [(TrialState.COMPLETE, EPOCHS)] * 3
    found = stretches(directory)
    turns = {
        stretch.trials: [turn.losses for each in before if each.trials == stretch.trials for turn in each.turns]
        for stretch in before
    }
    first = found[len(before)]
    waited = dict.fromkeys(turns, 0.0)
    assert first.trials in Decision(first.trials, first.trials, turns, waited).best(convergence)
    suspended = {stretch.job.id for stretch in before if stretch.suspended}
    resumed = {stretch.job.resumes for stretch in found} - {""}
    assert suspended
    assert suspended <= resumed
    for trials in turns:
        numbers = [turn.number for stretch in found if stretch.trials == trials for turn in stretch.turns]
        assert numbers == [*range(len(numbers))]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", POLICIES)
def test_under_every_policy_a_search_is_the_search_under_fifo(name: str, tmp_path: Path) -> None:
    kind = POLICIES[name]
    undisturbed = Stage(tmp_path / "undisturbed", MAKERS["hyperband"], slots=2)
    undisturbed.run(backend())
    stage = Stage(tmp_path / "study", MAKERS["hyperband"], slots=2)
    stage.run(backend(), kind(quantum=0.001) if issubclass(kind, TimeSharing) else kind())
    assert stage.outcome() == undisturbed.outcome()
