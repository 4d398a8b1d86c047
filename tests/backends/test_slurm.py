"""Nodes that Slurm gives, with programs in place of Slurm's: the contract, recorded commands, and what goes wrong."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

import cloudpickle
import local_scripts as scripts
import psutil
import pytest
from processes import gone
from slurm_clusters import FakeCluster, fake_cluster

from shoal.backends.base import Backend, Ended, Outcome, Reported, WorkerContext
from shoal.backends.nodes.inventory import versions
from shoal.backends.nodes.slurm import Slurm
from shoal.backends.nodes.slurm_commands import SlurmNode, allocated_nodes, requested_nodes
from shoal.core.device import Cluster, Device
from shoal.core.errors import BackendError, DeviceError
from shoal.testing.backends import BACKEND_CHECKS, Devices, MakeBackend, events_until_ended, scripted, scripted_job

ASH, BEECH = DEVICES = (Device("ash/cpu:0", "cpu/1", 2**30), Device("beech/cpu:0", "cpu/1", 2**30))
PATIENCE_SECONDS = 60.0


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """A cluster of two nodes; this process is in no allocation."""
    monkeypatch.setattr("shoal.backends.nodes.slurm._WATCH_SECONDS", 0.2)
    monkeypatch.setattr(Slurm, "_sbatch", None)
    with fake_cluster(tmp_path / "slurm", monkeypatch, ["ash", "beech"]) as made:
        yield made


@pytest.fixture
def allocation(slurm: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A cluster of which this process has both nodes, with variables that are options to Slurm's commands."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "7")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    Slurm.connect()
    return slurm


def poll_until(backend: Slurm, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, (backend._lost, backend._jobs)
        assert backend.poll(0.1) == []


def with_nodes(worker_context: WorkerContext) -> Slurm:
    """A back end whose two nodes have come."""
    backend = Slurm(worker_context)
    try:
        poll_until(backend, lambda: len(backend._inventories) == 2)
    except BaseException:
        backend.close()
        raise
    return backend


@pytest.mark.in_turns(5)
@pytest.mark.usefixtures("allocation")
@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_nodes_of_an_allocation_keep_the_contract(
    check: Callable[[MakeBackend, Path, Devices], None], tmp_path: Path
) -> None:
    check(Slurm, tmp_path / "study", DEVICES)


@pytest.mark.in_turns
@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_nodes_of_batch_jobs_keep_the_contract(
    check: Callable[[MakeBackend, Path, Devices], None], tmp_path: Path
) -> None:
    Slurm.connect(sbatch="--nodes=2")
    check(with_nodes, tmp_path / "study", DEVICES)


def test_a_step_says_what_it_takes_of_its_node(allocation: FakeCluster, tmp_path: Path) -> None:
    with closing(with_nodes(context(tmp_path))):
        (agent,) = agents("ash", tmp_path)
        assert os.getsid(agent.pid) != os.getsid(0), "Ctrl-C of a terminal goes to all processes of its session"
    assert gone(agent.pid)
    for node, call in zip(["ash", "beech"], sorted(allocation.calls("srun")), strict=True):
        options = ["--jobid=12", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
        assert call[:7] == [*options, "--cpus-per-task=1", "--gpus-per-node=0"]
        assert call[7] == sys.executable
    assert allocation.environments() == [[]] * len(allocation.environments())


def test_a_batch_job_has_its_options_and_is_one_node(slurm: FakeCluster, tmp_path: Path) -> None:
    Slurm.connect(sbatch="--nodes=3 --partition=main --comment='of two words'")
    with closing(with_nodes(context(tmp_path))) as backend:
        assert {job["state"] for job in slurm.jobs().values()} == {"RUNNING", "PENDING"}
        assert sorted(device.name for _, device in backend.find("auto")) == ["ash/cpu:0", "beech/cpu:0"]
    test, *calls = slurm.calls("sbatch")
    own, given = ["--job-name=shoal", "--nodes=1"], ["--partition=main", "--comment=of two words"]
    assert test == [*own, "--test-only", "--wrap=true", *given]
    log = tmp_path / "logs" / "agent-%j.log"
    assert calls == [[*own, "--parsable", "--no-requeue", f"--output={log}", f"--error={log}", *given]] * 3
    # the one that waits may begin when the first ends, and end by itself before it is cancelled
    assert {job["state"] for job in slurm.jobs().values()} <= {"CANCELLED", "COMPLETED"}


def test_the_key_is_for_its_user_alone_and_is_gone_after_the_run(allocation: FakeCluster, tmp_path: Path) -> None:
    with closing(Slurm(context(tmp_path))):
        (file,) = (tmp_path / "agents").glob("*.key")
        assert file.stat().st_mode & 0o777 == 0o600
        key = json.loads(file.read_text())["key"]
        assert not any(key in word for call in allocation.calls("srun") for word in call)
    assert not list((tmp_path / "agents").iterdir())


@pytest.mark.usefixtures("allocation")
def test_strangers_and_agents_of_other_runs_are_refused(tmp_path: Path) -> None:
    waiting = WorkerContext(tmp_path, cloudpickle.dumps(scripts.waits), runner="shoal.testing.backends:follow")
    with closing(with_nodes(waiting)) as backend:
        (file,) = (tmp_path / "agents").glob("*.key")
        contact = json.loads(file.read_text())
        address = ("127.0.0.1", contact["port"])
        with socket.create_connection(address), pytest.raises(AuthenticationError):  # a stranger that says nothing
            Client(address, authkey=b"the key of another run")
        with Client(address, authkey=bytes.fromhex(contact["key"])) as old:
            assert isinstance(old, Connection)
            about = {"launch": "1", "node": "ash", "cores": 1, "gpus": [], "versions": versions()}
            old.send_bytes(json.dumps(about).encode())  # that of ash has called
            with pytest.raises(EOFError):
                old.recv()
        backend.start(scripted_job("one"), ASH)
        backend.kill("one")
        assert end_of(backend, "one").outcome is Outcome.CRASHED


def agents(node: str, directory: Path) -> list[psutil.Process]:
    """The processes of a study's agents on a node, without those that they have forked."""
    found = [each for each in psutil.process_iter() if _is_agent(each, node, directory)]
    return [each for each in found if each.ppid() not in [other.pid for other in found]]


