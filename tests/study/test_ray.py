"""Studies on a Ray cluster of several nodes, all on this machine: equal to local ones, whatever happens to nodes."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from plain import check_equal, curves, digits
from ray_engine import search

import shoal
from shoal.core.device import Device
from shoal.core.errors import BackendError, DeviceError, JournalError
from shoal.core.job import Job
from shoal.journal.view import JournalView
from shoal.run.base import Ended, Event, JobControl, Reported
from shoal.run.nodes.ray import Ray
from shoal.testing.backends import (
    BACKEND_CHECKS,
    Devices,
    MakeBackend,
    events_until_ended,
    scripted,
    scripted_job,
)

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode  # noqa: E402
from ray_clusters import clustered, connect  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]

ASH, BEECH = (Device(f"{node}/cpu:0", "cpu/1", 2**30) for node in ("ash", "beech"))
PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    with clustered("ash", "beech") as made:
        yield made


@pytest.fixture
def cluster(two_nodes: Cluster) -> Cluster:
    connect(two_nodes)
    return two_nodes


@pytest.mark.thorough  # fast, tests/run/test_nodes.py checks it with agents that need no Ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_the_back_end_keeps_the_contract(check: Callable[[MakeBackend, Path, Devices], None], tmp_path: Path) -> None:
    check(Ray, tmp_path, (ASH, BEECH))


@pytest.mark.usefixtures("cluster")
def test_a_search_over_nodes_is_the_same_search(tmp_path: Path) -> None:
    over_ray = digits(tmp_path / "ray", backend="ray", devices="cpu:1")
    local = digits(tmp_path / "local", devices="cpu:2")
    check_equal(curves(over_ray.directory), curves(local.directory))
    with JournalView.read(over_ray.directory) as journal:
        assert {row.name for row in journal.devices()} == {"ash/cpu:0", "beech/cpu:0"}
        assert all(row.kind.startswith("cpu/1") for row in journal.devices())
        assert {job.device for job in journal.jobs()} <= {"ash/cpu:0", "beech/cpu:0"}
    assert not list((over_ray.directory / "agents").iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The search that is disturbed, on this machine alone."""
    return search(tmp_path_factory.mktemp("undisturbed") / "study", EPOCHS, devices="cpu:2").directory


EPOCHS = 40


def running_on(directory: Path, node: str) -> bool:
    """Whether a training job runs on a node, and has reported."""
    try:
        with JournalView.read(directory) as journal:
            jobs = {job.id for job in journal.jobs(running=True) if job.device.startswith(f"{node}/")}
            return any(row.job in jobs and row.epoch > 3 for row in journal.trials())
    except JournalError:  # there is no study so far
        return False


def when(condition: Callable[[], bool], action: Callable[[], object]) -> threading.Thread:
    """A thread that acts once this is so."""

    def wait() -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def outcomes(directory: Path) -> dict[str, set[str]]:
    """Node, "" for this machine without a cluster -> outcomes of jobs there."""
    found: dict[str, set[str]] = {}
    with JournalView.read(directory) as journal:
        for job in journal.jobs():
            found.setdefault(job.device.rpartition("/")[0], set()).add(str(job.outcome))
    return found


@pytest.mark.thorough
def test_jobs_of_a_node_that_dies_go_on_elsewhere(undisturbed: Path, tmp_path: Path) -> None:
    directory = tmp_path / "study"
    with clustered("ash", "beech") as cluster:
        (beech,) = cluster.worker_nodes
        acting = when(lambda: running_on(directory, "beech"), lambda: cluster.remove_node(beech, allow_graceful=False))
        study = search(directory, EPOCHS, backend="ray", devices="cpu:1")
        acting.join()
    check_equal(curves(directory), curves(undisturbed))
    assert "device lost" in outcomes(directory)["beech"]
    assert all(row.failures == 0 for row in study.trials)
    assert {str(row.state) for row in study.trials} == {"complete"}


def agents() -> list[psutil.Process]:
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if "ray::RayAgent" in " ".join(each.cmdline()):
                found.append(each)
    return found


def kill_the_agents() -> int:
    """Kill the processes of all agents; how many there were."""
    killed = agents()
    for each in killed:
        each.kill()
    psutil.wait_procs(killed, 10.0)
    return len(killed)


