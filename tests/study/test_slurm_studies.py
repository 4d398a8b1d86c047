"""Studies in Slurm jobs: requeued at the time limit; and on a real Slurm of three nodes, where it is installed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import tasks
from plain import check_equal, curves, digits
from slurm_clusters import RealCluster, fake_cluster, real_cluster

import shoal
from shoal.backends.nodes.slurm import Slurm
from shoal.core.device import Device
from shoal.core.errors import JournalError
from shoal.journal.view import JournalView
from shoal.testing.backends import BACKEND_CHECKS, Devices, MakeBackend

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path
sys.path[:] = {path!r}
from ray_engine import search
study = search(Path({directory!r}), {epochs}, devices="cpu:1")
print("complete:", sum(str(row.state) == "complete" for row in study.trials))
"""


def trains(directory: Path) -> bool:
    with suppress(JournalError), JournalView.read(directory) as journal:
        return any(row.epoch > 3 for row in journal.trials())
    return False


def test_a_job_at_its_time_limit_is_saved_and_requeued_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "study"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(path=sys.path, directory=str(directory), epochs=40))
    command = [sys.executable, "-c", "from shoal.cli.entry_point import main; main()", "run", str(program)]
    with fake_cluster(tmp_path / "slurm", monkeypatch, ["ash"]) as slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as first:
            deadline = time.monotonic() + 120.0
            while not trains(directory):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(first.pid, signal.SIGUSR1)
            _, said = first.communicate(timeout=60.0)
        assert "stopped; everything is saved" in said
        assert said.endswith("shoal: Slurm has put the job back into its queue\n")
        assert slurm.calls("scontrol") == [["requeue", "12"]]
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        again = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=True)
    assert "complete: 8" in again.stdout
    with JournalView.read(directory) as journal:
        assert len(journal.runs()) == 2


def test_a_job_that_starts_again_names_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(shoal.ShoalError, match=r"Slurm has started this job again, .*; set `directory`"):
        shoal.tune(tasks.Blobs(), {}, metric="valid_loss", mode="min", algorithm=shoal.Random(1, 1))


@pytest.fixture(scope="module")
def slurm() -> Iterator[RealCluster]:
    with real_cluster() as made:
        yield made


@pytest.fixture
def allocation(slurm: RealCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealCluster]:
    """All three nodes, for this process."""
    sleep = ["sbatch", "--parsable", "--nodes=3", "--no-kill", "--output=/dev/null", "--wrap=sleep 600"]
    job = subprocess.run(sleep, capture_output=True, text=True, check=True).stdout.strip()
    state = ["squeue", "-h", "--format=%T", f"--jobs={job}"]
    while subprocess.run(state, capture_output=True, text=True, check=True).stdout.strip() != "RUNNING":
        time.sleep(0.1)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setattr(Slurm, "_sbatch", None)
    yield slurm
    subprocess.run(["scancel", job], check=True)


@pytest.mark.thorough
@pytest.mark.usefixtures("allocation")
@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_real_nodes_keep_the_contract(check: Callable[[MakeBackend, Path, Devices], None], tmp_path: Path) -> None:
    check(Slurm, tmp_path, (Device("ash/cpu:0", "cpu/1", 2**30), Device("beech/cpu:0", "cpu/1", 2**30)))


@pytest.mark.thorough
@pytest.mark.usefixtures("allocation")
def test_a_search_on_three_real_nodes_is_the_same_search(tmp_path: Path) -> None:
    found = digits(tmp_path / "slurm", backend="slurm", devices="cpu:1").directory
    check_equal(curves(found), curves(digits(tmp_path / "local", devices="cpu:2").directory))
    with JournalView.read(found) as journal:
        assert {row.name for row in journal.devices()} == {"ash/cpu:0", "beech/cpu:0", "cedar/cpu:0"}
