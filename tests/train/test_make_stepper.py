"""A single trial is plain PyTorch at once where no graph of its steps can pay, and no helper is there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.core.array import Member
from shoal.core.trial import Trial
from shoal.fuse.capture_decision import CaptureDecision
from shoal.task import Task
from shoal.train.fused_stepper import FusedStepper
from shoal.train.make_stepper import make_stepper
from shoal.train.stepper import PlainStepper
from shoal.train.trial_runtime import TrialRuntime, build

CPU = torch.device("cpu")


class Wide(Task):
    def data(self, config: Any) -> Any:
        raise NotImplementedError

    def model(self, config: Any) -> nn.Module:
        model = nn.Linear(400, 1000)
        model.register_buffer("queue", torch.zeros(500, 400))
        return model

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters())

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch).square().mean()


def single() -> TrialRuntime:
    return build(Wide(), Member(Trial(0, {}, seed=0, data_seed=0), 0, 1), CPU)


@pytest.mark.parametrize(
    ("steps", "divided", "kind"),
    [
        pytest.param(0, False, PlainStepper, id="no step is left to capture one"),
        pytest.param(10, False, FusedStepper, id="it may be captured"),
        pytest.param(0, True, FusedStepper, id="it may have helpers"),
    ],
)
def test_kind(steps: int, divided: bool, kind: type) -> None:
    stepper = make_stepper(Wide(), [single()], compiling=CaptureDecision(None, 1, steps), divided=divided)
    assert (type(stepper), stepper.may_be_array) == (kind, kind is PlainStepper)


@pytest.mark.parametrize("name", ["weight", "queue"])
def test_the_last_of_an_array_does_not_keep_the_memory_of_the_others(name: str) -> None:
    runtime, members = single(), 4
    tensor = getattr(runtime.model, name)
    tensor.data = tensor.detach().expand(members, -1, -1).clone()[0]
    assert tensor.untyped_storage().nbytes() == members * tensor.nbytes
    make_stepper(Wide(), [runtime], compiling=CaptureDecision(None, 1, 0))
    own = getattr(runtime.model, name)
    assert own.untyped_storage().nbytes() == own.nbytes