def _is_agent(process: psutil.Process, node: str, directory: Path) -> bool:
    with suppress(psutil.Error):
        command = process.cmdline()
        return str(directory) in command and process.environ().get("SLURMD_NODENAME") == node
    return False


def first_report(backend: Backend, job: str, device: Device) -> int:
    """Start a job, and return its process once it has reported."""
    backend.start(scripted_job(job), device)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (events := backend.poll(1.0)):
        assert time.monotonic() < deadline
    (event,) = events
    assert isinstance(event, Reported), event
    return int(event.reports[0].metrics["worker"])


def end_of(backend: Backend, job: str) -> Ended:
    end = events_until_ended(backend, [job])[job][-1]
    assert isinstance(end, Ended)
    return end


@pytest.mark.usefixtures("allocation")
def test_a_killed_agent_loses_its_jobs_and_another_one_starts(tmp_path: Path) -> None:
    with scripted(Slurm, tmp_path, scripts.waits) as backend:
        assert isinstance(backend, Slurm)
        worker = first_report(backend, "one", ASH)
        first_report(backend, "two", BEECH)
        (agent,) = agents("ash", tmp_path)
        agent.kill()
        lost = end_of(backend, "one")
        assert lost.outcome is Outcome.LOST
        assert lost.message.startswith("node ash is gone: srun: error: ash: task 0: Killed\n")
        assert gone(worker)
        poll_until(backend, lambda: "ash" in backend._inventories)
        assert first_report(backend, "again", ASH) != worker
        backend.stop("again")
        backend.stop("two")
        ends = {each[-1] for each in events_until_ended(backend, ["again", "two"]).values()}
        assert ends == {Ended("again", Outcome.STOPPED), Ended("two", Outcome.STOPPED)}


@pytest.mark.usefixtures("allocation")
def test_a_killed_engine_leaves_no_process(tmp_path: Path) -> None:
    code = f"import sys; sys.path[:] = {sys.path}; import test_slurm; test_slurm.hold_a_job({str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        worker = int(engine.stdout.readline())
        (agent,) = agents("ash", tmp_path)
        engine.kill()
    assert gone(worker)
    assert gone(agent.pid)


def hold_a_job(directory: str) -> None:
    """Be an engine, and print the process of its job."""
    with scripted(Slurm, Path(directory), scripts.waits) as backend:
        print(first_report(backend, "one", ASH), flush=True)
        signal.pause()


