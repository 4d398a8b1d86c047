"""Members leave an array, join it, stop within an epoch and continue with others; each trains as it does alone."""

import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract_samples import Planned, Small, X, Y, runtimes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import ArrayFailed, MembersLeft, Reported, SignaturesFound
from shoal.core.job import Job, JobUpdate, WorkerContext
from shoal.core.trial import Report, Trial, TrialState
from shoal.task import Task
from shoal.train.checkpoint import load_newest
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.fused_stepper import FusedStepper
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.stepper import PlainStepper
from shoal.train.worker_state import TrialCache, WorkerState

CPU = torch.device("cpu")
TRIALS, EPOCHS, STEPS = 5, 4, 3
KEY = FusionKey("net", "data", 4)


class Net(Task):
    """Model with everything that could differ between members: dropout, batch statistics, momentum, schedules."""

    def data(self, config: Any) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(14, 5, generator=generator, dtype=torch.float64), torch.arange(14) % 3
        return TensorDataset(x[:10], y[:10]), TensorDataset(x[10:], y[10:])

    def model(self, config: Any) -> nn.Module:
        # No bias before the normalisation: its gradient would be zero but for rounding, of which Adam makes full steps.
        layers = (
            nn.Linear(5, 6, bias=False),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            nn.Dropout(config["drop"]),
            nn.Linear(6, 3),
        )
        return nn.Sequential(*layers).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=0.1)

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1 + config["number"] % 2, 0.7)

    def batch_size(self, config: Any) -> int:
        return 4

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"sum": model(batch[0]).sum()}


class Sgd(Net):
    """SGD whose momentum starts with the first gradient."""

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, dampening=0.1)


class Noisy(Net):
    """Adds noise from all three generators, different in each epoch."""

    class Disturbed(Dataset[Any]):
        def __init__(self, whole: TensorDataset) -> None:
            self.whole = whole

        def __len__(self) -> int:
            return len(self.whole)

        def __getitem__(self, index: int) -> Any:
            x, y = self.whole[index]
            return x + 0.1 * torch.rand(5) + 0.1 * random.random() + 0.1 * np.random.rand(), y

    def data(self, config: Any) -> tuple[Any, Any]:
        train, valid = super().data(config)
        return self.Disturbed(train), valid


class DrawsItself(Net):
    """Has a loss that draws from Python's generator, which is not per member, so epochs are not mixed."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + 0.1 * random.random())


def counting(model: nn.Module) -> nn.Module:
    """Return a model with a buffer that counts its steps."""
    model.register_buffer("steps", torch.zeros((), dtype=torch.float64))
    return model


def disturbed_later(model: nn.Module, loss: Tensor) -> Tensor:
    """Return a loss that draws from all three generators from a model's fifth step on."""
    if model.training:
        with torch.no_grad():
            model.steps.add_(1)
        if model.steps.item() >= 5:
            loss = loss * (1 + 0.1 * torch.rand(()).double() + 0.1 * random.random() + 0.1 * np.random.randn())
    return loss


class DrawsLater(Net):
    """Draws random numbers only after the first steps."""

    def model(self, config: Any) -> nn.Module:
        return counting(super().model(config))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return disturbed_later(model, super().loss(model, batch))


class Counts(Net):
    """Has members that cannot be fused."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * float(torch.sign(model[0].weight.sum()).item() + 2)


class OwnStep(Net):
    """Overrides `step`."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss


KINDS = (Net, Sgd, Noisy, DrawsItself, DrawsLater, Counts, OwnStep)
TASKS: dict[str, type[Task]] = {kind.__name__: kind for kind in KINDS}


def trial(number: int) -> Trial:
    config = {"lr": 0.01 * (number + 1), "drop": 0.1 * number, "number": number}
    return Trial(number, config, seed=100 + number, data_seed=7)


def work(
    task: Task, directory: Path, members: Sequence[Member], control: JobControl, trial_cache: TrialCache | None = None
) -> list[Any]:
    """Return the events of a job."""
    sets = DataSets(task, CPU)
    directory.mkdir(parents=True, exist_ok=True)
    worker_state = WorkerState(task, sets, trial_cache or TrialCache(), CPU, directory)
    job = Job("job", (Array(KEY, tuple(members)),))
    return list(Trainer(job, worker_state, SignatureBuilder(task, sets), control, WorkerContext(directory, b"")).run())


def joining(*members: Member) -> JobUpdate:
    return JobUpdate(join=(Array(KEY, members),))


def reports_in(events: Iterable[Any]) -> list[Report]:
    return [report for event in events if isinstance(event, Reported) for report in event.reports]


