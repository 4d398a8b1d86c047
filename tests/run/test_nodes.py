"""Nodes that are processes of this machine: the contract of back ends, and what happens when a node is lost."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import local_scripts as scripts
import psutil
import pytest
from processes import gone
from support.pipes import PipeCarrier, PipeNodes

from shoal.core.device import Device
from shoal.core.errors import BackendError, DeviceError
from shoal.run.base import Backend, Ended, Outcome, Reported, WorkerContext
from shoal.run.nodes.link import NodeUnreachable
from shoal.run.nodes.messages import AgentSetup, MessageBatch
from shoal.testing.backends import BACKEND_CHECKS, Devices, MakeBackend, events_until_ended, scripted, scripted_job

ASH, BEECH = DEVICES = (Device("ash/cpu:0", "cpu/1", 2**30), Device("beech/cpu:0", "cpu/1", 2**30))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_nodes_keep_the_contract(check: Callable[[MakeBackend, Path, Devices], None], tmp_path: Path) -> None:
    check(PipeNodes, tmp_path, DEVICES)


class Partitionable(PipeCarrier):
    """A carrier of which calls can be lost."""

    cut = False

    def fetch(self, acknowledged: int, timeout: float) -> MessageBatch:
        if self.cut:
            raise NodeUnreachable("the network is cut")
        return super().fetch(acknowledged, timeout)


class PatientNodes(PipeNodes):
    """Two nodes that no slowness of a machine loses."""

    def __init__(self, worker_context: WorkerContext) -> None:
        super().__init__(worker_context, lease=600.0)


class PartitionedNodes(PatientNodes):
    """Nodes that can be cut off."""

    def make_carrier(self, setup: AgentSetup) -> Partitionable:
        return Partitionable(setup)


class ImpatientNodes(PartitionedNodes):
    """Such with a short lease."""

    def __init__(self, worker_context: WorkerContext) -> None:
        PipeNodes.__init__(self, worker_context, lease=2.0)


def first_reports(backend: Backend, *jobs: str) -> dict[str, int]:
    """Start these jobs, on ash and beech in turn, until each has reported; their processes."""
    for job, device in zip(jobs, DEVICES, strict=False):
        backend.start(scripted_job(job), device)
    found: dict[str, int] = {}
    deadline = time.monotonic() + 60.0
    while found.keys() != set(jobs):
        assert time.monotonic() < deadline, found
        for event in backend.poll(1.0):
            assert isinstance(event, Reported), event
            found[event.job] = int(event.reports[0].metrics["worker"])
    return found


def end_of(backend: Backend, job: str) -> Ended:
    end = events_until_ended(backend, [job])[job][-1]
    assert isinstance(end, Ended)
    return end


def test_a_node_whose_agent_is_killed_loses_its_jobs_and_no_other_does(tmp_path: Path) -> None:
    with scripted(PipeNodes, tmp_path, scripts.waits) as backend:
        assert isinstance(backend, PipeNodes)
        workers = first_reports(backend, "one", "two")
        backend.carriers["ash"].process.kill()
        lost = end_of(backend, "one")
        assert lost.outcome is Outcome.LOST
        assert lost.message.startswith("node ash is gone: its agent was killed by SIGKILL")
        assert gone(workers["one"])
        condition = backend.condition(ASH)
        assert not condition.healthy
        assert condition.reason == "node ash is gone: its agent was killed by SIGKILL (out of memory?)"
        assert backend.condition(BEECH).healthy
        backend.start(scripted_job("late"), ASH)
        assert end_of(backend, "late").outcome is Outcome.LOST
        backend.stop("two")
        assert end_of(backend, "two").outcome is Outcome.STOPPED


def test_a_node_that_is_about_to_end_is_left_once_its_jobs_are_saved(tmp_path: Path) -> None:
    with scripted(PatientNodes, tmp_path, scripts.reports_when_stopped) as backend:
        assert isinstance(backend, PipeNodes)
        first_reports(backend, "one", "two")
        backend.drain("ash", "its time is over")
        assert backend.condition(ASH).healthy, "its job would be killed"
        backend.start(scripted_job("late"), ASH)
        events = events_until_ended(backend, ["one", "late"])
        assert [type(event) for event in events["one"]] == [Reported, Ended]
        assert [type(event) for event in events["late"]] == [Ended]
        for job in ("one", "late"):
            end = events[job][-1]
            assert isinstance(end, Ended)
            assert end.outcome is Outcome.LOST
            assert end.message.startswith("node ash is gone: its time is over\n")
        assert backend.condition(ASH).reason.endswith(": its time is over")
        while "ash" in backend._links:
            assert backend.poll(0.1) == []
        assert backend.condition(ASH).reason == "node ash is gone: its time is over"
        assert backend._deaths["ash"] == 0
        backend.stop("two")
        assert end_of(backend, "two").outcome is Outcome.STOPPED


def test_a_study_without_any_node_left_ends_with_the_reasons(tmp_path: Path) -> None:
    with scripted(PipeNodes, tmp_path, scripts.waits) as backend:
        assert isinstance(backend, PipeNodes)
        first_reports(backend, "one", "two")
        for carrier in backend.carriers.values():
            carrier.process.kill()
        events_until_ended(backend, ["one", "two"])
        with pytest.raises(BackendError, match=r"no node can run jobs any more: .*ash: its agent was killed by"):
            backend.poll(5.0)


@pytest.mark.thorough
def test_a_partition_for_longer_than_the_lease_ends_the_jobs_on_both_sides(tmp_path: Path) -> None:
    with scripted(ImpatientNodes, tmp_path, scripts.waits) as backend:
        assert isinstance(backend, PipeNodes)
        workers = first_reports(backend, "one", "two")
        cut = backend.carriers["ash"]
        assert isinstance(cut, Partitionable)
        cut.cut = True
        lost = end_of(backend, "one")
        assert not psutil.pid_exists(workers["one"]), "the engine gave up the job before the agent had ended it"
        assert lost.outcome is Outcome.LOST
        assert "its agent could not be reached for" in lost.message
        backend.stop("two")
        assert end_of(backend, "two").outcome is Outcome.STOPPED


def test_a_short_partition_loses_nothing(tmp_path: Path) -> None:
    with scripted(PartitionedNodes, tmp_path, scripts.waits) as backend:
        assert isinstance(backend, PipeNodes)
        first_reports(backend, "one")
        cut = backend.carriers["ash"]
        assert isinstance(cut, Partitionable)
        cut.cut = True
        backend.poll(0.5)
        backend.stop("one")
        cut.cut = False
        assert end_of(backend, "one").outcome is Outcome.STOPPED


def test_workers_end_with_an_engine_that_is_killed(tmp_path: Path) -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}; import test_nodes; test_nodes.hold_a_job({str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        worker = int(engine.stdout.readline())
        engine.kill()
    assert gone(worker)


def hold_a_job(directory: str) -> None:
    """Be an engine, and print the process of its job."""
    with scripted(PipeNodes, Path(directory), scripts.waits) as backend:
        print(first_reports(backend, "one")["one"], flush=True)
        signal.pause()


def late(setup: AgentSetup, node: str) -> Partitionable:
    """The carrier of a node; if it is this one, nothing is heard of it until it `arrives`."""
    carrier = Partitionable(setup)
    carrier.cut = setup.node == node
    return carrier


def arrives(backend: PipeNodes, node: str) -> None:
    carrier = backend.carriers[node]
    assert isinstance(carrier, Partitionable)
    carrier.cut = False


def another_directory(setup: AgentSetup) -> AgentSetup:
    directory = setup.worker_context.directory.with_name("elsewhere")
    directory.mkdir(exist_ok=True)
    return replace(setup, worker_context=replace(setup.worker_context, directory=directory), probe_seconds=0.1)


@pytest.mark.parametrize(
    ("devices", "change", "message"),
    [
        pytest.param(
            "auto",
            another_directory,
            "node ash cannot be used: the directory .*elsewhere of the study is not shared by all nodes: node ash "
            r"has a directory of that name without the engine's file agents/\w+; choose one on a file system",
            id="not shared",
        ),
        pytest.param(
            ["ash/cuda:77"],
            lambda setup: setup,
            "node ash cannot be used: device 'cuda:77' is not there; this machine has",
            id="no such device",
        ),
    ],
)
def test_a_node_that_a_study_cannot_begin_with_is_an_error_once(
    devices: str | list[str], change: Callable[[AgentSetup], AgentSetup], message: str, tmp_path: Path
) -> None:
    """Then the study can stop, as its jobs end, whatever else is faulty."""

    class Changed(PatientNodes):
        def make_carrier(self, setup: AgentSetup) -> PipeCarrier:
            return late(change(setup), "beech")

    with closing(Changed(context(tmp_path, devices))) as backend:
        backend.start(scripted_job("one"), ASH)
        backend.start(scripted_job("two"), BEECH)
        with pytest.raises(BackendError, match=message):
            poll_for_a_minute(backend)
        arrives(backend, "beech")
        ends = events_until_ended(backend, ["one", "two"])
        assert all(isinstance(end, Ended) and end.outcome is Outcome.LOST for (end,) in ends.values())


def test_a_faulty_node_is_no_error_once_another_has_joined(tmp_path: Path) -> None:
    class Changed(PatientNodes):
        def make_carrier(self, setup: AgentSetup) -> PipeCarrier:
            return late(another_directory(setup) if setup.node == "ash" else setup, "ash")

    with scripted(Changed, tmp_path, scripts.waits) as backend:
        assert isinstance(backend, Changed)
        backend.start(scripted_job("two"), BEECH)
        while not backend.poll(1.0):
            pass
        backend.start(scripted_job("one"), ASH)
        arrives(backend, "ash")
        assert "is not shared by all nodes" in end_of(backend, "one").message
        backend.stop("two")
        assert end_of(backend, "two").outcome is Outcome.STOPPED


def test_a_node_without_the_devices_is_left_out_of_a_setting_for_all_nodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Changed(PatientNodes):
        def make_carrier(self, setup: AgentSetup) -> PipeCarrier:
            return late(replace(setup, devices=["cuda:77"]) if setup.node == "ash" else setup, "beech")

    with scripted(Changed, tmp_path, scripts.returns) as backend:
        assert isinstance(backend, Changed)
        while "ash" in backend._links:
            assert backend.poll(0.1) == []
        arrives(backend, "beech")
        while "beech" not in backend._inventories:
            assert backend.poll(0.1) == []
        assert not [record for record in caplog.records if record.name == "shoal.run"]
        assert "node ash is gone: device 'cuda:77' is not there" in backend.condition(ASH).reason
        assert {device.node for _, device in backend.find("auto")} == {"beech"}
        with pytest.raises(DeviceError, match=r"beech/cuda:1 cannot be added: .* shoal resume DIR --devices"):
            backend.find(["beech/cuda:1"])
        backend.start(scripted_job("two"), BEECH)
        assert end_of(backend, "two").outcome is Outcome.FINISHED


class Dying(PipeNodes):
    """A node that gets another agent after each that has died; all but the `living` are killed as they start."""

    nodes_return = True
    living: Sequence[int] = ()
    started = 0

    def __init__(self, worker_context: WorkerContext) -> None:
        super().__init__(worker_context, names=["ash"])

    def make_carrier(self, setup: AgentSetup) -> PipeCarrier:
        carrier = PipeCarrier(setup)
        if self.started not in self.living:
            carrier.process.kill()
        self.started += 1
        return carrier

    def look_for_nodes(self) -> None:
        if self.usable("ash"):
            self.carriers["ash"] = self.make_carrier(self.setup("ash"))
            self.add_node("ash", self.carriers["ash"])


def test_an_agent_that_dies_again_and_again_is_not_replaced_for_ever(tmp_path: Path) -> None:
    with (
        scripted(Dying, tmp_path, scripts.returns) as backend,
        pytest.raises(
            BackendError, match="ash: 5 of its agents ended without a finished job in between, the last one: "
        ),
    ):
        poll_for_a_minute(backend)


def test_a_job_that_finishes_ends_the_count_of_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dying, "living", (4, 8))
    with scripted(Dying, tmp_path, scripts.returns) as backend:
        assert isinstance(backend, Dying)
        for job in ("one", "two"):
            while "ash" not in backend._inventories:
                assert backend.poll(0.1) == []
            backend.start(scripted_job(job), ASH)
            assert end_of(backend, job).outcome is Outcome.FINISHED
            if job == "one":
                backend.carriers["ash"].process.kill()
                while "ash" in backend._inventories:
                    assert backend.poll(0.1) == []
        assert backend.started == 9


def test_an_agent_that_has_not_started_is_not_waited_for(tmp_path: Path) -> None:
    class Stopped(PipeCarrier):
        def end(self) -> None:
            raise AssertionError("it would be waited for")

    class Starting(PipeNodes):
        def make_carrier(self, setup: AgentSetup) -> PipeCarrier:
            carrier = Stopped(setup)
            carrier.process.send_signal(signal.SIGSTOP)
            return carrier

    backend = Starting(context(tmp_path), names=["ash"])
    backend.close()
    assert backend.carriers["ash"].process.returncode == -signal.SIGKILL


def context(directory: Path, devices: str | Sequence[str] = "auto") -> WorkerContext:
    return WorkerContext(directory, b"", runner="shoal.testing.backends:follow", devices=devices)


def poll_for_a_minute(backend: Backend) -> None:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        backend.poll(1.0)
    raise AssertionError("the back end noticed nothing")


def test_a_device_without_a_node_is_refused(tmp_path: Path) -> None:
    with (
        scripted(PipeNodes, tmp_path, scripts.returns) as backend,
        pytest.raises(BackendError, match="'cpu:0' names no node, as in 'ash/cpu:0'"),
    ):
        backend.start(scripted_job("a"), Device("cpu:0", "cpu/1", 2**30))
