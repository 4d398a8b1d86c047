"""An engine that is killed with signal 9 in the middle of training: its study is gone on with, and learns the same."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import tasks
from plain import check_plain, jobs

from shoal.api import resume
from shoal.core.trial import TrialState
from shoal.results import Study

PROGRAM = """
import signal, sys
from pathlib import Path
sys.path[:] = {path!r}
import shoal, tasks
from plain import tune
space = {{"lr": shoal.grid([0.01, 0.03]), "width": shoal.grid([6, 8]), "momentum": 0.9, "step_size": 2}}
tune(tasks.Signals(signal.{name}, Path({marker!r})), space, Path({directory!r}), algorithm=shoal.Grid(40),
     backend="local", devices="cpu:2", checkpoint_seconds=0.0)
print("complete")
"""


def test_a_study_whose_engine_is_killed_goes_on_as_if_it_had_not_been(
    shoal: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    directory, marker, program = tmp_path / "study", tmp_path / "sent", tmp_path / "program.py"
    program.write_text(PROGRAM.format(path=sys.path, name="SIGKILL", marker=str(marker), directory=str(directory)))
    done = shoal("run", program, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert TrialState.COMPLETE not in {row.state for row in Study(directory).trials}
    study = resume(directory, show_progress=False)
    assert [(row.state, row.epoch) for row in study.trials] == [(TrialState.COMPLETE, 40)] * 4
    assert "orphaned" in {job.outcome for job in jobs(directory)}
    check_plain(study, tasks.Momentum())