@cache
def alone(kind: str, number: int) -> tuple[dict[int, Any], dict[str, Tensor]]:
    """Return the reports and the final weights of a trial that trains alone."""
    with TemporaryDirectory() as folder:
        events = work(TASKS[kind](), Path(folder), [Member(trial(number), 0, EPOCHS)], JobControl(prompt=True))
        checkpoint = load_newest(Path(folder), number)
    assert checkpoint is not None
    return {report.epoch: report.metrics for report in reports_in(events)}, checkpoint.model


def check(kind: str, directory: Path, reports: Iterable[Report]) -> None:
    """Compare all reports and final weights of the trials with those of the same trials trained alone."""
    for report in reports:
        expected = alone(kind, report.trial)[0][report.epoch]
        assert report.metrics == pytest.approx(expected, rel=1e-9, abs=1e-12), (report, expected)
    for number in range(TRIALS):
        checkpoint = load_newest(directory, number)
        assert checkpoint is not None
        assert checkpoint.epoch == EPOCHS
        torch.testing.assert_close(checkpoint.model, alone(kind, number)[1], rtol=1e-9, atol=1e-12)


numbers = st.integers(0, TRIALS - 1)
changes = st.one_of(
    st.none(),
    st.builds(lambda number: JobUpdate(leave=frozenset({number})), numbers),
    st.tuples(st.just("join"), numbers),
)
jobs = st.fixed_dictionaries(
    {
        "members": st.sets(numbers, min_size=1),
        "targets": st.lists(st.integers(1, EPOCHS), min_size=TRIALS, max_size=TRIALS),
        "plan": st.dictionaries(st.integers(1, 3 * STEPS), changes, max_size=4),
    }
)


