"""People intervene in a study that runs: scripted, on one device."""

import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_engine import (
    MAKERS,
    Killed,
    Refuse,
    Rigid,
    Scripted,
    Stage,
    backend,
    failing,
    four,
    nothing,
    run_with_kills,
    side_by_side,
    walk_with_kills,
)
from test_engine_suspending import Restless
from typer.testing import CliRunner

from shoal.algorithms.asha import ASHA
from shoal.cli.app import app
from shoal.core.device import Cluster
from shoal.core.errors import DeviceError, PolicyError, ShoalError
from shoal.core.job import JobUpdate, Purpose
from shoal.core.rows import Intervention, JobRow, Proposal, Row, StudyValue, TrialRow
from shoal.core.trial import Origin, TrialState
from shoal.journal.requests import current_user, pending_requests, write_request
from shoal.journal.view import JournalView
from shoal.look.snapshot import snapshot
from shoal.look.text import intervention_text
from shoal.plan.schedule.base import JobView, Plan
from shoal.plan.schedule.knapsack import Fifo
from shoal.results import Study
from shoal.run.base import Event, MembersLeft, Outcome
from shoal.study.interventions import STUDY_PAUSED
from shoal.train.checkpoint_paths import checkpoint_directory, checkpoint_files

Then = tuple[Callable[[Sequence[TrialRow]], bool], Callable[[Study], object]]
"""When something is to be asked, by the trials as they are then; and what."""

PAUSED = f"paused by {current_user()}"


@dataclass
class Asking(Scripted):
    """A back end during whose polls people ask for something; members that leave a job say so.

    Args:
        directory: of the study.
        asks: what they ask, in turn.
    """

    directory: Path = Path()
    asks: list[Then] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def poll(self, timeout: float) -> list[Event]:
        study = Study(self.directory)
        rows = study.trials
        self.seen += [row.reason for row in rows if row.reason and row.reason not in self.seen]
        if self.asks and self.asks[0][0](rows):
            self.asks.pop(0)[1](study)
        return super().poll(timeout)

    def change(self, job: str, change: JobUpdate) -> None:
        super().change(job, change)
        if change.leave and self._events[job]:
            self._events[job].insert(0, MembersLeft(job, change.leave))


def asking(stage: Stage, *asks: Then, make: type[Asking] = Asking) -> Asking:
    return make(side_by_side, at_once=False, on_start=nothing, directory=stage.directory, asks=list(asks))


def reached(number: int, epoch: int) -> Callable[[Sequence[TrialRow]], bool]:
    return lambda rows: any(row.number == number and row.epoch >= epoch for row in rows)


def nothing_runs(rows: Sequence[TrialRow]) -> bool:
    return TrialState.RUNNING not in {row.state for row in rows}


def complete(count: int) -> Callable[[Sequence[TrialRow]], bool]:
    return lambda rows: [row.state for row in rows].count(TrialState.COMPLETE) == count


def at_once(rows: Sequence[TrialRow]) -> bool:
    return bool(rows)


def die(study: Study) -> None:
    raise Killed


