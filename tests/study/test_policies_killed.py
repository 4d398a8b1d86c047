"""A worker or the engine that is killed while jobs are suspended: all go on, and no number changes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import programs
import pytest
import tasks
import torch
from baselines import RoundRobin
from plain import check_equal, curves, jobs, plain_loop, tune
from torch import Tensor, nn
from turns import RULES, Decision, stretches

import shoal
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.schedule import Convergence, Policy

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
        if torch.is_grad_enabled() and self.validated:
            time.sleep(0.02)  # so that a turn ends within an epoch
            if any(job.outcome == "suspended" for job in jobs(self.study)):
                with suppress(FileExistsError):  # another was faster
                    self.marker.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


@pytest.mark.in_turns
@pytest.mark.parametrize("policy", [RoundRobin(quantum=0.001), Convergence(quantum=0.001)], ids=["turns", "slopes"])
def test_a_worker_that_is_killed_while_others_are_suspended_costs_no_number(policy: Policy, tmp_path: Path) -> None:
    task = KilledOnce(tmp_path / "study", tmp_path / "killed")
    study = tune(task, WIDTHS, tmp_path / "study", backend="local", devices="cpu:2", policy=policy)
    rows = [job for job in jobs(study.directory) if job.purpose is Purpose.TRAIN]
    (crashed,) = [job for job in rows if job.outcome == "crashed"]
    assert "was killed by SIGKILL" in crashed.message
    before = [job for job in rows if job.outcome == "suspended" and job.ended < crashed.ended]
    assert before, "nobody was suspended before the worker died"
    assert {row.state for row in study.trials} == {TrialState.COMPLETE}
    assert sorted(row.failures for row in study.trials) == [0] * (8 - len(crashed.trials)) + [1] * len(crashed.trials)
    wanted = {row.number: plain_loop(tasks.Momentum(), row.trial, row.epoch) for row in study.trials}
    check_equal(curves(study.directory), wanted)


KILLED = """
import os, signal, sys, threading, time
sys.path[:0] = [{tests!r}]
import programs, shoal
from shoal.journal.view import JournalView
from shoal.schedule import Convergence

def kill():
    while True:
        time.sleep(0.01)
        try:
            with JournalView.read("study") as journal:
                if len(journal.quanta()) == 3:  # the third job has had its first turn
                    os.kill(os.getpid(), signal.SIGKILL)
        except shoal.ShoalError:
            continue

threading.Thread(target=kill, daemon=True).start()
shoal.tune(
    programs.falls, dict(start=1.0, rate=shoal.grid([0.9, 0.5, 0.99])), metric="loss", mode="min", devices="cpu:1",
    algorithm=shoal.Grid(30), policy=Convergence(quantum=0.1), directory="study", show_progress=False)
"""


def test_suspended_jobs_and_their_losses_survive_a_kill_of_the_engine(tmp_path: Path) -> None:
    """After it the job with the highest recorded convergence runs, not the oldest."""
    script = KILLED.format(tests=str(Path(programs.__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = stretches(tmp_path / "study")
    study = shoal.resume(tmp_path / "study", show_progress=False)
    assert [(row.state, row.epoch) for row in study.trials] == [(TrialState.COMPLETE, 30)] * 3
    found = stretches(study.directory)
    turns = {
        stretch.trials: [turn.losses for each in before if each.trials == stretch.trials for turn in each.turns]
        for stretch in before
    }
    first = found[len(before)]
    waited = dict.fromkeys(turns, 0.0)
    assert first.trials in Decision(first.trials, first.trials, turns, waited).best(RULES["convergence"])
    suspended = {stretch.job.id for stretch in before if stretch.suspended}
    resumed = {stretch.job.resumes for stretch in found} - {""}
    assert suspended <= resumed
    for trials in turns:
        numbers = [turn.number for stretch in found if stretch.trials == trials for turn in stretch.turns]
        assert numbers == [*range(len(numbers))]