def test_a_cancelled_job_is_replaced_and_its_trials_are_lost_not_failed(slurm: FakeCluster, tmp_path: Path) -> None:
    Slurm.connect(sbatch="--nodes=1")
    with scripted(Slurm, tmp_path, scripts.waits) as backend:
        assert isinstance(backend, Slurm)
        poll_until(backend, lambda: backend._inventories)
        worker = first_report(backend, "one", ASH)
        subprocess.run(["scancel", "100"], check=True)
        lost = end_of(backend, "one")
        assert lost.outcome is Outcome.LOST
        assert "node ash is gone: its Slurm job 100 has ended (CANCELLED)" in lost.message
        assert gone(worker)
        poll_until(backend, lambda: backend._inventories)
        assert list(slurm.jobs()) == ["100", "101"]
        assert backend._deaths["ash"] == 0
        first_report(backend, "again", ASH)


@pytest.mark.usefixtures("slurm")
def test_a_node_with_another_share_has_another_name(tmp_path: Path) -> None:
    """Its first GPU may be another one than that of an earlier job there."""
    Slurm.connect(sbatch="--nodes=1")
    with closing(Slurm(context(tmp_path))) as backend:
        backend._shares["ash"] = [8, ["GPU-1"]]
        poll_until(backend, lambda: backend._inventories)
        assert [device.name for _, device in backend.find("auto")] == ["ash-2/cpu:0"]


