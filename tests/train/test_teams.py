"""Teams of processes compute the gradients of an array: every trial learns as it does on one device."""

import signal
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from team_samples import (
    TASKS,
    Counting,
    HalfPrecision,
    InBatch,
    Leader,
    Noisy,
    OtherBase,
    OwnStep,
    Perceptron,
    Single,
    member,
)
from torch import Tensor, nn

from shoal.core.array import Member
from shoal.core.event import Event, Outcome, TeamMeasured
from shoal.core.job import JobUpdate
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture_decision import CaptureDecision
from shoal.fuse.shard import IndivisibleStepError
from shoal.task import Task
from shoal.train import fused_stepper
from shoal.train.team import leader
from shoal.train.team.leader import GradientSnapshot


@pytest.fixture(autouse=True)
def own_history() -> None:
    """All tests have one environment, so that their back ends share a server, which imports torch once."""


@cache
def alone(task: Callable[[], Task], number: int, epochs: int) -> dict[str, Tensor]:
    """Return the final weights of a trial that is trained by itself."""
    with TemporaryDirectory() as directory:
        single = Leader(task(), Path(directory))
        single.train([member(number, epochs)])
        return single.weights(number)


def check_equal(led: Leader, task: Callable[[], Task], members: Iterable[Member], relative: float = 1e-9) -> None:
    """Compare the final weights of trials with those that they have by themselves."""
    for each in members:
        expected = alone(task, each.trial.number, each.target)
        torch.testing.assert_close(led.weights(each.trial.number), expected, rtol=relative, atol=1e-3 * relative)


def notes(events: Iterable[Event]) -> list[str]:
    return [event.note for event in events if isinstance(event, TeamMeasured)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["cnn", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("bert", "mlp", "lora"))]
)
def test_team_grows_and_shrinks_while_members_leave_and_join(task: str, tmp_path: Path) -> None:
    members = [member(number, 3 if number == 2 else 6) for number in range(4)]
    led = Leader(TASKS[task](), tmp_path / "led")
    led.start("one", "two")

    def swap(leader: Leader) -> None:
        leader.control.change(JobUpdate(leave=frozenset({1}), join=(leader.array(members[3]),)))

    def grow(leader: Leader) -> None:
        leader.start("three", "four")
        leader.want("two", "three", "four")

    led.train(
        members[:3],
        {2: lambda leader: leader.want("one", "two"), 5: swap, 8: lambda leader: leader.want("two"), 10: grow},
    )
    assert list(dict.fromkeys(led.sizes)) == [1, 3, 2, 4]
    assert {ended.outcome for ended in led.outcomes.values()} == {Outcome.FINISHED}
    remaining = [members[0], members[2], members[3]]
    check_equal(led, TASKS[task], remaining)


@pytest.mark.in_turns(8)
@pytest.mark.parametrize(
    ("task", "count"),
    [
        ("mlp", 1),
        ("cnn", 1),
        ("bert", 3),
        ("lora", 3),
        ("lstm", 3),
        ("flagged", 2),
        ("head", 2),
        ("masked", 2),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("mlp", 3), ("cnn", 3), ("bert", 1), ("lora", 1))
        ),
    ],
)
def test_weights_are_those_of_a_lone_training(task: str, count: int, tmp_path: Path) -> None:
    members = [member(number, 4) for number in range(count)]
    led = Leader(TASKS[task](), tmp_path / "led")
    led.start("one")
    led.train(members, {2: lambda leader: leader.want("one")})
    assert set(led.sizes) == {1, 2}
    assert led.outcomes["one"].outcome is Outcome.FINISHED
    check_equal(led, TASKS[task], members)


def never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CaptureDecision, "can_pay", lambda decision, records, batches: False)


def test_a_trial_that_is_not_captured_becomes_an_array_with_its_first_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_captured(monkeypatch)
    steps: list[int] = []

    def fused(models: Sequence[nn.Module], *arguments: Any, **options: Any) -> ModelArray:
        steps.append(len(led.sizes))
        return fuse(models, *arguments, **options)

    monkeypatch.setattr(fused_stepper, "fuse", fused)
    led = Leader(Perceptron(), tmp_path / "led")
    led.start("one")
    led.train([member(0, 4)], {2: lambda leader: leader.want("one")})
    assert 2 <= steps[0] <= led.sizes.index(2)
    check_equal(led, Perceptron, [member(0, 4)])


