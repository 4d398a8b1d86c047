"""Teams of processes compute the gradients of an array: every trial learns as it does on one device."""

from pathlib import Path

import pytest
import torch
from team_samples import TASKS, Leader, member

from shoal.core.event import Outcome, TeamMeasured


@pytest.mark.parametrize("task", sorted(TASKS))
def test_weights_are_those_of_a_lone_training(task: str, tmp_path: Path) -> None:
    members = [member(number, 6) for number in range(3)]
    alone, led = Leader(TASKS[task](), tmp_path / "alone"), Leader(TASKS[task](), tmp_path / "led")
    alone.train(members)
    led.start("one", "two")
    events = led.train(members, {2: lambda leader: leader.want("one", "two")})
    assert set(led.sizes) == {1, 3}
    for each in members:
        torch.testing.assert_close(
            led.weights(each.trial.number), alone.weights(each.trial.number), rtol=1e-9, atol=1e-12
        )
    assert {name: ended.outcome for name, ended in led.outcomes.items()} == {
        "one": Outcome.FINISHED,
        "two": Outcome.FINISHED,
    }
    print(led.sizes, [e for e in events if isinstance(e, TeamMeasured)])
