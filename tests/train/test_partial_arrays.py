"""Trials whose models differ in some submodules train in one array as they do alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract_samples import CPU, Small, trial, work
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.core.array import Array, Member
from shoal.fuse.array import ModelArray
from shoal.train import fused_stepper
from shoal.train.data.datasets import DataSets
from shoal.train.profile import measure
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

EPOCHS = 3
RANKS = (2, 3, 3, 5)


class Adapter(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(16, rank, bias=False)
        self.up = nn.Linear(rank, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.dropout(self.down(x), 0.2, self.training))


class Adapted(Small):
    """Has adapters of several ranks, including none, and Adam in one trial."""

    def model(self, config: Any) -> nn.Module:
        torch.manual_seed(config["number"])
        adapter = Adapter(config["rank"]) if config["rank"] else nn.Identity()
        base = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 16))
        return nn.Sequential(base, adapter, nn.Dropout(0.1), nn.Linear(16, 2)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"], eps=1e-3)


def members(*ranks: int) -> list[Member]:
    return [Member(trial(number, rank=rank), 0, EPOCHS) for number, rank in enumerate(ranks)]


@pytest.mark.parametrize("ranks", [RANKS, (0, 2, 0)])
def test_each_trial_is_as_if_alone(ranks: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ModelArray] = []
    fuse = fused_stepper.fuse
    monkeypatch.setattr(fused_stepper, "fuse", lambda *args, **kw: made.append(fuse(*args, **kw)) or made[-1])
    some = members(*ranks)
    together = work(Adapted(), tmp_path / "together", some)
    assert made[0].partial
    for each in some:
        number = each.trial.number
        alone = work(Adapted(), tmp_path / f"alone {number}", [each])
        mine = [report for report in together if report.trial == number]
        assert len(mine) == len(alone) == EPOCHS
        for one, other in zip(mine, alone, strict=True):
            assert dict(one.metrics) == pytest.approx(dict(other.metrics), rel=1e-9)


class Recomputing(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Checkpointed(Adapted):
    """Recomputes adapters in the backward pass."""

    def model(self, config: Any) -> nn.Module:
        model: Any = super().model(config)
        model[1] = Recomputing(nn.Sequential(model[1].down, model[1].up))
        return model


def test_checkpointed_parts_in_which_members_differ_train_at_once_as_if_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    some = members(*RANKS)
    together = work(Checkpointed(), tmp_path / "together", some)
    assert "plain PyTorch" not in caplog.text
    for each in some:
        number = each.trial.number
        alone = work(Checkpointed(), tmp_path / f"alone {number}", [each])
        mine = [report for report in together if report.trial == number]
        assert [dict(x.metrics) for x in mine] == [pytest.approx(dict(x.metrics), rel=1e-9) for x in alone]


def test_keys_say_what_is_apart_and_what_is_shared() -> None:
    signature_builder = SignatureBuilder(task := Adapted(), DataSets(task, CPU))
    keys = [signature_builder.key(each.trial) for each in members(*RANKS, 0)]
    assert len({key.structure for key in keys}) == 4
    assert len({key.family_key for key in keys}) == 1


def test_a_family_is_measured_as_one_array() -> None:
    sets = DataSets(task := Adapted(), CPU)
    some = members(*RANKS)
    family = SignatureBuilder(task, sets).key(some[0].trial).family_key
    profile = measure(WorkerState(task, sets, TrialCache(), CPU, Path()), Array(family, tuple(some)), memory=1 << 34)
    assert profile.step_seconds.keys() >= {1, 4}
