"""Studies in Slurm jobs: requeued at the time limit; and on a real Slurm of three nodes, where it is installed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tasks
from plain import check_equal, curves, digits
from processes import wait_for
from ray_engine import search
from slurm_clusters import RealCluster, end_ray, end_steps, fake_cluster, real_cluster
from test_engine_killed import PROGRAM
from test_ray import EPOCHS, outcomes, running_on, when

import shoal
from shoal.core.device import Device
from shoal.journal.view import JournalView
from shoal.run.nodes.slurm import Slurm
from shoal.testing.backends import BACKEND_CHECKS, Devices, MakeBackend

pytestmark = pytest.mark.slow


def test_a_job_at_its_time_limit_is_saved_and_requeued_and_goes_on(
    shoal: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, marker, program = tmp_path / "study", tmp_path / "sent", tmp_path / "program.py"
    values = {"path": sys.path, "name": "SIGUSR1", "marker": str(marker), "directory": str(directory)}
    program.write_text(PROGRAM.format(backend="inline", epochs=6, **values))
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
    pytest.importorskip("ray")
    with real_cluster() as made, end_ray():
        yield made


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def state(job: str) -> str:
    return output("squeue", "-h", "--states=all", "--format=%T", f"--jobs={job}")


@pytest.fixture
def allocation(slurm: RealCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealCluster]:
    """All three nodes, for this process."""
    job = output("sbatch", "--parsable", "--nodes=3", "--no-kill", "--output=/dev/null", "--wrap=sleep 600")
    wait_for(lambda: state(job) == "RUNNING")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    Slurm.connect()
    yield slurm
    end_steps()
    output("scancel", job)
    wait_for(lambda: state(job) == "CANCELLED")


@pytest.mark.thorough
@pytest.mark.usefixtures("allocation")
@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_real_nodes_keep_the_contract(check: Callable[[MakeBackend, Path, Devices], None], tmp_path: Path) -> None:
    Slurm.discover("auto")
    check(Slurm, tmp_path, (Device("ash/cpu:0", "cpu/1", 2**30), Device("beech/cpu:0", "cpu/1", 2**30)))


@pytest.mark.thorough
@pytest.mark.usefixtures("allocation")
def test_a_search_on_three_real_nodes_is_the_same_search(tmp_path: Path) -> None:
    found = digits(tmp_path / "slurm", backend="slurm", devices="cpu:1").directory
    check_equal(curves(found), curves(digits(tmp_path / "local", devices="cpu:2").directory))
    with JournalView.read(found) as journal:
        assert {row.name for row in journal.devices()} == {"ash/cpu:0", "beech/cpu:0", "cedar/cpu:0"}


@pytest.mark.thorough
def test_of_nodes_one_by_one_one_is_warned_of_its_end_and_one_is_killed(
    slurm: RealCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shoal.run")
    directory = tmp_path / "study"

    def end(node: str, *how: str) -> Callable[[], object]:
        return lambda: output(
            "scancel", *how, output("squeue", "-h", "--states=R", "--format=%i", f"--nodelist={node}")
        )

    warned = when(lambda: running_on(directory, "ash"), end("ash", "--signal=TERM", "--batch"))
    killed = when(lambda: running_on(directory, "beech"), end("beech", "--signal=KILL", "--full"))
    study = search(directory, EPOCHS, backend="slurm", sbatch="--nodes=3", devices="cpu:1", packing="none")
    warned.join()
    killed.join()
    check_equal(curves(directory), curves(search(tmp_path / "local", EPOCHS, devices="cpu:2").directory))
    assert "node ash is about to end" in caplog.text
    assert {str(row.state) for row in study.trials} == {"complete"}
    assert all(row.failures == 0 for row in study.trials)
    found = outcomes(directory)
    assert "device lost" in found["ash"] & found["beech"]
    wait_for(lambda: not output("squeue", "-h"))


@pytest.mark.thorough
@pytest.mark.usefixtures("slurm")
def test_a_job_of_three_nodes_that_is_requeued_goes_on(tmp_path: Path) -> None:
    directory, log, program = tmp_path / "study", tmp_path / "log", tmp_path / "program.py"
    where = {"backend": "slurm", "devices": "cpu:1", "packing": "none"}
    program.write_text(
        f"import sys; sys.path[:] = {sys.path}\nfrom ray_engine import search\n"
        f"search({str(directory)!r}, {EPOCHS}, **{where})\nprint('complete')\n"
    )
    script = f"exec {sys.executable} -m shoal run {program}"
    options = ["--parsable", "--nodes=3", "--no-kill", "--requeue", "--open-mode=append", f"--output={log}"]
    job = output("sbatch", *options, f"--wrap={script}")
    wait_for(lambda: running_on(directory, "beech"), 120.0)
    output("scancel", "--signal=USR1", "--batch", job)
    wait_for(lambda: state(job) == "PENDING", 120.0)
    output("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(lambda: state(job) == "COMPLETED", 300.0)
    said = log.read_text()
    assert "stopped; everything is saved" in said
    assert said.count("complete\n") == 1, said
    assert "Traceback" not in said
    with JournalView.read(directory) as journal:
        assert len(journal.runs()) == 2
        assert all(row.failures == 0 for row in journal.trials())
    check_equal(curves(directory), curves(search(tmp_path / "local", EPOCHS, devices="cpu:2").directory))