@pytest.mark.thorough
def test_an_agent_that_is_killed_is_replaced(undisturbed: Path, tmp_path: Path, cluster: Cluster) -> None:
    directory = tmp_path / "study"

    acting = when(lambda: running_on(directory, "ash"), kill_the_agents)
    search(directory, EPOCHS, backend="ray", devices="cpu:1")
    acting.join()
    check_equal(curves(directory), curves(undisturbed))
    found = outcomes(directory)
    assert all({"device lost", "finished"} <= found[node] for node in ("ash", "beech"))


@pytest.mark.thorough
def test_a_node_that_is_new_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.study.devices.DISCOVERY_SECONDS", 1.0)
    directory = tmp_path / "study"
    with clustered("ash") as cluster, ThreadPoolExecutor(1) as threads:  # only a main thread can add a node
        alone = {"packing": "none", "policy": "fifo"}
        study = threads.submit(search, directory, 6 * EPOCHS, backend="ray", devices="cpu:1", **alone)
        when(lambda: running_on(directory, "ash"), lambda: None).join()
        cluster.add_node(num_cpus=1, node_name="beech")
        assert {str(row.state) for row in study.result().trials} == {"complete"}
    assert "finished" in outcomes(directory)["beech"]


@contextmanager
def engine(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """The process of an engine, with the arguments of `ray_engine.py`."""
    program = [sys.executable, str(Path(__file__).with_name("ray_engine.py")), *map(str, arguments)]
    with subprocess.Popen(program, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        yield process


def kill_after(reports: int, process: subprocess.Popen[bytes], directory: Path) -> None:
    """Kill an engine when the study has so many reports more."""
    wanted = reported(directory) + reports
    deadline = time.monotonic() + PATIENCE_SECONDS
    while reported(directory) < wanted:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()


@pytest.mark.thorough
def test_a_study_goes_on_after_its_engine_was_killed(undisturbed: Path, tmp_path: Path, cluster: Cluster) -> None:
    directory = tmp_path / "study"
    for kill in (True, True, False):
        with engine(directory, EPOCHS, "cpu:1", cluster.address) as process:
            if kill:
                kill_after(40, process, directory)
        assert kill or process.returncode == 0
    check_equal(curves(directory), curves(undisturbed))


@pytest.mark.thorough
@pytest.mark.parametrize("over_ray", [False, True], ids=["this machine", "a node of the cluster"])
def test_a_study_that_is_killed_on_one_node_goes_on_on_two(
    over_ray: bool, undisturbed: Path, tmp_path: Path, cluster: Cluster
) -> None:
    directory = tmp_path / "study"
    where = ("ash/cpu:0", cluster.address) if over_ray else ("cpu:1",)
    with engine(directory, EPOCHS, *where) as process:
        kill_after(40, process, directory)
    begun = {"ash" if over_ray else ""}
    assert outcomes(directory).keys() == begun
    study = shoal.resume(directory, backend="ray", ray_address=cluster.address, devices="cpu:1", show_progress=False)
    check_equal(curves(directory), curves(undisturbed))
    assert {str(row.state) for row in study.trials} == {"complete"}
    found = outcomes(directory)
    assert found.keys() == begun | {"ash", "beech"}
    assert "finished" in found["ash"] & found["beech"]


def reported(directory: Path) -> int:
    try:
        with JournalView.read(directory) as journal:
            return sum(row.epoch for row in journal.trials())
    except JournalError:
        return 0


@pytest.mark.thorough
def test_a_node_that_others_hold_is_said_to_be_waited_for(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.run.nodes.backend._JOIN_SECONDS", 0.0)

    class Holder:  # defined here, so that Ray need not import it
        def ready(self) -> bool:
            return True

    (beech,) = cluster.worker_nodes
    here = OnNode(beech.node_id, soft=False)
    holder = ray.remote(num_cpus=1)(Holder).options(scheduling_strategy=here).remote()
    ray.get(holder.ready.remote())
    with scripted(Ray, tmp_path, reports_at_once) as backend:
        assert isinstance(backend, Ray)
        backend.start(scripted_job("one"), ASH)
        backend.start(scripted_job("two"), BEECH)
        events_until_ended(backend, ["one"])
        assert backend.condition(ASH).healthy
        reason = backend.condition(BEECH).reason
        assert "all CPUs and GPUs that Ray has there; free are 0 CPUs and 0 GPUs; there are actor " in reason
        assert "Holder of job " in reason
        ray.kill(holder)
        events_until_ended(backend, ["two"])
        assert backend.condition(BEECH).healthy


@pytest.mark.usefixtures("cluster")
def test_the_next_study_of_a_process_has_the_agents_of_the_last(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two", "three"):
        if name == "three":
            assert kill_the_agents() >= 2
        assert {device.node for _, device in Ray.discover("cpu:1")} == {"ash", "beech"}
        with scripted(Ray, tmp_path / name, reports_at_once) as backend:
            for job, device in (("one", ASH), ("two", BEECH)):
                backend.start(scripted_job(job), device)
            ends = events_until_ended(backend, ["one", "two"])
        assert [str(each[-1].outcome) for each in ends.values() if isinstance(each[-1], Ended)] == ["finished"] * 2
        found.append({each.pid for each in agents()})
    first, second, third = found
    assert first == second
    assert not first & third


def reports_at_once(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield Reported(job.id, ())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        pytest.param(
            "127.0.0.1:1", r"no Ray cluster answers at '127.0.0.1:1': .*refused; `ray start --head`", id="dead"
        ),
        pytest.param(".:6379", "no Ray cluster answers at '.:6379'", id="no name of a host"),
        pytest.param("127.0.0.1:99999", "is that of its head node", id="no port of TCP"),
        pytest.param("nowhere", "is that of its head node, such as '10.0.0.1:6379'", id="no port"),
        pytest.param("ray://127.0.0.1:10001", "and not through a Ray client", id="client"),
    ],
)
def test_a_wrong_address_is_refused_before_there_is_a_directory(address: str, message: str, tmp_path: Path) -> None:
    ray.shutdown()
    with pytest.raises(BackendError, match=message):
        digits(tmp_path / "study", backend="ray", ray_address=address)
    assert not (tmp_path / "study").exists()


def test_an_address_of_another_cluster_or_for_another_back_end_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"is connected to the Ray cluster at .*, so it cannot use '10.0.0.1:6379'"):
        digits(tmp_path / "study", backend="ray", ray_address="10.0.0.1:6379")
    with pytest.raises(BackendError, match=r"`ray_address` is for backend='ray', got '10.0.0.1:6379'"):
        digits(tmp_path / "study", backend="local", ray_address="10.0.0.1:6379")


def test_nodes_of_other_versions_and_missing_devices_are_refused(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError, match="device 'ash/cuda:0' is not there; the cluster has "):
        digits(tmp_path / "study", backend="ray", devices=["ash/cuda:0"])
    mine = {"Python": "3.11.7", "torch": "2.0.0", "Shoal": "0.1.0"}
    monkeypatch.setattr("shoal.run.nodes.inventory.versions", lambda: mine)
    with pytest.raises(
        DeviceError, match=r"node ash has .*torch .*, and the engine has .*torch 2\.0\.0.*; install the same"
    ):
        digits(tmp_path / "study", backend="ray", devices="cpu:1")
    assert not (tmp_path / "study").exists()


def test_no_ray_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.run.nodes.ray.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"needs Ray, which is not installed. Install it with: pip install ray"):
        Ray.connect(None)


def test_a_cluster_without_a_free_gpu_is_waited_for_and_no_agent_is_on_a_node_without_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    class Trainer:
        def ready(self) -> bool:
            return True

    # a GPU that there is not: "auto" means CPU slots
    cedar = cluster.add_node(num_cpus=1, num_gpus=1, node_name="cedar")
    try:
        holder = ray.remote(num_gpus=1)(Trainer).options(name="others").remote()
        ray.get(holder.ready.remote())
        assert {device.node for _, device in Ray.discover("auto")} == {"cedar"}
        with scripted(Ray, tmp_path, reports_at_once) as backend:
            assert isinstance(backend, Ray)
            assert not backend.usable("cedar")
            assert backend.usable("ash"), "a node without a GPU has an agent"
            backend.start(scripted_job("one"), Device("cedar/cpu:0", "cpu/1", 2**30))
            assert backend.poll(3.0) == []
            reason = backend.waiting_reason("cedar")
            assert " CPUs and 0 GPUs; there are actor " in reason
            assert "Trainer 'others' of job " in reason
            ray.kill(holder)
            assert [type(event) for event in events_until_ended(backend, ["one"])["one"]] == [Reported, Ended]
            assert backend.usable("ash")
    finally:
        cluster.remove_node(cedar)
