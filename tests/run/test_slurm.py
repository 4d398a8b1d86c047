"""Nodes that Slurm gives, with programs in place of Slurm's: the contract, recorded commands, and what goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import local_scripts as scripts
import psutil
import pytest
from processes import alive, gone
from slurm_clusters import FakeCluster, end_ray, end_steps, fake_cluster

import shoal.run.nodes.slurm
from shoal.core.device import Cluster, Device
from shoal.core.errors import BackendError, DeviceError
from shoal.run.base import Backend, Ended, Outcome, Reported, WorkerContext
from shoal.run.nodes.slurm import Slurm
from shoal.testing.backends import BACKEND_CHECKS, Devices, MakeBackend, events_until_ended, scripted, scripted_job

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]

ASH, BEECH = DEVICES = (Device("ash/cpu:0", "cpu/1", 2**30), Device("beech/cpu:0", "cpu/1", 2**30))
PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module", autouse=True)
def ray_of_the_module() -> Iterator[None]:
    """The head of a cluster is that of all tests here."""
    with end_ray():
        yield


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """A cluster of two nodes; this process is in no allocation."""
    monkeypatch.setattr("shoal.run.nodes.slurm._WATCH_SECONDS", 0.2)
    monkeypatch.setattr(Slurm, "_sbatch", None)
    with fake_cluster(tmp_path / "slurm", monkeypatch, ["ash", "beech"]) as made:
        yield made
    end_steps()


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


@pytest.mark.in_turns
@pytest.mark.usefixtures("allocation")
@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_nodes_of_an_allocation_keep_the_contract(
    check: Callable[[MakeBackend, Path, Devices], None], tmp_path: Path
) -> None:
    Slurm.discover("auto")
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
        assert os.getsid(node_process("ash").pid) != os.getsid(0), "Ctrl-C of a terminal goes to its whole session"
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
    log = tmp_path / "logs" / "node-%j.log"
    assert calls == [[*own, "--parsable", "--no-requeue", f"--output={log}", f"--error={log}", *given]] * 3
    # the one that waits may begin when the first ends, and end by itself before it is cancelled
    assert {job["state"] for job in slurm.jobs().values()} <= {"CANCELLED", "COMPLETED"}


STRANGER = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info()))
"""


