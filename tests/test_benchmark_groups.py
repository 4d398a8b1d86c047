"""The benchmarks of Fluid: limits of simulated groups hold, and the live tasks can be trained."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import groups_live
from groups import POLICIES, Case, grid
from groups_live import TASKS, run
from search_tasks.pictures import CIFAR, MNIST

import shoal
from shoal.core.space import Space
from shoal.plan.cost.scaling import Scaling


@pytest.mark.parametrize(
    ("case", "least", "most"),
    [
        pytest.param(grid(8, Scaling(2.0, 1.0, 1, 1), sigma=0), 0.99, 1.01, id="c and d of 1"),
        pytest.param(grid(16, Scaling(1.0, 1.0, 2, 1), sigma=0), 1.9, 2.0, id="two share a device for nothing"),
        pytest.param(grid(2, Scaling(2.0, 1.0, 1, 4), sigma=0), 3.5, 4.0, id="two grow to four devices for nothing"),
    ],
)
def test_limits_of_simulated_groups_hold(case: Case, least: float, most: float) -> None:
    before, after = (case.makespan(policy, 0) for policy in POLICIES)
    assert least <= before / after <= most


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small data sets of the shapes of the real ones."""
    rng = np.random.default_rng(0)
    for name, shape in ((CIFAR, (150, 32, 32, 3)), (MNIST, (150, 28, 28))):
        parts = {f"x_{part}": rng.integers(0, 256, shape, dtype=np.uint8) for part in ("train", "test")}
        np.savez(tmp_path / name, y_train=np.arange(150) % 10, y_test=np.arange(150) % 10, **parts)
    words = rng.integers(0, 30000, 1100).astype(np.uint16)
    np.savez(tmp_path / "wikitext2.npz", train=words, valid=words)
    monkeypatch.setattr(groups_live, "DATA", tmp_path)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))  # restored at the end, since a run sets another one
    return tmp_path


@pytest.mark.parametrize("name", TASKS)
def test_a_live_task_can_be_trained(name: str, data: Path) -> None:
    setting = TASKS[name]
    task = setting.task(data, True)
    config = Space(setting.space).sample(0)
    train, valid = task.data(config)
    model = task.model(config)
    batch = tuple(torch.stack(each) for each in zip(*(train[index] for index in range(8)), strict=True))
    assert task.loss(model, batch).isfinite()
    assert task.optimizer(model, config)
    assert len(valid) > 0
    values = {"valid_loss": task.loss(model, batch), **task.metrics(model.eval(), batch)}
    assert values[setting.metric].isfinite()


@pytest.mark.thorough
def test_policies_train_stored_samples_to_the_same_value(data: Path) -> None:
    policies = ("fifo", "water_filling")
    runs = [run(TASKS["stored"], shoal.PBT(2, epochs=4, interval=2), way, quick=True) for way in policies]
    assert runs[0][1] == runs[1][1]
