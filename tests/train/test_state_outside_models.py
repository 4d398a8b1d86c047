"""What trials keep outside of their models, and late state, after jobs that stop in the middle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract_samples import StopsAfter
from test_carried_state import CPU, member, metrics
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from shoal.core.array import Array, FusionKey
from shoal.core.errors import TaskError
from shoal.core.event import Noted, Proven, Reported
from shoal.core.job import Job, WorkerContext
from shoal.fuse import transaction
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.transaction import Transaction
from shoal.task import Task
from shoal.train import fused_stepper
from shoal.train.checkpoint_paths import checkpoint_files, remove_later_checkpoints
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.outside import OutsideState
from shoal.train.proof import Proof
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

KEY = FusionKey("one", "data", 4)
CENTRE = torch.zeros((), dtype=torch.float64)
TEACHER = nn.Linear(1, 1)
COUNTS = {"steps": 0}
TABLES: dict[int, Tensor] = {}
NUMBERS = np.random.default_rng(0)
ARRAY = np.zeros(1)
SEEN: dict[int, int] = {}


class Net(nn.Module):
    """Divides by what `held` gives."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.layer, self.held, self.steps = nn.Linear(4, 1), held, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            if self.steps % 3 == 0 and self.held is not None:
                self.held[0] += 1
        return self.layer(x) / (1 + (0.0 if self.held is None else float(self.held[0])))


class Sums(Task):
    """Regression with four steps in each of three epochs."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def data(self, config: Any) -> tuple[Any, Any]:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return (both := TensorDataset(x, x.sum(1, keepdim=True))), both

    def batch_size(self, config: Any) -> int:
        return 4

    def model(self, config: Any) -> nn.Module:
        return Net(None if self.held is None else self.held()).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.5)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()


class Centred(Sums):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            CENTRE.add_(0.1)
        return super().loss(model, (batch[0] - CENTRE, batch[1]))


class MeanTeacher(Sums):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            TEACHER.weight.add_(0.1)
        return super().loss(model, batch) * TEACHER.weight.sum().double().detach().abs()


class Weighted(Sums):
    """In the third epoch a loss counts once more for each time that its position in an epoch was seen."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if not model.training or model.steps <= 8:
            return loss
        at = model.steps % 4
        SEEN[at] = SEEN.get(at, 0) + 1
        return loss * (1 + SEEN[at])


class Rows(Dataset[Tensor]):
    """A replay buffer."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Replays(Sums):
    """Adds to each loss that of the batch before, which is kept in a data set that is not the task's `data`."""

    def __init__(self) -> None:
        super().__init__()
        self.before = Rows()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            loss = sum((model(each).square().mean() for each in self.before.rows[-1:]), loss)
            self.before.rows.append(batch[0])
        return loss