def test_who_has_no_token_is_refused_and_files_are_for_their_user_alone(slurm: FakeCluster, tmp_path: Path) -> None:
    Slurm.connect(sbatch="--nodes=2")
    with closing(with_nodes(context(tmp_path))):
        (file,) = (tmp_path / "agents").glob("*.contact")
        assert file.stat().st_mode & 0o777 == 0o600
        contact = json.loads(file.read_text())
        scripts_of_jobs = [path.read_text() for path in slurm.directory.glob("jobs/*.sh")]
        assert not any(contact["token"] in text for text in [*scripts_of_jobs, str(slurm.calls("sbatch"))])
        assert Slurm._head is not None
        homes = [Slurm._head.logs, *(Path(ray_folder(node_process(node))).parent for node in ("ash", "beech"))]
        assert {home.stat().st_mode & 0o777 for home in homes} == {0o700}
        for token, status in ((None, 1), ("0" * 64, 1), (contact["token"], 0)):
            mode = (
                {"RAY_AUTH_MODE": "disabled"} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
            )
            done = subprocess.run(
                [sys.executable, "-c", STRANGER, contact["address"]],
                env=os.environ | mode,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == status, done.stderr
            assert status == 0 or "InvalidAuthToken" in done.stderr
    assert not list((tmp_path / "agents").iterdir())


def node_process(node: str) -> psutil.Process:
    """The process of a node of this process's cluster that has joined or is to."""
    found = [each for each in psutil.process_iter() if _is_node(each, node)]
    (mine,) = (each for each in found if each.ppid() not in {other.pid for other in found})
    return mine


def _is_node(process: psutil.Process, node: str) -> bool:
    with suppress(psutil.Error):
        environment = process.environ()
        mine = environment.get("FAKE_SLURM") == os.environ["FAKE_SLURM"]
        return mine and environment.get("SLURMD_NODENAME") == node and "be_node" in " ".join(process.cmdline())
    return False


def ray_folder(node: psutil.Process) -> str:
    """The folder of Ray of a node, in the arguments of its processes."""
    words = [word for each in node.children(recursive=True) for word in each.cmdline()]
    return next(word.partition("=")[2] for word in words if word.startswith(("--temp-dir=", "--temp_dir=")))


def agent_process(node: str) -> psutil.Process:
    """The process of an agent on a node."""
    found = [x for x in node_process(node).children(recursive=True) if "ray::RayAgent" in " ".join(x.cmdline())]
    (agent,) = (each for each in found if each.ppid() not in {other.pid for other in found})
    return agent


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


@pytest.mark.in_turns(2)
@pytest.mark.usefixtures("allocation")
@pytest.mark.parametrize("killed", [agent_process, node_process], ids=["agent", "node"])
def test_a_killed_agent_or_node_loses_its_jobs_and_starts_again(
    killed: Callable[[str], psutil.Process], tmp_path: Path
) -> None:
    Slurm.discover("auto")
    with scripted(Slurm, tmp_path, scripts.waits) as backend:
        assert isinstance(backend, Slurm)
        worker = first_report(backend, "one", ASH)
        first_report(backend, "two", BEECH)
        killed("ash").kill()
        lost = end_of(backend, "one")
        assert lost.outcome is Outcome.LOST
        assert lost.message.startswith("node ash is gone: ")
        assert killed is agent_process or "srun: error: ash: task 0: Killed" in lost.message
        assert gone(worker)
        poll_until(backend, lambda: "ash" in backend._inventories)
        assert first_report(backend, "again", ASH) != worker
        backend.stop("again")
        backend.stop("two")
        ends = {each[-1] for each in events_until_ended(backend, ["again", "two"]).values()}
        assert ends == {Ended("again", Outcome.STOPPED), Ended("two", Outcome.STOPPED)}


@pytest.mark.thorough
@pytest.mark.usefixtures("allocation")
def test_of_two_clusters_on_the_same_nodes_one_ends_with_its_killed_engine(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path}; import test_slurm; test_slurm.hold_a_job({str(tmp_path / 'other')!r})"
    )
    (tmp_path / "other").mkdir()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        worker, *others = map(int, engine.stdout.readline().split())
        Slurm.discover("auto")
        with scripted(Slurm, tmp_path / "study", scripts.waits) as backend:
            first_report(backend, "one", ASH)
            engine.kill()
            assert all(gone(each) for each in (worker, *others))
            backend.stop("one")
            assert end_of(backend, "one").outcome is Outcome.STOPPED


def hold_a_job(directory: str) -> None:
    """Be an engine, and print the process of its job, and those of its nodes."""
    Slurm.connect()
    Slurm.discover("auto")
    with scripted(Slurm, Path(directory), scripts.waits) as backend:
        worker = first_report(backend, "one", ASH)
        nodes = [psutil.Process(step._srun.pid) for step in Slurm._steps.values()]
        print(worker, *(each.pid for node in nodes for each in node.children(recursive=True)), flush=True)
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
        assert lost.message.startswith("node ash is gone: ")
        assert gone(worker)
        poll_until(backend, lambda: backend._inventories)
        assert list(slurm.jobs()) == ["100", "101"]
        assert backend._deaths["ash"] == 0
        first_report(backend, "again", ASH)


