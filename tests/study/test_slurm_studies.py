"""Studies in Slurm jobs: requeued at the time limit; and on a real Slurm of three nodes, where it is installed."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tasks
from plain import check_equal, curves, digits
from slurm_clusters import RealCluster, fake_cluster, real_cluster
from test_engine_killed import PROGRAM

import shoal
from shoal.backends.nodes.slurm import Slurm
from shoal.core.device import Device
from shoal.journal.view import JournalView
from shoal.testing.backends import BACKEND_CHECKS, Devices, MakeBackend

pytestmark = pytest.mark.slow


def test_a_job_at_its_time_limit_is_saved_and_requeued_and_goes_on(
    shoal: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, marker, program = tmp_path / "study", tmp_path / "sent", tmp_path / "program.py"
    program.write_text(PROGRAM.format(path=sys.path, name="SIGUSR1", marker=str(marker), directory=str(directory)))
    with fake_cluster(tmp_path / "slurm", monkeypatch, ["ash"]) as slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        first = shoal("run", program, cwd=tmp_path)
        assert "stopped; everything is saved" in first.stderr
        assert first.stderr.endswith("shoal: Slurm has put the job back into its queue\n")
        assert slurm.calls("scontrol") == [["requeue", "12"]]
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        again = shoal("run", program, cwd=tmp_path)
    assert again.stdout.endswith("complete\n"), again.stderr
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