def test_a_study_ends_when_no_job_can_become_a_node(
    slurm: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/no-such-python")
    Slurm.connect(sbatch="--nodes=2")
    with (
        closing(Slurm(context(tmp_path))) as backend,
        pytest.raises(
            BackendError,
            match=r"no node can run jobs any more: job 100: it ended \(FAILED\) before its agent had "
            r"called: .*/bin/no-such-python: not found Log: .*agent-100.log; job 101: ",
        ),
    ):
        poll_until(backend, lambda: False)
    assert len(slurm.jobs()) == 2


def test_a_pending_job_that_is_cancelled_is_not_asked_for_again(slurm: FakeCluster, tmp_path: Path) -> None:
    Slurm.connect(sbatch="--nodes=3")
    with closing(with_nodes(context(tmp_path))) as backend:
        subprocess.run(["scancel", "102"], check=True)
        poll_until(backend, lambda: len(backend._jobs) == 2)
        assert backend._wanted == 2
        assert {node: set(agents(node, tmp_path)) != set() for node in ("ash", "beech")} == {"ash": True, "beech": True}
    assert list(slurm.jobs()) == ["100", "101", "102"]


@pytest.mark.usefixtures("allocation")
def test_the_devices_of_all_nodes_are_found(tmp_path: Path) -> None:
    found = Slurm.discover("auto")
    assert [(node.name, device.name) for node, device in found] == [("ash", "ash/cpu:0"), ("beech", "beech/cpu:0")]
    assert all(device.kind.startswith("cpu/1") for _, device in found)
    assert [device.name for _, device in Slurm.discover(["beech/cpu:0"])] == ["beech/cpu:0"]
    with pytest.raises(DeviceError, match="'cedar/cpu:0' is of no node of the cluster, whose nodes are: ash, beech"):
        Slurm.discover("cedar/cpu:0")


def test_nodes_that_cannot_run_shoal_are_named_before_a_study_begins(
    allocation: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation.set_down("beech")
    with pytest.raises(BackendError, match=r"node beech of the allocation cannot run Shoal: .*Unable to create step"):
        Slurm.discover("auto")
    allocation.set_down()
    mine = {"Python": "3.11.7", "torch": "2.0.0", "Shoal": "0.1.0"}
    monkeypatch.setattr("shoal.backends.nodes.inventory.versions", lambda: mine)
    with pytest.raises(DeviceError, match=r"node ash has .*torch .*, and the engine has .*torch 2\.0\.0.*; install"):
        Slurm.discover("auto")


def test_an_agent_of_other_versions_is_refused_when_it_calls(
    slurm: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slurm.connect(sbatch="")
    mine = {"Python": "3.11.7", "torch": "2.0.0", "Shoal": "0.1.0"}
    monkeypatch.setattr("shoal.backends.nodes.inventory.versions", lambda: mine)
    with (
        closing(Slurm(context(tmp_path))) as backend,
        pytest.raises(BackendError, match=r"node ash cannot be used: node ash has .*torch .*, and the engine has "),
    ):
        poll_until(backend, lambda: False)
    assert len(slurm.jobs()) == 1


@pytest.mark.usefixtures("allocation")
def test_a_directory_that_nodes_do_not_share_is_an_error(tmp_path: Path) -> None:
    class Elsewhere(Slurm):
        def _command(self, launch: str) -> list[str]:
            return [word.replace(str(tmp_path), "/nowhere") for word in super()._command(launch)]

    with (
        closing(Elsewhere(context(tmp_path))) as backend,
        pytest.raises(
            BackendError, match="cannot be used: the directory /nowhere of the study is not shared by all nodes: node "
        ),
    ):
        poll_until(backend, lambda: False)


def test_a_node_that_takes_no_step_is_given_up_after_some_tries(allocation: FakeCluster, tmp_path: Path) -> None:
    allocation.set_down("beech")
    with scripted(Slurm, tmp_path, scripts.returns) as backend:
        assert isinstance(backend, Slurm)
        poll_until(backend, lambda: "beech" in backend._failed and backend._inventories)
        assert "srun: error: Unable to create step" in backend.condition(BEECH).reason
        backend.start(scripted_job("one"), ASH)
        assert end_of(backend, "one").outcome is Outcome.FINISHED


@pytest.mark.parametrize(
    ("sbatch", "message"),
    [
        pytest.param(None, "is for a process in an allocation, and SLURM_JOB_ID is not set; .*--sbatch", id="outside"),
        pytest.param(
            "--partition=nope",
            "partition specified: nope .* called with --sbatch '--partition=nope', and sinfo lists the partitions",
            id="partition",
        ),
        pytest.param("--nodes=2-4", "--nodes among its options is their number.* got '--nodes=2-4'", id="range"),
        pytest.param("-N 100000000", "at most 10000", id="too many"),
        *[pytest.param(each, "there is no --array", id=each) for each in ("--arra=0-3", "-a1-4", "--wait", "--wrap=x")],
        pytest.param("-N 0", "--nodes among its options is their number.* got '-N 0'", id="none"),
        pytest.param("--array=1-4", "there is no --array or .* got '--array=1-4'", id="array"),
        pytest.param("--comment='", "--sbatch takes options of sbatch, got .*No closing quotation", id="quote"),
    ],
)
@pytest.mark.usefixtures("slurm")
def test_wrong_options_are_refused(sbatch: str | None, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        Slurm.connect(sbatch=sbatch)


def test_slurm_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BackendError, match="back end 'slurm' needs 'srun', which is not on PATH"):
        Slurm.connect()
    with pytest.raises(BackendError, match="back end 'slurm' needs 'sbatch', which is not on PATH"):
        Slurm.connect(sbatch="--nodes=2")


@pytest.mark.usefixtures("slurm")
def test_devices_of_nodes_that_are_to_come_have_no_names() -> None:
    Slurm.connect(sbatch="--nodes=2")
    assert Slurm.discover("cuda") == Cluster(())
    with pytest.raises(DeviceError, match=r"names nodes, and with --sbatch Slurm chooses them; .*--nodelist"):
        Slurm.discover(["ash/cuda:0"])


@pytest.mark.parametrize(
    ("options", "number"),
    [("", 1), ("-N4", 4), ("-N 4 -n 8", 4), ("--nodes=4 -p gpu", 4), ("--nodes 4", 4), ("-p gpu --time=1:00", 1)],
)
def test_the_number_of_nodes_is_that_of_sbatch(options: str, number: int) -> None:
    assert requested_nodes(options) == number


def test_the_share_of_each_node_is_read_from_slurm() -> None:
    text = """JobId=4 JobName=job.sh
   JobState=RUNNING Reason=None Dependency=(null)
   NodeList=ash,beech[1-2],cedar
     Nodes=ash CPU_IDs=0-3,8,10-11 Mem=4096 GRES=gpu:a100:2(IDX:0-1),gpu:t4:1(IDX:2)
     Nodes=beech[1-2] CPU_IDs=0 Mem=0 GRES=
     Nodes=cedar CPU_IDs=5 Mem=0 GRES=gpu:4(IDX:0-3),shard:9(1/4,8/8)
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
"""
    names = {"beech[1-2]": ["beech1", "beech2"]}
    assert allocated_nodes(text, lambda each: names.get(each, [each])) == [
        SlurmNode("ash", 7, 3),
        SlurmNode("beech1", 1, 0),
        SlurmNode("beech2", 1, 0),
        SlurmNode("cedar", 1, 4),
    ]


def context(directory: Path) -> WorkerContext:
    return WorkerContext(directory, b"", runner="shoal.testing.backends:follow")