class Splits(Sums):
    """Two attributes are one list at first, and two from the fifth step on."""

    def model(self, config: Any) -> nn.Module:
        model = Net().double()
        model.now = model.before = []
        return model

    def loss(self, model: Any, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            if model.steps % 5 == 0:
                model.before, model.now = model.now, []
            if model.steps > 7:
                model.now.append(0.1 * model.steps)
        return loss * (1 + sum(model.before))


class Clipped(Sums):
    """Clips the norm of all gradients, and its optimizer has the bias only."""

    def optimizer(self, model: Any, config: Any) -> Any:
        return torch.optim.SGD([model.layer.bias], lr=config["lr"])

    def clip_norm(self, config: Any) -> float:
        return 0.5


class KeepsOptimizer(Sums):
    """The model refers to its optimizer."""

    def optimizer(self, model: Any, config: Any) -> Any:
        model.optimizer = super().optimizer(model, config)
        return model.optimizer

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def jobs(
    task: Task, directory: Path, *controls: JobControl, plain: bool = False, numbers: Sequence[int] = range(3)
) -> tuple[dict[Any, float], list[Any]]:
    """Metrics by trial and epoch, and all events, of jobs one after another, each in a process of its own."""
    found: dict[Any, float] = {}
    events: list[Any] = []
    before = CENTRE.clone()
    for control in (*controls, JobControl(prompt=True)):
        CENTRE.copy_(before)  # as a new process has it
        sets = DataSets(task, CPU)
        directory.mkdir(parents=True, exist_ok=True)
        state = WorkerState(task, sets, TrialCache(), CPU, directory, plain_keys={KEY: "a reason"} if plain else {})
        context = WorkerContext(directory, b"", checkpoint_seconds=0.0)
        job = Job("job", (Array(KEY, tuple(member(number) for number in numbers)),))
        events += Trainer(job, state, SignatureBuilder(task, sets), control, context).run()
        found |= metrics(events)
    CENTRE.copy_(before)
    return found, events


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("held", [lambda: [0], lambda: np.zeros(1), lambda: {0: 0}], ids=["list", "array", "dict"])
@pytest.mark.parametrize("stop", [5, 9])
def test_state_that_changes_now_and_then_is_in_checkpoints(held: Any, stop: int, tmp_path: Path) -> None:
    alone, _ = jobs(Sums(held), tmp_path / "alone", plain=True)
    assert alone != jobs(Sums(), tmp_path / "without", plain=True)[0]
    found, events = jobs(Sums(held), tmp_path / "array", StopsAfter(stop))
    assert found == pytest.approx(alone, rel=1e-9)
    assert not [event.refusal for event in events if isinstance(event, Proven) and event.refusal]


def test_a_teacher_outside_of_the_model_is_each_trials_own(tmp_path: Path) -> None:
    before = TEACHER.weight.detach().clone()
    alone: dict[Any, float] = {}
    for number in range(3):
        with torch.no_grad():
            TEACHER.weight.copy_(before)
        alone |= jobs(MeanTeacher(), tmp_path / f"alone {number}", plain=True, numbers=[number])[0]
    with torch.no_grad():
        TEACHER.weight.copy_(before)
    assert jobs(MeanTeacher(), tmp_path / "array")[0] == pytest.approx(alone, rel=1e-9)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("stops", [[], [7], [2, 7]])
def test_a_container_that_becomes_two_is_refused(stops: list[int], tmp_path: Path) -> None:
    alone, _ = jobs(Splits(), tmp_path / "alone", plain=True)
    assert alone != jobs(Sums(), tmp_path / "without", plain=True)[0]
    found, events = jobs(Splits(), tmp_path / "array", *map(StopsAfter, stops))
    assert found == pytest.approx(alone, rel=1e-9)
    reasons = {event.refusal for event in events if isinstance(event, Proven) and event.refusal}
    assert any(reason.startswith("attributes `before`, `now` of a model have become one") for reason in reasons)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("stops", [[], [7], [2, 7]])
def test_gradients_that_add_up_in_a_norm_are_in_checkpoints_and_in_no_array(stops: list[int], tmp_path: Path) -> None:
    alone, _ = jobs(Clipped(), tmp_path / "alone", plain=True)
    found, events = jobs(Clipped(), tmp_path / "array", *map(StopsAfter, stops))
    assert found == alone
    reasons = {event.refusal for event in events if isinstance(event, Proven)}
    assert any(reason.startswith("no optimizer has `layer.weight`, whose gradients then add up") for reason in reasons)


def test_a_model_that_keeps_its_optimizer_stays_in_an_array(tmp_path: Path) -> None:
    alone, _ = jobs(KeepsOptimizer(), tmp_path / "alone", plain=True)
    found, events = jobs(KeepsOptimizer(), tmp_path / "array")
    assert found == pytest.approx(alone, rel=1e-9)
    assert not [event.refusal for event in events if isinstance(event, Proven) and event.refusal]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("kind", [Weighted, Replays])
@pytest.mark.parametrize("plain", [False, True])
def test_a_table_that_fills_late_and_a_replay_buffer_are_each_trials_own(
    kind: type[Sums], plain: bool, tmp_path: Path
) -> None:
    alone: dict[Any, float] = {}
    for number in range(3):
        SEEN.clear()
        alone |= jobs(kind(), tmp_path / f"alone {number}", plain=True, numbers=[number])[0]
    SEEN.clear()
    assert alone != jobs(Sums(), tmp_path / "without", plain=True)[0]
    assert jobs(kind(), tmp_path / "several", plain=plain)[0] == pytest.approx(alone, rel=1e-9)


def test_what_changes_outside_is_each_trials_own_and_told_as_not_resumable(tmp_path: Path) -> None:
    alone, _ = jobs(Centred(), tmp_path / "alone", plain=True)
    assert alone != jobs(Sums(), tmp_path / "without", plain=True)[0]
    found, events = jobs(Centred(), tmp_path / "array", StopsAfter(7))
    assert found == pytest.approx(alone, rel=1e-9)
    notes = [event.note for event in events if isinstance(event, Noted)]
    for trial in range(3):
        assert any(text.startswith(f"trial {trial} cannot be resumed") and "`CENTRE`" in text for text in notes)


@pytest.mark.parametrize("plain", [False, True])
def test_what_is_too_large_for_each_trial_and_changes_is_a_clear_error(
    plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "_MOST_BYTES", 3)
    with pytest.raises(TaskError, match=r"changes `TEACHER.weight`, which all trials of a process share.*part of the"):
        jobs(MeanTeacher(), tmp_path, plain=plain)


def test_a_late_refusal_goes_back_before_what_was_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the sixth step on an array's steps are wrong, and the next check is beside the ninth one."""
    alone, _ = jobs(Sums(), tmp_path / "alone", plain=True)
    right, taken = FusedOptimizer.step, 0

    def faulty(self: FusedOptimizer, *arguments: Any, **options: Any) -> None:
        nonlocal taken
        taken += 1
        right(self, *arguments, **options)
        if taken > 5:
            with torch.no_grad():
                for each in self.array.parameters():
                    each.mul_(1.01)

    monkeypatch.setattr(FusedOptimizer, "step", faulty)
    monkeypatch.setattr(fused_stepper, "modes_to_try", lambda *arguments: ("eager",))
    monkeypatch.setattr(Proof, "_is_affordable", lambda self: taken >= 8)
    found, events = jobs(Sums(), tmp_path / "array")
    reasons = [event.refusal for event in events if isinstance(event, Proven) and event.refusal]
    assert reasons
    assert reasons[0].startswith("parameter of `layer.weight` in the array differs from that alone")
    assert reasons[0].endswith("; reports of epoch 1 and later ones were of such steps, and stay recorded")
    assert taken == 9
    ends = [report.metrics for event in events if isinstance(event, Reported) for report in event.reports]
    assert len(ends) == 3 * 2 + 3 * 3
    assert {key: found[key] for key in alone} == pytest.approx(alone, rel=1e-9)


def test_later_checkpoints_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "000007"
    folder.mkdir(parents=True)
    for name in ("000001-000000-00000000.pt", "000001-000003-00000000.pt", "000002-000000-00000000.pt"):
        (folder / name).touch()
    remove_later_checkpoints(tmp_path, 7, 1, 2)
    assert [path.name for path in checkpoint_files(tmp_path, 7)] == ["000001-000000-00000000.pt"]


def count() -> None:
    COUNTS["steps"] += 1


def fill() -> None:
    TABLES[len(TABLES)] = torch.zeros(1)


def centre() -> None:
    CENTRE.add_(1)


def draw() -> None:
    NUMBERS.random()


def fill_array() -> None:
    ARRAY[0] += 1


@pytest.mark.parametrize(
    ("change", "name"),
    [(count, "COUNTS"), (centre, "CENTRE"), (draw, "NUMBERS"), (fill_array, "ARRAY"), (fill, "TABLES")],
    ids=["dict", "tensor", "generator", "array", "cache"],
)
def test_a_snapshot_sees_and_restores_what_a_function_changes(change: Any, name: str) -> None:
    before = str(NUMBERS.bit_generator.state), COUNTS.copy(), CENTRE.clone(), ARRAY.copy(), TABLES.copy()
    snapshot = Transaction(functions=[change])
    assert snapshot.changed() is None
    change()
    assert snapshot.changed() == name
    assert list(snapshot.changes(entries=False)) == ([] if name == "TABLES" else [name])
    snapshot.restore()
    assert snapshot.changed() is None
    assert (str(NUMBERS.bit_generator.state), COUNTS, CENTRE, ARRAY, TABLES) == before


def test_trials_are_apart_while_their_first_calls_change_something() -> None:
    state, model = OutsideState(task := Centred(), DataSets(task, CPU)), Net()
    state.begin(0, model)
    state.begin(1, model)
    for call in range(1, 4):
        for trial in (0, 1):
            with state.of(trial, model, "step"):
                CENTRE.add_(1.0)
                assert call == CENTRE
    assert state.changed == "CENTRE"
    state.restore_first()
    assert CENTRE == 0