def noted(stage: Stage) -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Verb, trials and refusals of all that was asked for."""
    with JournalView.read(stage.directory) as journal:
        return [(each.verb, each.trials, each.refused) for each in journal.interventions()]


def undisturbed(tmp_path: Path, make: Callable[[Path], Stage]) -> list[tuple[object, ...]]:
    stage = make(tmp_path / "undisturbed")
    stage.run(backend(side_by_side))
    return stage.outcome()


@pytest.mark.parametrize("numbers", [[2], [1, 3], [0, 1, 2, 3]], ids=["one", "two", "all of a job"])
def test_a_trial_that_is_paused_leaves_its_job_and_goes_on_where_it_was(numbers: list[int], tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    carrier = asking(
        stage,
        (reached(2, 1), lambda study: study.pause(numbers)),
        (nothing_runs, lambda study: study.resume(numbers)),
    )
    stage.run(carrier)
    assert stage.outcome() == undisturbed(tmp_path, four)
    assert PAUSED in carrier.seen
    first, *later = carrier.trained()
    assert [member.trial.number for member in first] == [0, 1, 2, 3]
    assert {(m.trial.number, m.start) for job in later for m in job} == {(number, 1) for number in numbers}
    left = [change.leave for _, change in carrier.changes if change.leave]
    ends = [outcome for purpose, outcome in stage.jobs() if purpose == "train"]
    whole = len(numbers) == 4
    assert (left, ends) == ([] if whole else [frozenset(numbers)], ["stopped" if whole else "finished", "finished"])
    assert noted(stage) == [("pause", tuple(numbers), ()), ("resume", tuple(numbers), ())]
    assert not list((stage.directory / "requests").iterdir())


def test_a_paused_trial_survives_a_kill_and_waits_in_the_next_run(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    with pytest.raises(Killed):
        stage.run(asking(stage, (reached(3, 1), lambda study: study.pause([2])), (nothing_runs, die)))
    assert stage.outcome()[2][2:4] == (TrialState.PENDING, 1)
    with pytest.raises(Killed):
        stage.run(asking(stage, (lambda rows: rows[2].reason == PAUSED and nothing_runs(rows), die)))
    carrier = asking(stage, (nothing_runs, lambda study: study.resume([2])))
    stage.run(carrier)
    assert stage.outcome() == undisturbed(tmp_path, four)
    assert [[m.trial.number for m in job] for job in carrier.trained()] == [[2]]


def test_a_back_end_that_cannot_change_jobs_stops_the_one_of_a_paused_trial(tmp_path: Path) -> None:
    class Stiff(Asking, Rigid):
        """Both."""

        change = Rigid.change

    stage = four(tmp_path / "study")
    carrier = asking(
        stage,
        (reached(3, 1), lambda study: study.pause([2])),
        (complete(3), lambda study: study.resume([2])),
        make=Stiff,
    )
    stage.run(carrier)
    assert stage.outcome() == undisturbed(tmp_path, four)
    assert [outcome for _, outcome in stage.jobs()].count("stopped") == 1


def test_trials_of_a_rung_wait_for_one_that_is_paused_and_its_reason_says_so(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study")
    carrier = asking(
        stage,
        (lambda rows: TrialState.RUNNING in {row.state for row in rows}, lambda study: study.pause([4])),
        (nothing_runs, lambda study: study.resume([4])),
    )
    stage.run(carrier)
    assert stage.outcome() == undisturbed(tmp_path, Stage)
    assert f"{PAUSED}, which keeps 8 trials waiting at epoch 1" in carrier.seen


def test_a_trial_that_is_resumed_before_it_has_left_waits_for_that(tmp_path: Path) -> None:
    """Nobody trains it twice at a time."""
    stage = four(tmp_path / "study")
    both: list[object] = []

    def pause_and_resume(study: Study) -> None:
        both.extend([study.pause([2]), study.resume([2])])

    carrier = asking(stage, (reached(3, 1), pause_and_resume))
    stage.run(carrier)
    assert both == [[2], [2]]
    assert stage.outcome() == undisturbed(tmp_path, four)
    trained = [(m.trial.number, m.start) for job in carrier.trained() for m in job]
    joined = [(m.trial.number, m.start) for _, change in carrier.changes for a in change.join for m in a.members]
    assert sorted(trained + joined) == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0)]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Intervention, TrialRow, JobRow])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [MAKERS["hyperband"], MAKERS["asha"]], ids=["hyperband", "asha"])
def test_a_kill_while_trials_are_paused_and_resumed_changes_nothing(
    make: Callable[[], Any], kind: type[Row], when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path / "study", make)
    asks: list[Then] = [
        (reached(1, 1), lambda study: study.pause([0, 2])),
        (lambda rows: TrialState.RUNNING not in {rows[0].state, rows[2].state}, lambda study: study.resume([0, 2])),
    ]

    def run() -> None:
        stage.run(Asking(side_by_side, at_once=False, on_start=nothing, directory=stage.directory, asks=asks))

    assert run_with_kills(kind, when, run, monkeypatch)
    assert not asks
    assert stage.outcome() == undisturbed(tmp_path, lambda place: Stage(place, make))
    assert [verb for verb, _, _ in noted(stage)] == ["pause", "resume"], "each is done once"


def test_two_people_at_once_are_both_noted_in_order_and_what_makes_no_sense_is_refused_there(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")

    def two(study: Study) -> None:
        for trials in ([1, 2], [2, 9]):
            write_request(study.directory, "pause", trials=trials)
        write_request(study.directory, "resume", trials=[1, 2, 3])

    stage.run(asking(stage, (at_once, two)))
    assert noted(stage) == [
        ("pause", (1, 2), ()),
        ("pause", (), ("trial 2 is paused already", "there is no trial 9")),
        ("resume", (1, 2), ("trial 3 is not paused",)),
    ]
    write_request(stage.directory, "pause", trials=[0])
    stage.run(backend())
    assert noted(stage)[-1] == ("pause", (), ("trial 0 is over, complete",))
    assert stage.outcome() == undisturbed(tmp_path, four)


@pytest.fixture(scope="module")
def half_way_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stage = four(tmp_path_factory.mktemp("half way") / "study")
    with pytest.raises(Killed):
        stage.run(asking(stage, (reached(3, 1), die)))
    return stage.directory


@pytest.fixture
def half_way(half_way_once: Path, tmp_path: Path) -> Stage:
    """A study that was killed when its four trials had one epoch."""
    return four(shutil.copytree(half_way_once, tmp_path / "study"))


def test_what_is_asked_while_nobody_runs_the_study_is_done_when_it_goes_on(half_way: Stage, tmp_path: Path) -> None:
    study = Study(half_way.directory)
    assert study.pause([1, 2, 2]) == [1, 2]
    with pytest.raises(ShoalError, match=r"trial 1 of the study in .* is paused already"):
        study.pause([1])
    study.resume([1])
    said = " ".join(CliRunner().invoke(app, ["status", str(half_way.directory)]).output.split())
    assert "shoal: to be done: pause trials 1, 2 shoal: to be done: resume trial 1" in said
    carrier = asking(half_way, (complete(3), lambda study: study.resume([2])))
    half_way.run(carrier)
    assert [[m.trial.number for m in job] for job in carrier.trained()] == [[0, 1, 3], [2]]
    assert half_way.outcome() == undisturbed(tmp_path, four)


def test_what_only_a_newer_version_knows_is_refused_and_the_study_goes_on(half_way: Stage, tmp_path: Path) -> None:
    write_request(half_way.directory, "turn", trials=[0])  # type: ignore[arg-type]
    half_way.run(backend())
    ((verb, trials, (why,)),) = noted(half_way)
    assert (verb, trials) == ("turn", ())
    assert why.startswith("the version of shoal that runs the study does not know this request")
    assert half_way.outcome() == undisturbed(tmp_path, four)


def test_trials_that_can_never_start_end_a_study_with_their_reason_and_not_that_of_paused_ones(half_way: Stage) -> None:
    Study(half_way.directory).pause([0, 1, 2])
    with pytest.raises(DeviceError, match="1 trials can never start: it is not a good day"):
        half_way.run(backend(), Refuse())


@pytest.mark.parametrize(
    ("verb", "numbers", "words"),
    [
        ("pause", [], "no trial of the study in .* is named; name at least one"),
        ("pause", [9], "has no trial 9; its trials are 0-3"),
        ("pause", [0, -1], "has no trial -1"),
        ("resume", [0], "trial 0 of the study in .* is not paused"),
        ("resume", [7], "has no trial 7"),
        ("stop", [7], "has no trial 7"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(verb: str, numbers: list[int], words: str, half_way: Stage) -> None:
    with pytest.raises(ShoalError, match=words):
        getattr(Study(half_way.directory), verb)(numbers)
    assert not (half_way.directory / "requests").exists()


def test_a_trial_that_is_over_is_neither_paused_nor_resumed_nor_stopped(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    stage.run(backend())
    for verb in ("pause", "resume", "stop"):
        with pytest.raises(ShoalError, match=r"trial 1 of the study in .* is over: it is complete"):
            getattr(Study(stage.directory), verb)([1])


def test_interventions_are_kept_with_their_time(half_way: Stage) -> None:
    write_request(half_way.directory, "resume", trials=[0])
    half_way.run(backend())
    with closing(half_way.open()) as journal:
        (only,) = journal.interventions()
        assert only == Intervention(
            only.request, "resume", refused=("trial 0 is not paused",), time=only.time, seq=only.seq
        )
        assert [job.purpose for job in journal.jobs()].count(Purpose.TRAIN) == 2


def stopped_as(stage: Stage, *numbers: int) -> set[tuple[TrialState, str]]:
    with closing(stage.open()) as journal:
        return {(row.state, row.reason) for row in journal.trials() if row.number in numbers}


STOPPING = {name: MAKERS[name] for name in ("hyperband", "asha", "asha, stopping", "median", "optuna")}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("make", STOPPING.values(), ids=STOPPING)
@pytest.mark.parametrize("epoch", [0, 1], ids=["new", "has reported"])
def test_a_trial_that_is_stopped_is_over_and_its_algorithm_goes_on(
    make: Callable[[], Any], epoch: int, tmp_path: Path
) -> None:
    stage = Stage(tmp_path / "study", make)
    carrier = asking(stage, (reached(0, epoch), lambda study: study.stop([2])))
    stage.run(carrier)
    assert stopped_as(stage, 2) == {(TrialState.STOPPED, "stopped by a user")}
    assert all(row[2].final for row in stage.outcome())
    before = stage.outcome()
    stage.run(backend())  # a replay proposes what was proposed
    assert stage.outcome() == before
    assert noted(stage) == [("stop", (2,), ())]


def test_a_stopped_trial_leaves_its_job_and_what_it_reported_counts(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    carrier = asking(stage, (reached(2, 1), lambda study: study.stop([0])))
    stage.run(carrier)
    assert [change.leave for _, change in carrier.changes] == [frozenset({0})]
    assert [row[2:4] for row in stage.outcome()] == [(TrialState.STOPPED, 1)] + [(TrialState.COMPLETE, 2)] * 3
    assert {row[0]: row[4] for row in stage.outcome()}[0] == {"loss": 1.0}
    assert Study(stage.directory).best_trial.number == 0


def test_a_paused_trial_may_be_stopped_and_a_rung_does_not_wait_for_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study")
    stage.run(
        asking(
            stage,
            (lambda rows: TrialState.RUNNING in {row.state for row in rows}, lambda study: study.pause([1, 2])),
            (lambda rows: any("waiting at epoch" in row.reason for row in rows), lambda study: study.stop([1, 2])),
        )
    )
    assert stopped_as(stage, 1, 2) == {(TrialState.STOPPED, "stopped by a user")}
    assert [row[2] for row in stage.outcome()].count(TrialState.COMPLETE) == 1


@pytest.mark.parametrize("make", [MAKERS["hyperband"], MAKERS["asha"]], ids=["hyperband", "asha"])
def test_a_trial_stopped_at_the_end_of_its_budget_is_not_trained_when_its_algorithm_chooses_it(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    """All of the first rung are stopped that have reached its end, so whoever is chosen next is one of them."""

    def stop_all(study: Study) -> None:
        study.stop([row.number for row in study.trials if row.state is TrialState.PAUSED])

    stage = Stage(tmp_path / "study", make)
    carrier = asking(stage, (lambda rows: [row.state for row in rows].count(TrialState.PAUSED) == 2, stop_all))
    stage.run(carrier)
    ((_, numbers, _),) = noted(stage)
    assert len(numbers) >= 2
    assert [row[2:4] for row in stage.outcome() if row[0] in numbers] == [(TrialState.STOPPED, 1)] * len(numbers)
    assert all(row[2].final for row in stage.outcome())
    before = stage.outcome()
    stage.run(backend())
    assert stage.outcome() == before


def test_an_algorithm_that_chooses_only_stopped_trials_is_asked_again_at_once(tmp_path: Path) -> None:
    """Nothing runs then, and nothing waits."""

    def stop_all(study: Study) -> None:
        running = TrialState.RUNNING
        study.stop([row.number for row in study.trials if not row.state.final and row.state is not running])

    stage = Stage(tmp_path / "study", lambda: ASHA(4, 4, eta=2, concurrency=1))
    stage.run(asking(stage, (lambda rows: [row.state for row in rows].count(TrialState.PAUSED) == 3, stop_all)))
    assert all(row[2].final for row in stage.outcome())
    assert len(stage.outcome()) == 4


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Intervention, TrialRow, Proposal])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_while_trials_are_stopped_changes_nothing(
    kind: type[Row], when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [Stage(tmp_path / name, MAKERS["hyperband"]) for name in ("undisturbed", "study")]
    for stage in stages:
        with pytest.raises(Killed):
            stage.run(asking(stage, (reached(1, 1), die)))
        Study(stage.directory).stop([1, 4])
    stages[0].run(backend())
    assert run_with_kills(kind, when, lambda: stages[1].run(backend()), monkeypatch)
    assert stages[1].outcome() == stages[0].outcome()
    assert noted(stages[1]) == [("stop", (1, 4), ())]


@dataclass(frozen=True)
class Counts(Fifo):
    """Counts how often it is asked."""

    plans: list[float] = field(default_factory=list)

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        self.plans.append(now)
        return super().plan(jobs, cluster, now)


def test_another_policy_decides_from_the_next_plan_on(tmp_path: Path) -> None:
    stage, before = Stage(tmp_path / "study"), Counts()
    at: list[int] = []

    def change(study: Study) -> None:
        study.policy("wfd")
        at.append(len(before.plans))

    stage.run(asking(stage, (reached(0, 1), change)), before)
    assert at == [len(before.plans)] > [0]
    assert stage.outcome() == undisturbed(tmp_path, Stage)
    with closing(stage.open()) as journal:
        assert journal.policy == "wfd"
        assert intervention_text(journal.interventions()[0]).endswith(" policy wfd")


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", ["fifo", "convergence", "water_filling", "wfd"])
def test_jobs_that_one_policy_suspended_go_on_under_another(name: str, tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study")

    def suspended(rows: Sequence[TrialRow]) -> bool:
        with JournalView.read(stage.directory) as journal:
            return "suspended" in {job.outcome for job in journal.jobs()}

    stage.run(asking(stage, (suspended, lambda study: study.policy(name))), Restless())
    assert stage.outcome() == undisturbed(tmp_path, Stage)


def test_a_policy_that_is_unknown_is_refused_before_anything_is_sent_and_by_the_study(
    half_way: Stage, tmp_path: Path
) -> None:
    with pytest.raises(
        PolicyError, match=r"there is no policy 'wdf' \(did you mean 'wf'\?\).* or one of auto, convergence"
    ):
        Study(half_way.directory).policy("wdf")
    assert not (half_way.directory / "requests").exists()
    write_request(half_way.directory, "policy", arguments={"policy": "wdf"})
    half_way.run(backend())
    ((_, _, (why,)),) = noted(half_way)
    assert why.startswith("there is no policy 'wdf'")
    assert half_way.outcome() == undisturbed(tmp_path, four)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("trial pause DIR 1 2", 0, "trials 1, 2 will be paused when the study is resumed: shoal resume"),
        ("trial pause DIR 9", 1, "has no trial 9"),
        ("trial pause DIR", 2, "Missing argument 'N...'"),
        ("trial resume DIR 1", 1, "trial 1 .* is not paused"),
        ("trial stop DIR 3", 0, "trial 3 will be stopped when the study is resumed"),
        ("trial add DIR --set x=2.0 --epochs 3", 0, "trial 1000000 with x=2 will be added when the study is resumed"),
        ("trial add DIR --set x=2. --epochs 3", 0, "trial 1000000 with x=2 will be added when the study is resumed"),
        ("trial add DIR --set x=+.5e1 --epochs 3", 1, "`x` is 5.0, and the space has choice"),
        ("trial add DIR --set x=5 --epochs 3", 1, "`x` is 5, and the space has choice"),
        ("trial add DIR --set x=5 --epochs 3 --outside", 0, "trial 1000000 with x=5 will be added when"),
        ("trial add DIR --set x --epochs 3", 2, "'x' is not NAME=VALUE, such as lr=0.01"),
        ("trial clone DIR 1 --set x=4.0 --anew", 0, "trial 1000000, a clone of trial 1 with x=4, will be added when"),
        ("trial clone DIR 1", 1, "no checkpoint of the end of an epoch now"),
        ("study pause DIR", 0, "the study will be paused when the study is resumed: shoal resume"),
        ("study resume DIR", 1, "the study in .* is not paused"),
        ("study end DIR", 0, "the study will end when the study is resumed"),
        ("policy DIR fifo", 0, "policy fifo will be followed when the study is resumed"),
        ("policy DIR lifo", 2, "'lifo' is not one of auto, convergence"),
    ],
)
def test_what_the_commands_say(arguments: str, status: int, words: str, half_way: Stage) -> None:
    given = [str(half_way.directory) if word == "DIR" else word for word in arguments.split()]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == status
    said = " ".join((done.output or str(done.exception)).replace("│", " ").split())
    assert re.search(words, said)
    assert len(pending_requests(half_way.directory)) == (status == 0)


ADDED = 1_000_000


def rows_of(stage: Stage) -> dict[int, TrialRow]:
    return {row.number: row for row in Study(stage.directory).trials}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("make", [MAKERS["hyperband"], MAKERS["asha"], MAKERS["optuna"]], ids=["sha", "asha", "optuna"])
def test_an_added_trial_is_trained_and_counts_and_the_algorithm_goes_on_without_it(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    def place(directory: Path) -> Stage:
        return Stage(directory, make)

    stage = place(tmp_path / "study")
    stage.run(asking(stage, (reached(0, 1), lambda study: study.add({"x": 1e-6}, 4))))
    mine = rows_of(stage)[ADDED]
    assert (mine.state, mine.epoch, mine.target, mine.config) == (TrialState.COMPLETE, 4, 4, {"x": 1e-6})
    assert mine.reason == "added by a user, and has reached its budget"
    others = [row for row in stage.outcome() if row[0] != ADDED]
    alone = undisturbed(tmp_path, place)
    if make is not MAKERS["asha"]:  # whose decisions depend on who is first
        assert others == alone
    assert Study(stage.directory).best_trial.number == ADDED
    assert Study(stage.directory).dataframe()["trial"].tolist()[-1] == ADDED
    before = stage.outcome()
    stage.run(backend())  # a replay proposes what was proposed
    assert stage.outcome() == before


def test_a_trial_is_added_to_a_study_that_has_ended_and_another_by_someone_else(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    stage.run(backend())
    study = Study(stage.directory)
    study.add({"x": 2.0}, 3)
    study.clone(3, {"x": 3.0}, anew=True)
    said = CliRunner().invoke(app, ["status", str(stage.directory)]).output
    assert "to be done: add trial with x=2 to epoch 3" in said
    assert "to be done: clone of trial 3 with x=3 to epoch 2" in said
    stage.run(backend())
    assert {number: (row.config["x"], row.epoch, row.trial.origin) for number, row in rows_of(stage).items()} == {
        **{number: (number + 1.0, 2, None) for number in range(4)},
        ADDED: (2.0, 3, None),
        ADDED + 1: (3.0, 2, None),
    }
    assert noted(stage) == [("add trial", (ADDED,), ()), ("clone", (ADDED + 1,), ())]
    seeds = {row.seed for row in rows_of(stage).values()}
    assert len(seeds) == 6
    assert snapshot(JournalView.read(study.directory), 0.0).finished


def saved(stage: Stage, number: int, *names: str) -> None:
    """As if a worker had written these checkpoints."""
    checkpoint_directory(stage.directory, number).mkdir(parents=True)
    for name in names:
        (checkpoint_directory(stage.directory, number) / name).write_bytes(b"what it has learnt")


def test_a_clone_goes_on_from_the_newest_end_of_an_epoch_that_is_saved(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    stage.run(backend())
    saved(stage, 1, "000001-000000-0badcafe.pt", "000002-000000-0badcafe.pt")
    study = Study(stage.directory)
    with pytest.raises(ShoalError, match=r"begins at epoch 2, where trial 1 stands, .* epoch 2; name a later one"):
        study.clone(1)
    assert study.clone(1, {"x": 4.0}, epochs=5) == [ADDED]
    carrier = backend()
    stage.run(carrier)
    row = rows_of(stage)[ADDED]
    assert (row.state, row.epoch, row.trial.origin) == (TrialState.COMPLETE, 5, Origin(1, 2))
    assert [(m.trial.number, m.start, m.target) for job in carrier.trained() for m in job] == [(ADDED, 2, 5)]
    assert [path.name for path in checkpoint_files(stage.directory, ADDED)] == ["000002-000000-0badcafe.pt"]
    with closing(stage.open()) as journal:
        (each,) = journal.interventions()
    assert intervention_text(each).endswith(f"clone {ADDED} of trial 1, from its weights at epoch 2")


def test_a_clone_whose_checkpoint_is_gone_fails_and_the_others_go_on(half_way: Stage, tmp_path: Path) -> None:
    saved(half_way, 0, "000001-000000-0badcafe.pt")
    Study(half_way.directory).clone(0)
    for path in checkpoint_files(half_way.directory, 0):
        path.unlink()
    half_way.run(backend())
    assert rows_of(half_way)[ADDED].state is TrialState.FAILED
    assert "whose checkpoint is gone" in rows_of(half_way)[ADDED].reason
    assert half_way.outcome()[:4] == undisturbed(tmp_path, four)


def test_weights_that_do_not_fit_a_clone_fail_it_and_not_the_study(half_way: Stage, tmp_path: Path) -> None:
    saved(half_way, 0, "000001-000000-0badcafe.pt")
    Study(half_way.directory).clone(0, {"x": 99.0}, outside=True)
    half_way.run(backend(failing(ADDED, outcome=Outcome.UNUSABLE)))
    assert (rows_of(half_way)[ADDED].state, rows_of(half_way)[ADDED].failures) == (TrialState.FAILED, 3)
    assert half_way.outcome()[:4] == undisturbed(tmp_path, four)


def test_a_value_outside_its_domain_is_noted_and_shown_everywhere(half_way: Stage) -> None:
    Study(half_way.directory).add({"x": 9.5, "y": "new"}, 2, outside=True)
    half_way.run(backend())
    with closing(half_way.open()) as journal:
        (each,) = journal.interventions()
    assert (
        each.text
        == "outside the space: `y` is not in the space; `x` is 9.5, and the space has choice([1.0, 2.0, 3.0, 4.0])"
    )
    study = Study(half_way.directory)
    assert study.grid().cells
    assert study.dataframe()["config.x"].tolist()[-1] == 9.5
    theirs = study.to_optuna().trials[-1]
    assert (theirs.params, theirs.user_attrs["config"]) == ({}, {"x": 9.5, "y": "new"})
    for command in ("status", "trials", "report"):
        assert CliRunner().invoke(app, [command, str(half_way.directory)]).exit_code == 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Intervention, TrialRow])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_while_trials_are_added_changes_nothing(
    kind: type[Row], when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [Stage(tmp_path / name, MAKERS["hyperband"]) for name in ("undisturbed", "study")]
    for stage in stages:
        with pytest.raises(Killed):
            stage.run(asking(stage, (reached(1, 1), die)))
        study = Study(stage.directory)
        study.add({"x": 0.25}, 3)
        study.clone(2, {"x": 0.5}, epochs=2, anew=True)
    stages[0].run(backend())
    assert run_with_kills(kind, when, lambda: stages[1].run(backend()), monkeypatch)
    assert stages[1].outcome() == stages[0].outcome()
    assert [row[0] for row in stages[1].outcome()[-2:]] == [ADDED, ADDED + 1]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda study: study.add({"x": 9.0}, 2), r"`x` is 9.0, and the space has choice.*Correct it, or allow it"),
        (lambda study: study.add({}, 2), "`x` is missing"),
        (lambda study: study.add({"x": 1.0, "lr": 1}, 2), "`lr` is not in the space"),
        (lambda study: study.add({"x": 1.0}, 0), "`epochs` must be an integer of at least 1, got 0"),
        (
            lambda study: study.add({"x": {1.0}}, 2, outside=True),
            "`x`: a value must be None, bool, int, float or str, .* got {1.0} of type set",
        ),
        (lambda study: study.clone([1, 9], anew=True), "has no trial 9; its trials are 0-3"),
        (lambda study: study.clone(1, {"x": 7}), "`x` is 7, and the space has choice"),
        (lambda study: study.clone(1, {"x.y": 7}), "`x.y` cannot be changed, because `x` is 2.0 and holds no values"),
        (
            lambda study: study.clone(1),
            "no checkpoint of the end of an epoch now, it is interrupted at epoch 1; clone it",
        ),
    ],
)
def test_what_cannot_be_added_is_refused_in_words(ask: Callable[[Study], object], words: str, half_way: Stage) -> None:
    with pytest.raises(ShoalError, match=words):
        ask(Study(half_way.directory))
    assert not (half_way.directory / "requests").exists()


@pytest.mark.parametrize("verb", ["pause", "resume", "stop", "retry", "clone"])
@pytest.mark.parametrize(
    "numbers", [True, [0, False], 1.0, "1", [1, "2"], None, np.float64(1), np.array([1.5])], ids=repr
)
def test_what_names_no_trial_is_refused_in_words(verb: str, numbers: Any, half_way: Stage) -> None:
    if verb == "retry" and numbers is None:
        pytest.skip("all that have failed")
    with pytest.raises(ShoalError, match=r"name a trial by its number, such as 3, several as a list, \[3, 7\]; got "):
        getattr(Study(half_way.directory), verb)(numbers)
    assert not (half_way.directory / "requests").exists()


@pytest.mark.parametrize(
    ("numbers", "asked"),
    [(2, [2]), ([2], [2]), ((2, 1, 2), [1, 2]), (np.int64(2), [2]), (np.array(2), [2]), (np.array([2, 1]), [1, 2])],
    ids=repr,
)
def test_a_number_is_as_good_as_several(numbers: Any, asked: list[int], half_way: Stage) -> None:
    study = Study(half_way.directory)
    assert study.pause(numbers) == asked
    assert study.resume(numbers) == asked
    assert study.stop(numbers) == asked
    assert study.clone(numbers, {"x": 4.0}, anew=True) == list(range(ADDED, ADDED + len(asked)))


def test_the_number_of_an_added_trial_is_that_which_it_gets(half_way: Stage, tmp_path: Path) -> None:
    study = Study(half_way.directory)
    first = study.add({"x": 1.0}, 2)
    assert [first, *study.clone([0, 1], {"x": 4.0}, anew=True)] == [ADDED, ADDED + 1, ADDED + 2]
    half_way.run(backend())
    assert rows_of(half_way)[first].trial.config == {"x": 1.0}
    with closing(half_way.open()) as journal:
        numbers = [each.trials for each in journal.interventions()]
    assert numbers == [(ADDED,), (ADDED + 1,), (ADDED + 2,)]
    assert study.add({"x": 2.0}, 2) == ADDED + 3, "after those that are recorded"


def test_what_a_study_cannot_add_is_noted(half_way: Stage, tmp_path: Path) -> None:
    given = {"config": {"x": 9.0}, "epochs": 2, "origin": {"trial": 7, "epoch": 1}}
    write_request(half_way.directory, "clone", arguments=given)
    half_way.run(backend())
    ((_, numbers, refused),) = noted(half_way)
    assert numbers == ()
    assert refused == ("`x` is 9.0, and the space has choice([1.0, 2.0, 3.0, 4.0])", "there is no trial 7")
    assert half_way.outcome() == undisturbed(tmp_path, four)


def test_a_study_that_is_paused_frees_its_devices_and_goes_on(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    carrier = asking(
        stage,
        (reached(3, 1), lambda study: study.pause_study()),
        (lambda rows: rows[3].reason == STUDY_PAUSED and nothing_runs(rows), lambda study: study.resume_study()),
    )
    stage.run(carrier)
    assert not carrier.asks
    assert carrier.released == ["cpu:0"]
    assert [outcome for purpose, outcome in stage.jobs() if purpose == "train"] == ["stopped", "finished"]
    assert stage.outcome() == undisturbed(tmp_path, four)
    assert noted(stage) == [("pause study", (), ()), ("resume study", (), ())]


def test_kills_at_random_while_people_intervene_change_nothing(
    turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path / "study")
    asks: list[Then] = [
        (reached(1, 1), lambda study: study.policy("wfd")),
        (reached(2, 1), lambda study: study.pause([0, 4])),
        (nothing_runs, lambda study: study.pause_study()),
        (nothing_runs, lambda study: study.resume_study()),
        (nothing_runs, lambda study: study.resume([0, 4])),
    ]

    def run() -> None:
        stage.run(Asking(side_by_side, at_once=False, on_start=nothing, directory=stage.directory, asks=asks))

    assert walk_with_kills(turn, run, monkeypatch)
    assert not asks
    assert stage.outcome() == undisturbed(tmp_path, Stage)
    assert [verb for verb, _, _ in noted(stage)] == ["policy", "pause", "pause study", "resume study", "resume"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Intervention, StudyValue, JobRow])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_while_the_policy_changes_and_the_study_is_paused_and_resumed_changes_nothing(
    kind: type[Row], when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path / "study")
    asks: list[Then] = [
        (reached(1, 1), lambda study: study.policy("wfd")),
        (reached(2, 1), lambda study: study.pause_study()),
        (nothing_runs, lambda study: study.resume_study()),
        (complete(1), lambda study: study.policy("fifo")),
    ]
    carriers: list[Asking] = []

    def run() -> None:
        carriers.append(Asking(side_by_side, at_once=False, on_start=nothing, directory=stage.directory, asks=asks))
        stage.run(carriers[-1])

    assert run_with_kills(kind, when, run, monkeypatch)
    assert stage.outcome() == undisturbed(tmp_path, Stage)
    done = [verb for verb, _, _ in noted(stage)]
    assert done[:3] == ["policy", "pause study", "resume study"], "each is done once"
    assert done[3:] in ([], ["policy"]), "the study may end before the last is done"


def test_a_paused_study_stays_so_after_a_kill_and_also_asks_for_no_trials(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", MAKERS["asha"])
    with pytest.raises(Killed):
        stage.run(
            asking(
                stage,
                (reached(0, 1), lambda study: study.pause_study()),
                (lambda rows: STUDY_PAUSED in {row.reason for row in rows} and nothing_runs(rows), die),
            )
        )
    before = len(stage.outcome())
    status = " ".join(CliRunner().invoke(app, ["status", str(stage.directory)]).output.split())
    assert f"the study is paused; resume it with: shoal study resume {stage.directory}" in status
    carrier = asking(stage, (lambda rows: carrier.polls > 5, lambda study: study.resume_study()))
    carrier.on_start = lambda job: started.append(carrier.polls)
    started: list[int] = []
    stage.run(carrier)
    assert min(started) > 5
    assert before < len(stage.outcome())
    assert all(row[2].final for row in stage.outcome())


@pytest.mark.parametrize("make", [MAKERS["hyperband"], MAKERS["asha"]], ids=["hyperband", "asha"])
def test_a_study_that_is_ended_keeps_what_it_has_and_is_over_after_a_resume_too(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    stage = Stage(tmp_path / "study", make)
    stage.run(asking(stage, (reached(2, 1), lambda study: study.end_study())))
    before = stage.outcome()
    reasons = {row.reason for row in rows_of(stage).values() if row.state is TrialState.STOPPED}
    assert "the study was ended by a user" in reasons
    assert all(row[2].final for row in before)
    assert sum(row[3] for row in before) < 9
    carrier = backend()
    stage.run(carrier)
    assert (stage.outcome(), carrier.started) == (before, [])
    with pytest.raises(ShoalError, match="has ended already"):
        Study(stage.directory).end_study()
    Study(stage.directory).add({"x": 0.5}, 2)
    stage.run(backend())
    assert stage.outcome()[:-1] == before
    assert stage.outcome()[-1][2:4] == (TrialState.COMPLETE, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Intervention, StudyValue, TrialRow, JobRow])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_while_a_study_is_ended_changes_nothing(
    kind: type[Row], when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path / "study", MAKERS["hyperband"])
    asks: list[Then] = [(reached(1, 1), lambda study: study.end_study())]

    def run() -> None:
        stage.run(Asking(side_by_side, at_once=False, on_start=nothing, directory=stage.directory, asks=asks))

    assert run_with_kills(kind, when, run, monkeypatch)
    assert not asks
    assert all(row[2].final for row in stage.outcome())
    assert noted(stage) == [("end study", (), ())]


def test_what_makes_no_sense_of_the_whole_study_is_noted(half_way: Stage) -> None:
    study = Study(half_way.directory)
    study.pause_study()
    with pytest.raises(ShoalError, match="is paused already"):
        study.pause_study()
    for verb in ("pause study", "resume study", "resume study", "end study", "end study", "pause study"):
        write_request(half_way.directory, verb)  # type: ignore[arg-type]
    with pytest.raises(ShoalError, match="is to end already"):
        study.resume_study()
    half_way.run(backend())
    assert [(verb, refused) for verb, _, refused in noted(half_way)] == [
        ("pause study", ()),
        ("pause study", ("the study is paused already",)),
        ("resume study", ()),
        ("resume study", ("the study is not paused",)),
        ("end study", ()),
        ("end study", ("the study has ended already",)),
        ("pause study", ("the study is ended already",)),
    ]
    assert {row[2] for row in half_way.outcome()} == {TrialState.STOPPED}


def test_code_that_the_study_runs_changes_its_devices_without_waiting_for_itself(tmp_path: Path) -> None:
    stage = four(tmp_path / "study", slots=2)
    told: list[list[str]] = []
    carrier = asking(
        stage,
        (reached(2, 1), lambda study: told.append(study.remove_devices("cpu:1", patience=0))),
        (reached(2, 1), lambda study: told.append(study.add_devices(["cpu:1"], patience=0))),
    )
    stage.run(carrier)
    assert told == [["cpu:0"], ["cpu:0", "cpu:1"]]
    assert noted(stage) == [("remove devices", (), ()), ("add devices", (), ())]
    with JournalView.read(stage.directory) as journal:
        assert [each.devices for each in journal.interventions()] == [("cpu:1",), ("cpu:1",)]
        assert intervention_text(journal.interventions()[0]).endswith(" remove devices cpu:1")