@settings(deadline=None, max_examples=max(2, settings.default.max_examples * 12 // 100))
@given(kind=st.sampled_from(sorted(TASKS)), script=st.lists(jobs, max_size=4))
def test_whatever_is_done_to_arrays_each_member_is_as_if_alone(kind: str, script: list[dict[str, Any]]) -> None:
    task = TASKS[kind]()
    epoch = dict.fromkeys(range(TRIALS), 0)
    said: list[Report] = []
    trial_cache = TrialCache()
    with TemporaryDirectory() as folder:
        directory = Path(folder)

        def member(number: int, target: int) -> Member:
            return Member(trial(number), epoch[number], max(target, epoch[number] + 1))

        def run(members: Sequence[Member], control: JobControl) -> None:
            reports = reports_in(work(task, directory, members, control, trial_cache))
            said.extend(reports)
            for report in reports:
                epoch[report.trial] = max(epoch[report.trial], report.epoch)

        for job in script:
            open_ = [number for number in range(TRIALS) if epoch[number] < EPOCHS]
            present = [number for number in sorted(job["members"]) if number in open_]
            free = set(open_) - set(present)
            plan: dict[int, JobUpdate | None] = {}
            for step, change in sorted(job["plan"].items()):
                if isinstance(change, tuple):
                    number = change[1]
                    if number not in free:
                        continue
                    free.remove(number)
                    plan[step] = joining(member(number, job["targets"][number]))
                else:
                    plan[step] = change
            if present:
                run([member(number, job["targets"][number]) for number in present], Planned(plan))
        run([member(n, EPOCHS) for n in range(TRIALS) if epoch[n] < EPOCHS], JobControl(prompt=True))
        check(kind, directory, said)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("kind", sorted(TASKS))
def test_survivors_and_newcomers_at_different_epochs(kind: str, tmp_path: Path) -> None:
    """Two of three leave after an epoch, one within the second; two join, one of them from the start."""
    task = TASKS[kind]()
    first = [Member(trial(0), 0, EPOCHS), Member(trial(1), 0, 1), Member(trial(2), 0, 1)]
    plan = {
        2: joining(Member(trial(3), 0, EPOCHS)),
        6: joining(Member(trial(1), 1, EPOCHS), Member(trial(4), 0, 2)),
    }
    trial_cache = TrialCache()
    reports = reports_in(work(task, tmp_path, first, Planned(plan), trial_cache))
    rest = [Member(trial(2), 1, EPOCHS), Member(trial(4), 2, EPOCHS)]
    reports += reports_in(work(task, tmp_path, rest, JobControl(prompt=True), trial_cache))
    assert sorted({(r.trial, r.epoch) for r in reports}) == [(n, e) for n in range(5) for e in range(1, EPOCHS + 1)]
    check(kind, tmp_path, reports)


def test_who_is_told_to_leave_reports_no_more_and_the_others_go_on(tmp_path: Path) -> None:
    members = [Member(trial(number), 0, 2) for number in range(3)]
    plan = {2: JobUpdate(leave=frozenset({1}), find_signatures=(trial(3),))}
    events = work(Net(), tmp_path, members, Planned(plan))
    assert sorted((r.trial, r.epoch, r.state) for r in reports_in(events)) == [
        *((0, 1, TrialState.RUNNING), (0, 2, TrialState.PAUSED)),
        *((2, 1, TrialState.RUNNING), (2, 2, TrialState.PAUSED)),
    ]
    (looked,) = [event for event in events if isinstance(event, SignaturesFound)]
    assert looked.keys.keys() == {3}
    assert events[0] == MembersLeft("job", frozenset({1}))
    assert isinstance(events[1], SignaturesFound), "a look waits for no end of an epoch"


def test_a_job_that_all_have_left_is_over(tmp_path: Path) -> None:
    members = [Member(trial(number), 0, 2) for number in range(2)]
    assert not reports_in(work(Net(), tmp_path, members, Planned({1: JobUpdate(leave=frozenset({0, 1}))})))


def test_who_is_to_join_and_is_over_before_never_comes(tmp_path: Path) -> None:
    plan = {1: joining(Member(trial(1), 0, 2)), 2: JobUpdate(leave=frozenset({1}))}
    reports = reports_in(work(Net(), tmp_path, [Member(trial(0), 0, 2)], Planned(plan)))
    assert {report.trial for report in reports} == {0}


def test_epochs_that_do_not_mix_take_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = {2: joining(Member(trial(1), 0, 2))}
    events = work(DrawsItself(), tmp_path, [Member(trial(0), 0, 3)], Planned(plan))
    said = [event for event in events if isinstance(event, Reported)]
    epochs = [[(report.trial, report.epoch) for report in event.reports] for event in said]
    assert sorted({one for some in epochs for one in some}) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert epochs[-1] == [(0, 3)], epochs
    assert "take turns: random numbers are drawn past torch's own functions" in caplog.text


def test_plain_steps_of_trials_at_different_epochs_are_no_draws() -> None:
    """The generators are seeded for each trial then."""
    task, sides = Small(), []
    for kind in (FusedStepper, PlainStepper):
        together = runtimes(task, [trial(number) for number in range(3)])
        together[2].epoch = 1
        stepper = kind(task, together)
        sides.append([stepper.train_step([(X[:4], Y[:4])] * 3, [tick, tick, tick + 3]) for tick in range(6)])
    for mine, alone in zip(*sides, strict=True):
        torch.testing.assert_close(mine, alone, rtol=1e-9, atol=0)


class LateDraws(Net):
    """Draws from Python's generator only in the last, partial batch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        factor = 1 + random.random() if len(batch[0]) < 4 else 1.0
        return super().loss(model, batch) * factor


class FromNumpy(Net):
    """Draws initial weights from the generators of NumPy and Python."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        with torch.no_grad():
            model[0].weight.mul_(float(np.random.rand()) + random.random())
        return model


class Ragged(Net):
    """Has samples of different lengths, so batches of two epochs cannot always be stacked."""

    class Sequences(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return torch.full((1 + index // 3, 5), index / 6, dtype=torch.float64), torch.tensor(index % 3)

    def data(self, config: Any) -> tuple[Any, Any]:
        return self.Sequences(), super().data(config)[1]

    def batch_size(self, config: Any) -> int:
        return 1

    def model(self, config: Any) -> nn.Module:
        return nn.Linear(5, 3).double()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        logits = model(x)
        return F.cross_entropy(logits.mean(1) if logits.dim() == 3 else logits, y)


class RaggedDrawsLater(Ragged):
    """As `Ragged`, but epochs can no longer be mixed after illegal random draws."""

    def model(self, config: Any) -> nn.Module:
        return counting(super().model(config))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return disturbed_later(model, super().loss(model, batch))


TASKS |= {kind.__name__: kind for kind in (LateDraws, FromNumpy, Ragged, RaggedDrawsLater)}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("kind", ["LateDraws", "FromNumpy", "Ragged", "DrawsLater", "RaggedDrawsLater"])
@pytest.mark.parametrize("step", [2, *(pytest.param(step, marks=pytest.mark.thorough) for step in (1, 5))])
def test_what_shows_late_does_no_harm(kind: str, step: int, tmp_path: Path) -> None:
    plan = {step: joining(*(Member(trial(number), 0, EPOCHS) for number in (3, 4)))}
    members = [Member(trial(number), 0, EPOCHS) for number in range(3)]
    reports = reports_in(work(TASKS[kind](), tmp_path, members, Planned(plan)))
    assert {(r.trial, r.epoch) for r in reports} == {(n, e) for n in range(5) for e in range(1, EPOCHS + 1)}
    check(kind, tmp_path, reports)


class Fails(Net):
    """Has a loss that is infinite at the first step of trial 1, and finite afterwards."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + model[0].weight.sum() * self.infinite(model)

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.register_buffer("left", torch.tensor(1.0 if config["number"] == 1 else 0.0, dtype=torch.float64))
        return model

    def infinite(self, model: nn.Module) -> Tensor:
        infinite = torch.where(model.left > 0, float("inf"), 0.0)
        if model.training:
            model.left.mul_(0)
        return infinite.detach()


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({}, id="undisturbed"),
        pytest.param({2: None}, id="stopped within the epoch"),
        pytest.param({1: JobUpdate(leave=frozenset({2}))}, id="a neighbour leaves"),
        pytest.param({1: joining(Member(trial(3), 0, 2))}, id="another joins"),
    ],
)
def test_a_loss_that_was_not_a_number_is_not_forgotten(plan: dict[int, JobUpdate | None], tmp_path: Path) -> None:
    task = Fails()
    members = [Member(trial(number), 0, 2) for number in range(3)]
    reports = reports_in(work(task, tmp_path, members, Planned(plan)))
    if None in plan.values():
        assert load_newest(tmp_path, 1) is None, "what is about to fail is not saved"
        reports = reports_in(work(task, tmp_path, members, JobControl(prompt=True)))
    (failed,) = [report for report in reports if report.trial == 1]
    assert (failed.epoch, failed.state) == (1, TrialState.FAILED)
    assert failed.reason == "loss is not finite at step 1 of epoch 1"


def test_who_leaves_with_a_bad_loss_is_not_saved(tmp_path: Path) -> None:
    members = [Member(trial(number), 0, 2) for number in range(3)]
    work(
        Fails(), tmp_path, members, Planned({1: JobUpdate(leave=frozenset({1})), 2: JobUpdate(leave=frozenset({1, 2}))})
    )
    assert load_newest(tmp_path, 1) is None
    assert load_newest(tmp_path, 2) is not None


def test_newcomers_at_other_epochs_do_not_starve_those_that_are_ahead(tmp_path: Path) -> None:
    """Epochs do not mix, and at every epoch another trial joins."""
    looks = STEPS + 2  # of an epoch: after each step, after the validation, and before the next
    newcomers = {looks * (n + 1): joining(Member(trial(n + 1), 0, 1)) for n in range(8)}
    events = work(DrawsItself(), tmp_path, [Member(trial(0), 0, 2)], Planned(newcomers))
    order = [
        (report.trial, report.epoch) for event in events if isinstance(event, Reported) for report in event.reports
    ]
    assert order.index((0, 2)) < len(order) / 2


def test_who_leaves_keeps_what_it_has_learnt(tmp_path: Path) -> None:
    work(
        Net(), tmp_path, [Member(trial(0), 0, 2), Member(trial(1), 0, 2)], Planned({2: JobUpdate(leave=frozenset({1}))})
    )
    kept = load_newest(tmp_path, 1)
    assert kept is not None
    assert (kept.epoch, kept.step) == (0, 1)


class Undone(Net):
    """Raises when the model of trial 3 is built."""

    error: BaseException = ValueError("no such model")

    def model(self, config: Any) -> nn.Module:
        if config["number"] == 3:
            raise self.error
        return super().model(config)


class Exits(Undone):
    error = SystemExit("no such model")


@pytest.mark.parametrize("task", [Undone, Exits])
def test_a_newcomer_that_cannot_be_built_leaves_and_the_others_go_on(task: type[Undone], tmp_path: Path) -> None:
    plan = {2: joining(Member(trial(3), 0, 2))}
    events = work(task(), tmp_path, [Member(trial(number), 0, 3) for number in range(2)], Planned(plan))
    (dropped,) = [event for event in events if isinstance(event, ArrayFailed)]
    assert dropped.trials == {3}
    assert "no such model" in dropped.message
    assert [kept.epoch for number in range(2) if (kept := load_newest(tmp_path, number))] == [3, 3]


class Divided(Net):
    """Has different data sets by the number of the trial."""

    def data(self, config: Any) -> tuple[Any, Any]:
        assert config["number"] < 2
        return super().data(config)


def test_a_look_loads_no_data(tmp_path: Path) -> None:
    plan = {1: JobUpdate(find_signatures=(trial(0), trial(1)))}
    events = work(Divided(), tmp_path, [Member(trial(0), 0, 1)], Planned(plan))
    (looked,) = [event for event in events if isinstance(event, SignaturesFound)]
    assert looked.keys.keys() == {0}
