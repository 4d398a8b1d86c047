"""A worker that is killed while jobs are suspended: all continue, and no number changes."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import tasks
import torch
from plain import check_equal, curves, jobs, plain_loop, tune
from torch import Tensor, nn

import shoal
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.plan.schedule import Convergence

WIDTHS = {"lr": shoal.grid([0.02, 0.1]), "width": shoal.grid([4, 5, 6, 7]), "momentum": 0.5, "step_size": 2}


class KilledOnce(tasks.Momentum):
    """One process is killed in the middle of training as soon as some job has been suspended."""

    def __init__(self, study: Path, marker: Path) -> None:
        self.study, self.marker = study, marker
        self.validated: list[bool] = []  # a task may not be written to while it trains

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, _ = batch
        if not torch.is_grad_enabled() and x.shape[-2] == 8:  # the last batch of a validation, which profiles have not
            self.validated.append(True)
        trains = torch.is_grad_enabled() and self.validated and not self.marker.exists()
        if trains and any(job.outcome == "suspended" for job in jobs(self.study)):
            with suppress(FileExistsError):  # another was faster
                self.marker.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def test_a_worker_that_is_killed_while_others_are_suspended_costs_no_number(tmp_path: Path) -> None:
    task = KilledOnce(tmp_path / "study", tmp_path / "killed")
    study = tune(task, WIDTHS, tmp_path / "study", backend="local", devices="cpu:2", policy=Convergence(0.001))
    rows = [job for job in jobs(study.directory) if job.purpose is Purpose.TRAIN]
    (crashed,) = [job for job in rows if job.outcome == "crashed"]
    assert "was killed by SIGKILL" in crashed.message
    before = [job for job in rows if job.outcome == "suspended" and job.ended < crashed.ended]
    assert before, "nobody was suspended before the worker died"
    assert {row.state for row in study.trials} == {TrialState.COMPLETE}
    assert sorted(row.failures for row in study.trials) == [0] * (8 - len(crashed.trials)) + [1] * len(crashed.trials)
    wanted = {row.number: plain_loop(tasks.Momentum(), row.trial, row.epoch) for row in study.trials}
    check_equal(curves(study.directory), wanted)