def test_a_node_that_is_warned_of_its_end_is_left_with_its_jobs_saved_and_is_replaced(
    slurm: FakeCluster, tmp_path: Path
) -> None:
    Slurm.connect(sbatch="--nodes=1")
    with scripted(Slurm, tmp_path, scripts.reports_when_stopped) as backend:
        assert isinstance(backend, Slurm)
        poll_until(backend, lambda: backend._inventories)
        first_report(backend, "one", ASH)
        warned = node_process("ash")
        warned.terminate()
        *reports, lost = events_until_ended(backend, ["one"])["one"]
        assert [type(event) for event in reports] == [Reported], "it was not stopped with a last report"
        assert isinstance(lost, Ended)
        assert lost.outcome is Outcome.LOST
        assert lost.message.startswith("node ash is gone: Ray was told so, by SIGTERM to `ray start`")
        poll_until(backend, lambda: not alive(warned.pid))
        poll_until(backend, lambda: backend._inventories)
        assert list(slurm.jobs()) == ["100", "101"]
        assert backend._deaths["ash"] == 0
        assert backend.condition(ASH).healthy
        first_report(backend, "again", ASH)


@pytest.mark.usefixtures("slurm")
def test_a_node_with_another_share_has_another_name(tmp_path: Path) -> None:
    """Its first GPU may be another one than that of an earlier job there."""
    Slurm.connect(sbatch="--nodes=1")
    with closing(Slurm(context(tmp_path))) as backend:
        backend._shares["ash"] = "eight cores and a GPU"
        poll_until(backend, lambda: backend._inventories)
        assert [device.name for _, device in backend.find("auto")] == ["ash-2/cpu:0"]


