"""Arrays of different structures in one process: each trial trains as it does alone, and samples are fetched once."""

from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_samples import (
    CONFIGS,
    EPOCHS,
    SAMPLES,
    TASKS,
    Augmented,
    Decoded,
    Disturbed,
    Featured,
    Mixed,
    SharedNoise,
    Shop,
    alone,
    reports_in,
    trial,
    whole,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.core.array import Member
from shoal.core.event import ArrayFailed, Outcome
from shoal.core.job import JobUpdate
from shoal.core.trial import Report, TrialState
from shoal.fuse import frozen
from shoal.train.checkpoint import load_newest
from shoal.train.control import JobControl
from shoal.train.data import sample_window
from shoal.train.data.batches import PROBED_SAMPLES
from shoal.train.data.sample_window import BLOCK

EVERYBODY = range(len(CONFIGS))


def check(kind: str, directory: Path, reports: list[Report], numbers: Any = EVERYBODY) -> None:
    """Compare all reports and final weights of the trials with those of the same trials trained alone."""
    for report in reports:
        expected = alone(kind, report.trial)[0][report.epoch]
        assert report.metrics == pytest.approx(expected, rel=1e-9, abs=1e-12), (report, expected)
    for number in numbers:
        checkpoint = load_newest(directory, number)
        assert checkpoint is not None
        assert checkpoint.epoch == EPOCHS
        torch.testing.assert_close(checkpoint.model, alone(kind, number)[1], rtol=1e-9, atol=1e-12)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("kind", sorted(TASKS))
def test_each_member_of_a_pack_is_as_if_alone(kind: str, tmp_path: Path) -> None:
    reports = reports_in(Shop(TASKS[kind](), tmp_path).run([whole(number) for number in EVERYBODY]))
    assert sorted((r.trial, r.epoch) for r in reports) == [(n, e) for n in EVERYBODY for e in range(1, EPOCHS + 1)]
    check(kind, tmp_path, reports)


class Planned(JobControl):
    """Sends a planned request at the nth poll of `stopping`; None stops the job."""

    def __init__(self, plan: dict[int, JobUpdate | None]) -> None:
        super().__init__(prompt=True)
        self.plan = plan
        self.asked = 0

    def stopping(self) -> bool:
        self.asked += 1
        if self.asked in self.plan:
            change = self.plan.pop(self.asked)
            if change is None:
                self.stop()
            else:
                self.change(change)
        return super().stopping()


numbers = st.integers(0, len(CONFIGS) - 1)
jobs = st.fixed_dictionaries(
    {
        "members": st.sets(numbers, min_size=1),
        "targets": st.lists(st.integers(1, EPOCHS), min_size=len(CONFIGS), max_size=len(CONFIGS)),
        "plan": st.dictionaries(
            st.integers(1, 40),
            st.one_of(st.none(), st.tuples(st.sampled_from(["leave", "join"]), numbers)),
            max_size=4,
        ),
    }
)


@settings(deadline=None, max_examples=settings.default.max_examples * 15 // 100)
@given(kind=st.sampled_from(sorted(TASKS)), script=st.lists(jobs, max_size=3), seconds=st.sampled_from([0.0, 30.0]))
def test_whatever_is_done_to_packs_each_member_is_as_if_alone(
    kind: str, script: list[dict[str, Any]], seconds: float
) -> None:
    epoch = dict.fromkeys(EVERYBODY, 0)
    said: list[Report] = []
    with TemporaryDirectory() as folder:
        shop = Shop(TASKS[kind](), Path(folder))

        def member(number: int, target: int) -> Member:
            return Member(trial(number), epoch[number], max(target, epoch[number] + 1))

        def run(members: list[Member], control: JobControl) -> None:
            reports = reports_in(shop.run(members, control, seconds))
            said.extend(reports)
            for report in reports:
                epoch[report.trial] = max(epoch[report.trial], report.epoch)

        for job in script:
            open_ = [number for number in EVERYBODY if epoch[number] < EPOCHS]
            present = [number for number in sorted(job["members"]) if number in open_]
            free = set(open_) - set(present)
            plan: dict[int, JobUpdate | None] = {}
            for step, what in sorted(job["plan"].items()):
                if what is None:
                    plan[step] = None
                elif what[0] == "leave":
                    plan[step] = JobUpdate(leave=frozenset({what[1]}))
                elif what[1] in free:
                    free.remove(what[1])
                    plan[step] = JobUpdate(join=shop.arrays([member(what[1], job["targets"][what[1]])]))
            if present:
                run([member(number, job["targets"][number]) for number in present], Planned(plan))
        run([member(n, EPOCHS) for n in EVERYBODY if epoch[n] < EPOCHS], JobControl(prompt=True))
        check(kind, Path(folder), said)


def test_every_sample_is_made_once_for_all_members_and_epochs(tmp_path: Path) -> None:
    task = Decoded()
    Shop(task, tmp_path).run([whole(number) for number in EVERYBODY])
    assert task.train_set.asked == {index: 3 if index < PROBED_SAMPLES else 1 for index in range(SAMPLES)}, (
        "the first are made twice more, to find out whether they are always the same"
    )


def test_a_frozen_featuriser_in_the_samples_runs_once_for_all_arrays_and_epochs(tmp_path: Path) -> None:
    task = Featured()
    Shop(task, tmp_path).run([whole(number) for number in EVERYBODY])
    assert task.train_set.passes == SAMPLES + 2 * PROBED_SAMPLES, "the first are made twice more"


def test_samples_disturbed_for_all_alike_are_made_once_in_an_epoch(tmp_path: Path) -> None:
    """Members are at the same position of the epoch, whatever their batch sizes."""
    task = SharedNoise()
    Shop(task, tmp_path).run([whole(number) for number in (0, 2, 3, 4)])
    counts = task.train_set.asked
    assert set(counts) == set(range(SAMPLES))
    assert sum(counts.values()) <= EPOCHS * SAMPLES + PROBED_SAMPLES


class Long(SharedNoise):
    """Has a training set of sixteen blocks."""

    def data(self, config: Any) -> tuple[Any, Any]:
        _, valid = super().data(config)
        x = torch.randn(16 * BLOCK, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.train_set = Disturbed(TensorDataset(x, torch.arange(len(x)) % 3))
        return self.train_set, valid


@pytest.mark.parametrize(
    "newcomer",
    [pytest.param(1, marks=pytest.mark.thorough, id="of the key of an array"), pytest.param(3, id="of another key")],
)
def test_who_comes_within_an_epoch_catches_up_and_shares_the_samples(
    newcomer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_window, "MAX_PREFETCH_SECONDS", 0)
    task = Long()
    shop = Shop(task, tmp_path)
    (array,) = shop.arrays([whole(newcomer, 2)])
    plan = Planned({220: JobUpdate(join=(replace(array, separate=True),))})  # steps of 2 and of 5: 314 samples
    reports = reports_in(shop.run([whole(0, 2), whole(4, 2)], plan))
    everybody = sorted((0, 4, newcomer))
    assert sorted((r.trial, r.epoch) for r in reports) == [(number, epoch) for number in everybody for epoch in (1, 2)]
    missed = sum(task.train_set.asked.values()) - 2 * 16 * BLOCK
    assert 4 * BLOCK < missed < 16 * BLOCK, "those that were over when it came"
    lone = reports_in(Shop(Long(), tmp_path / "alone").run([whole(newcomer, 2)]))
    expected = {report.epoch: report.metrics for report in lone}
    for report in reports:
        if report.trial == newcomer:
            assert report.metrics == pytest.approx(expected[report.epoch], rel=1e-9, abs=1e-12)


@pytest.mark.in_turns
@pytest.mark.parametrize("number", EVERYBODY)
def test_every_member_sees_each_sample_once_in_an_epoch(number: int, tmp_path: Path) -> None:
    queue: SimpleQueue[list[float]] = SimpleQueue()  # a list would be each trial's own

    class Watched(Mixed):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            if model.training and getattr(model, "watched", False):
                queue.put([round(float(value), 9) for value in batch[0][:, 0]])
            return super().loss(model, batch)

        def model(self, config: Any) -> nn.Module:
            model = super().model(config)
            model.watched = config == CONFIGS[number]
            return model

    shop = Shop(Watched(), tmp_path)
    shop.run([whole(n) for n in EVERYBODY if n != 1 - number])
    size = CONFIGS[number]["batch_size"]
    steps = -(-SAMPLES // size)
    samples = sorted(round(float(x[0]), 9) for x, _ in Mixed().data({})[0])
    seen = [queue.get() for _ in range(queue.qsize())]
    batches = [batch for place, batch in enumerate(seen) if place == 0 or batch != seen[place - 1]]
    assert len(batches) == EPOCHS * steps
    for epoch in range(EPOCHS):
        mine = [value for batch in batches[epoch * steps : (epoch + 1) * steps] for value in batch]
        assert sorted(mine) == samples


class Raising(Mixed):
    """Raises in the second epoch of trial 3."""

    error: BaseException = ValueError("no more")

    def __init__(self) -> None:
        self.steps: list[int] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training and any(isinstance(part, nn.BatchNorm1d) for part in model):
            self.steps.append(1)
            if len(self.steps) > 7:
                raise self.error
        return super().loss(model, batch)


class Exiting(Raising):
    error = SystemExit("no more")


@pytest.mark.parametrize("task", [Raising, Exiting])
def test_who_raises_leaves_and_the_others_go_on(task: type[Raising], tmp_path: Path) -> None:
    events = Shop(task(), tmp_path).run([whole(number) for number in EVERYBODY])
    (dropped,) = [event for event in events if isinstance(event, ArrayFailed)]
    assert (dropped.trials, dropped.outcome) == ({3}, Outcome.RAISED)
    assert f"{type(task.error).__name__}: no more" in dropped.message
    assert f"{type(task.error).__name__}: no more" in (tmp_path / "logs" / "job.log").read_text()
    others = [number for number in EVERYBODY if number != 3]
    reports = reports_in(events)
    done = {report.trial for report in reports if report.state is TrialState.PAUSED}
    assert done == set(others)
    check("Mixed", tmp_path, [report for report in reports if report.trial != 3], others)


def test_the_last_array_that_raises_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no more"):
        Shop(Raising(), tmp_path).run([whole(3)])


def test_a_task_with_augmentation_of_its_own_is_alone_in_its_draws(tmp_path: Path) -> None:
    """Random numbers belong to the trial's own batches, whatever trains in the same process."""
    task = Augmented()
    Shop(task, tmp_path).run([whole(number) for number in EVERYBODY])
    assert sum(task.train_set.asked.values()) > EPOCHS * SAMPLES


class Heads(Mixed):
    """Has heads of different widths on one frozen base."""

    def __init__(self) -> None:
        self.bases: list[nn.Module] = []

    def model(self, config: Any) -> nn.Module:
        base = nn.Linear(5, 5)
        nn.init.constant_(base.weight, 0.1)
        nn.init.zeros_(base.bias)
        self.bases.append(base.requires_grad_(False))
        width = config["width"]
        model = nn.Sequential(base, nn.ReLU(), nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3)).double()
        model.counts = False
        return model


def test_arrays_of_a_job_keep_a_frozen_base_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "MIN_SHARED_BYTES", 8 * 30)  # what the base takes
    shop = Shop(task := Heads(), tmp_path)
    arrays = shop.arrays([whole(number) for number in EVERYBODY])
    assert len({array.key.structure for array in arrays}) > 3
    task.bases.clear()
    shop.run([whole(number) for number in EVERYBODY])
    assert len(task.bases) == len(EVERYBODY)
    assert len({base.weight.data_ptr() for base in task.bases}) == 1