class Hooked(Perceptron):
    """Cannot be an array, as one of its parameters has a hook."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        next(model.parameters()).register_hook(lambda grad: grad)
        return model


@pytest.mark.parametrize("error", [None, TypeError])
def test_helpers_are_refused_where_a_trial_can_be_no_array(
    error: type[Exception] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_captured(monkeypatch)
    if error is not None:
        monkeypatch.setattr(fused_stepper, "fuse", Mock(side_effect=error("no such attribute")))
    task = Hooked if error is None else Perceptron
    led = Leader(task(), tmp_path / "led")
    led.start("one")
    (note,) = notes(led.train([member(0, 4)], {2: lambda leader: leader.want("one")}))
    assert ("hook" if error is None else "TypeError") in note
    assert set(led.sizes) == {1}
    assert led.outcomes["one"].outcome is Outcome.FINISHED
    check_equal(led, task, [member(0, 4)])


def test_killed_helper_costs_its_step_only(tmp_path: Path) -> None:
    members = [member(number, 4) for number in range(2)]
    led = Leader(TASKS["cnn"](), tmp_path / "led")
    led.start("one", "two")
    led.train(
        members,
        {2: lambda leader: leader.want("one", "two"), 4: lambda leader: leader.signal("one", signal.SIGKILL)},
    )
    assert list(dict.fromkeys(led.sizes)) == [1, 3, 2], "the other helper continues"
    assert led.outcomes["one"].outcome is Outcome.CRASHED
    assert led.outcomes["two"].outcome is Outcome.FINISHED
    check_equal(led, TASKS["cnn"], members)


def test_helper_that_hangs_counts_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "PEER_SECONDS", 2.0)
    members = [member(number, 4) for number in range(2)]
    led = Leader(Perceptron(), tmp_path / "led")
    led.start("one")
    led.train(
        members,
        {
            2: lambda leader: leader.want("one"),
            6: lambda leader: leader.signal("one", signal.SIGSTOP),
            9: lambda leader: leader.signal("one", signal.SIGKILL),
        },
    )
    assert list(dict.fromkeys(led.sizes)) == [1, 2]
    assert led.sizes[-4:] == [1] * 4
    check_equal(led, Perceptron, members)


def test_helpers_that_are_lost_several_times_are_tried_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "MAX_LOSSES", 1)
    members = [member(number, 4) for number in range(2)]
    led = Leader(Perceptron(), tmp_path / "led")
    led.start("one", "two")
    events = led.train(
        members,
        {2: lambda leader: leader.want("one", "two"), 5: lambda leader: leader.signal("one", signal.SIGKILL)},
    )
    assert "helpers were lost 1 times" in notes(events)
    assert led.sizes[-8:] == [1] * 8
    check_equal(led, Perceptron, members)


def test_a_later_check_that_fails_goes_back_to_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "CHECK_INTERVAL", 3)
    check, checks = GradientSnapshot.check, []

    def second_fails(self: GradientSnapshot, other: GradientSnapshot, relative: float) -> None:
        check(self, other, relative)
        checks.append(self)
        if len(checks) == 2:
            raise IndivisibleStepError("a later batch is another one")

    monkeypatch.setattr(GradientSnapshot, "check", second_fails)
    members = [member(number, 4) for number in range(2)]
    led = Leader(Perceptron(), tmp_path / "led")
    led.start("one")
    events = led.train(members, {2: lambda leader: leader.want("one")})
    assert notes(events)[-1] == "a later batch is another one"
    assert list(dict.fromkeys(led.sizes)) == [1, 2]
    assert led.sizes[-4:] == [1] * 4
    check_equal(led, Perceptron, members)


def test_leader_that_cannot_be_reached_trains_alone(tmp_path: Path) -> None:
    members = [member(number, 2) for number in range(2)]
    (tmp_path / "led").mkdir()
    (tmp_path / "led" / "teams").write_text("no directory")
    led = Leader(Perceptron(), tmp_path / "led")
    events = led.train(members, {1: lambda leader: leader.want("one")})
    (note,) = notes(events)
    assert note.startswith("helpers cannot connect to job leader")
    check_equal(led, Perceptron, members)


@pytest.mark.in_turns(6)
@pytest.mark.parametrize(
    ("task", "count", "reason"),
    [
        (InBatch, 2, "is not a mean over samples"),
        pytest.param(InBatch, 1, "is not a mean over samples", marks=pytest.mark.thorough),
        (Noisy, 2, "draws random numbers"),
        (OwnStep, 2, "overrides `step`"),
        (OtherBase, 2, "'base.bias' of trial 0 differs"),
        (Single, 2, "a batch of 1 samples is too small"),
        (Counting, 2, "keeps state in `Sequential`"),
    ],
)
def test_steps_that_cannot_be_divided_are_refused_in_words(
    task: Callable[[], Task], count: int, reason: str, tmp_path: Path
) -> None:
    members = [member(number, 4) for number in range(count)]
    led = Leader(task(), tmp_path / "led")
    led.start("one")
    events = led.train(members, {2: lambda leader: leader.want("one")})
    (note,) = notes(events)
    assert reason in note
    assert set(led.sizes) == {1}
    (measured,) = [event for event in events if isinstance(event, TeamMeasured)]
    assert measured.seconds.keys() <= {1}
    if task is not OtherBase:
        check_equal(led, task, members)


def test_small_batch_is_taken_alone_and_half_precision_is_divided(tmp_path: Path) -> None:
    members = [member(number, 3) for number in range(2)]
    led = Leader(HalfPrecision(), tmp_path / "led")
    led.start("one")
    events = led.train(members, {1: lambda leader: leader.want("one")})
    assert set(notes(events)) <= {""}
    assert set(led.sizes) == {1, 2}
    check_equal(led, HalfPrecision, members, relative=0.1)
