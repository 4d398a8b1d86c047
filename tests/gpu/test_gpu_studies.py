"""Whole studies on a real GPU: fused, packed, shared by MPS and without, taking turns, out of memory, programs."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_tasks import Clipped, Greedy, Half, Small

import shoal
from shoal.core.event import Outcome
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView
from shoal.run.mps import COMMAND

pytestmark = pytest.mark.gpu

SPACE: Mapping[str, Any] = {"width": shoal.grid([8, 12]), "lr": shoal.grid([0.01, 0.02, 0.04])}
by_mps = pytest.mark.skipif(shutil.which(COMMAND) is None, reason=f"needs {COMMAND} of NVIDIA's driver, not on PATH")


@pytest.fixture(autouse=True)
def own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def searched(
    directory: Path, task: Any = None, space: Mapping[str, Any] = SPACE, **options: Any
) -> dict[int, list[float]]:
    """The losses of every trial, epoch by epoch."""
    given = {"devices": "cuda:0", "algorithm": shoal.Grid(epochs=3), **options}
    shoal.tune(
        task or Small(), space, metric="valid_loss", mode="min", directory=directory, show_progress=False, **given
    )
    with JournalView.read(directory) as journal:
        return {
            row.number: [report.metrics["valid_loss"] for report in journal.curve(row.number)]
            for row in journal.trials()
            if row.state is TrialState.COMPLETE
        }


def as_expected(found: Mapping[int, list[float]], expected: Mapping[int, list[float]], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for number, losses in expected.items():
        assert found[number] == pytest.approx(losses, rel=tolerance), number


@pytest.mark.parametrize("task", [Small, Clipped])
def test_trials_learn_on_a_gpu_what_they_learn_on_a_cpu(task: type[Small], tmp_path: Path) -> None:
    space = SPACE if task is Small else {"lr": shoal.grid([0.01, 0.03]), "rate": shoal.grid([0.1, 0.3])}
    on_cpu = searched(tmp_path / "cpu", task(), space, devices="cpu:1")
    as_expected(searched(tmp_path / "gpu", task(), space), on_cpu, 1e-4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"fuse": False, "packing": "none", "policy": "fifo", "sharing": "plain"}, id="one job at a time"),
        pytest.param({"policy": "ff", "sharing": "plain", "fuse": False, "packing": "none"}, id="side by side"),
        pytest.param({"sharing": "plain"}, id="everything, without MPS"),
        pytest.param({"sharing": "mps"}, id="everything, by MPS", marks=by_mps),
        pytest.param({"sharing": "mps", "policy": "wfd", "fuse": False}, id="a knapsack, by MPS", marks=by_mps),
        pytest.param({"sharing": "auto"}, id="by itself"),
        pytest.param({"policy": "convergence", "fuse": False, "packing": "none", "sharing": "plain"}, id="in turns"),
    ],
)
def test_however_they_are_placed_they_learn_the_same(options: Mapping[str, Any], tmp_path: Path) -> None:
    alone = searched(tmp_path / "alone", fuse=False, packing="none", policy="fifo", sharing="plain", backend="inline")
    as_expected(searched(tmp_path / "study", **options), alone)


def test_a_second_study_measures_nothing(tmp_path: Path) -> None:
    first = searched(tmp_path / "first", sharing="plain")
    as_expected(searched(tmp_path / "second", sharing="plain"), first)
    with JournalView.read(tmp_path / "second") as journal:
        assert not any(job.purpose is Purpose.PROFILE for job in journal.jobs())


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_half_precision(precision: str, tmp_path: Path) -> None:
    space = {"lr": shoal.grid([0.01, 0.02]), "precision": precision}
    found = searched(tmp_path, Half(), space, sharing="plain")
    assert len(found) == 2
    assert all(losses[-1] < losses[0] for losses in found.values())


def test_trials_that_do_not_fit_fail_and_the_others_do_not(tmp_path: Path) -> None:
    space = {"width": shoal.grid([8, 9]), "lr": shoal.grid([0.01, 0.02])}
    found = searched(tmp_path, Greedy(), space, sharing="plain", retries=1)
    assert len(found) == 2
    with JournalView.read(tmp_path) as journal:
        failed = [row for row in journal.trials() if row.state is TrialState.FAILED]
        assert {row.config["width"] for row in failed} == {9}
        assert any(job.outcome == Outcome.OUT_OF_MEMORY for job in journal.jobs())


def program(config: Mapping[str, Any]) -> None:
    x = torch.zeros(3, device="cuda:0", requires_grad=True)
    for _ in range(3):
        loss = (x - config["lr"]).square().sum()
        (gradient,) = torch.autograd.grad(loss, x)
        with torch.no_grad():
            x -= 0.1 * gradient
        shoal.report({"valid_loss": float(loss)})


def test_a_program_of_the_users_own(tmp_path: Path) -> None:
    found = searched(tmp_path, program, {"lr": shoal.grid([0.5, 1.0])})
    assert len(found) == 2
    assert all(losses == sorted(losses, reverse=True) for losses in found.values())