def test_a_study_ends_when_no_job_can_become_a_node(
    slurm: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slurm.connect(sbatch="--nodes=2")
    monkeypatch.setattr(sys, "executable", "/bin/no-such-python")
    with (
        closing(Slurm(context(tmp_path))) as backend,
        pytest.raises(
            BackendError,
            match=r"no node can run jobs any more: job 100: it ended \(FAILED\) before it had joined: "
            r".*/bin/no-such-python: not found Log: .*node-100.log; job 101: ",
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
        assert {agent_process(node).is_running() for node in ("ash", "beech")} == {True}
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
    change_versions(monkeypatch, torch="2.0.0")
    with pytest.raises(
        BackendError, match=r"node .* Shoal: node .* has torch .*, and the engine has torch 2\.0\.0; inst"
    ):
        Slurm.discover("auto")


def change_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let nodes find other versions of the engine than its own."""
    assert Slurm._head is not None
    contact = json.loads(Slurm._head.contact)
    monkeypatch.setattr(Slurm._head, "contact", json.dumps(contact | {"versions": contact["versions"] | versions}))


@pytest.mark.thorough
def test_nodes_of_another_ray_are_refused(slurm: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slurm.connect(sbatch="")
    change_versions(monkeypatch, Ray="2.0.0")
    with (
        closing(Slurm(context(tmp_path))) as backend,
        pytest.raises(
            BackendError,
            match=r"no node can run jobs any more: job 100: .*: node ash has Ray .*, and the engine has Ray 2\.0\.0; "
            "install the same versions of Python, torch, Ray and Shoal on all nodes",
        ),
    ):
        poll_until(backend, lambda: False)
    assert len(slurm.jobs()) == 1


@pytest.mark.usefixtures("slurm")
def test_no_ray_and_another_cluster_of_the_process_are_errors_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    Slurm.connect(sbatch="")
    assert ray.is_initialized()
    monkeypatch.setattr(Slurm, "_head", None)
    with pytest.raises(BackendError, match=r"starts one of its own; call ray\.shutdown\(\) first"):
        Slurm.connect(sbatch="")
    monkeypatch.setattr("shoal.run.nodes.ray.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"back end 'slurm' needs Ray, which is not installed\. .*: pip install ray"):
        Slurm.connect(sbatch="")


@pytest.mark.thorough
@pytest.mark.usefixtures("slurm")
def test_a_directory_that_nodes_do_not_share_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slurm.connect(sbatch="")
    elsewhere = ["/nowhere", "a.contact"]
    command = shoal.run.nodes.slurm._command
    monkeypatch.setattr("shoal.run.nodes.slurm._command", lambda label, *study: command(label, *elsewhere))
    with (
        closing(Slurm(context(tmp_path))) as backend,
        pytest.raises(BackendError, match="the directory /nowhere of the study is not shared by all nodes: node ash "),
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


@pytest.mark.thorough
def test_a_node_whose_srun_is_killed_is_used_until_it_dies_and_then_starts_again(
    allocation: FakeCluster, tmp_path: Path
) -> None:
    with scripted(Slurm, tmp_path, scripts.waits) as backend:
        assert isinstance(backend, Slurm)
        poll_until(backend, lambda: len(backend._inventories) == 2)
        first = Slurm._steps["ash"]
        first._srun.kill()
        first._srun.wait()
        backend.nodes()
        assert not first.ended()
        node = node_process("ash")
        first_report(backend, "one", ASH)
        node.kill()
        assert end_of(backend, "one").outcome is Outcome.LOST
        poll_until(backend, lambda: "ash" in backend._inventories)
        assert Slurm._steps["ash"] is not first
        first_report(backend, "again", ASH)
    assert len(allocation.calls("srun")) == 3


@pytest.mark.usefixtures("allocation")
def test_a_node_that_has_left_the_cluster_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Slurm.discover("auto")
    monkeypatch.setattr("shoal.run.nodes.slurm._JOIN_SECONDS", 0.0)
    monkeypatch.setattr("shoal.run.nodes.slurm.living_nodes", lambda known: [])
    with pytest.raises(BackendError, match="node ash of the allocation has not joined the Ray cluster"):
        Slurm.discover("auto")


def test_a_refused_job_leaves_nothing_and_is_asked_for_again_while_there_are_others(
    slurm: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Slurm.connect(sbatch="--nodes=2")
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "killed.contact").touch()
    with monkeypatch.context() as refusing:
        refusing.setattr(Slurm, "_sbatch", "--nodes=2 --partition=nope")
        with pytest.raises(BackendError, match="partition specified: nope"):
            Slurm(context(tmp_path))
    assert not list((tmp_path / "agents").iterdir())
    with closing(with_nodes(context(tmp_path))) as backend:
        with monkeypatch.context() as refusing:
            refusing.setattr(Slurm, "_sbatch", "--nodes=2 --partition=nope")
            subprocess.run(["scancel", "101"], check=True)
            poll_until(backend, lambda: len(backend._jobs) == 1)
            asked = len(slurm.calls("sbatch"))
            poll_until(backend, lambda: len(slurm.calls("sbatch")) > asked)
        poll_until(backend, lambda: len(backend._jobs) == 2)
    assert caplog.text.count("the study continues with the nodes that it has, and asks again") == 1


def test_no_job_is_left_by_a_back_end_that_is_not_made(
    slurm: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slurm.connect(sbatch="--nodes=2")

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.run.nodes.slurm._joined", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Slurm(context(tmp_path))
    # as at the end of a study, a job may end by itself before it is cancelled
    states = [job["state"] for job in slurm.jobs().values()]
    assert len(states) == 2
    assert not {"PENDING", "RUNNING"} & set(states)
    assert not list((tmp_path / "agents").iterdir())


@pytest.mark.usefixtures("slurm")
def test_devices_of_nodes_that_are_to_come_have_no_names() -> None:
    Slurm.connect(sbatch="--nodes=2")
    assert Slurm.discover("cuda") == Cluster(())
    with pytest.raises(DeviceError, match=r"names nodes, and with --sbatch Slurm chooses them; .*--nodelist"):
        Slurm.discover(["ash/cuda:0"])


def context(directory: Path) -> WorkerContext:
    return WorkerContext(directory, b"", runner="shoal.testing.backends:follow")
