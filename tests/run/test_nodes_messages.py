"""Nodes without processes: what each node has, what a link delivers, and what an agent does; clocks are invented."""

import queue
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
from processes import wait_for

from shoal.core.command import BackendCommand, KillJob, StartJob, StopJob
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import DeviceError
from shoal.core.job import Job, JobUpdate
from shoal.run.base import Backend, Ended, Event, Outcome, Reported, WorkerContext
from shoal.run.nodes.agent import Agent
from shoal.run.nodes.inventory import (
    NodeInventory,
    agent_probe_fault,
    check_nodes,
    cluster_of,
    devices_on,
    first_gpus,
    version_fault,
    versions,
    write_probe,
)
from shoal.run.nodes.link import Carrier, NodeGone, NodeLink, NodeUnreachable
from shoal.run.nodes.messages import (
    AgentMessage,
    AgentSetup,
    MessageBatch,
    NodeEnded,
    NodeJoined,
    NodeState,
    ProcessSettings,
)
from shoal.run.nodes.ray import RayAgent, is_address_of
from shoal.testing.backends import scripted_job

GB = 10**9
CPU = Device("cpu:0", "cpu/1 Invented", GB)


def inventory(*names: str, reason: str = "") -> NodeInventory:
    kind = "cpu/1 Invented" if names and names[0].startswith("cpu") else "H200"
    devices = tuple(Device(name, kind, GB) for name in names)
    return NodeInventory(Cluster((Node("host", 8, devices),) if devices else ()), reason, versions())


@pytest.mark.parametrize(
    ("devices", "on_ash"),
    [
        pytest.param("auto", "auto", id="of every node"),
        pytest.param(["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"], id="names on every node"),
        pytest.param(["ash/cuda:1", "beech/cuda:0"], ["cuda:1"], id="names of nodes"),
        pytest.param("ash/cuda:1", ["cuda:1"], id="one name"),
        pytest.param(["ash/cpu:0", "ash/cpu:2"], "cpu:3", id="slots are cut up to the last one"),
        pytest.param(["beech/cuda:0"], [], id="no part in it"),
    ],
)
def test_a_node_is_asked_for_its_part_of_the_setting(devices: str | list[str], on_ash: str | list[str]) -> None:
    assert devices_on("ash", devices) == on_ash


def test_a_slot_without_a_number_and_a_node_that_is_not_there_are_errors_with_a_remedy() -> None:
    with pytest.raises(
        DeviceError, match="device 'ash/cpu:x' is not understood; the CPU slots of a node are 'ash/cpu:0'"
    ):
        devices_on("ash", "ash/cpu:x")
    with pytest.raises(DeviceError, match="'asch/cuda:0' is of no node of the cluster, whose nodes are: ash, beech"):
        check_nodes(["beech", "ash"], ["ash/cuda:0", "asch/cuda:0"])
    check_nodes(["ash"], ["ash/cuda:0"])
    check_nodes(["ash"], "cuda")


@pytest.mark.parametrize(
    ("there", "gpus", "left", "cores"),
    [
        pytest.param(["cuda:0", "cuda:1", "cuda:2", "cuda:3"], 2, ["cuda:0", "cuda:1"], 4, id="fewer than there are"),
        pytest.param(["cuda:2", "cuda:3"], 1, ["cuda:2"], 8, id="the first of those requested"),
        pytest.param(["cuda:0"], 4, ["cuda:0"], 1, id="more than there are"),
        pytest.param(["cuda:0"], 0, [], 0, id="none"),
        pytest.param(["cpu:0", "cpu:1"], 0, ["cpu:0", "cpu:1"], 1, id="slots are no GPUs"),
    ],
)
def test_a_node_has_no_more_gpus_than_its_cluster_gives_away(
    there: list[str], gpus: int, left: list[str], cores: int
) -> None:
    kept = list(first_gpus(inventory(*there).cluster, gpus))
    assert [device.name for _, device in kept] == left
    assert all(device.cores == cores for _, device in kept)


@pytest.mark.parametrize(
    ("address", "connected_by", "same"),
    [
        pytest.param(None, ("", ""), True, id="any"),
        pytest.param("auto", ("", ""), True, id="the one that is there"),
        pytest.param("10.0.0.1:6379", ("", ""), True, id="its own"),
        pytest.param("head:6379", ("head:6379", "10.0.0.1:6379"), True, id="by which it was reached"),
        pytest.param("head:6379", ("head:6379", "10.0.0.9:6379"), False, id="which reached another before"),
        pytest.param("10.0.0.9:6379", ("head:6379", "10.0.0.1:6379"), False, id="another"),
    ],
)
def test_an_address_stands_for_the_cluster_that_it_reached(
    address: str | None, connected_by: tuple[str, str], same: bool
) -> None:
    assert is_address_of(address, "10.0.0.1:6379", connected_by) is same


def test_what_is_not_installed_is_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "Ray":
            raise metadata.PackageNotFoundError(name)
        return "2.0"

    right = versions() | {"torch": "2.0", "Ray": "2.60.0"}
    monkeypatch.setattr("shoal.run.nodes.inventory.metadata.version", version)
    assert version_fault("ash", versions(), right) == (
        "node ash has Ray none, and the engine has Ray 2.60.0; install the same versions of Python, torch, Ray and "
        "Shoal on all nodes"
    )
    assert not version_fault("ash", versions())


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        pytest.param("cpu:2", ["ash/cpu:0", "ash/cpu:1", "beech/cpu:0"], id="all"),
        pytest.param(["beech/cpu:0"], ["beech/cpu:0"], id="some"),
    ],
)
def test_devices_have_the_names_of_their_nodes(devices: str | list[str], names: list[str]) -> None:
    found = {"ash": inventory("cpu:0", "cpu:1"), "beech": inventory("cpu:0"), "cedar": inventory(reason="none")}
    cluster = cluster_of(found, devices)
    assert [device.name for _, device in cluster] == names
    assert all(device.is_cpu and not device.is_cuda and device.torch_name == "cpu" for _, device in cluster)


def test_a_head_node_without_gpus_is_left_out_where_others_have_some() -> None:
    cluster = cluster_of({"head": inventory("cpu:0"), "ash": inventory("cuda:0", "cuda:1")}, "auto")
    assert [(node.name, device.name) for node, device in cluster] == [("ash", "ash/cuda:0"), ("ash", "ash/cuda:1")]
    assert all(device.is_cuda and device.torch_name == device.local_name for _, device in cluster)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        pytest.param("cuda", "no node has devices='cuda'; ash: there is no driver", id="none"),
        pytest.param(["ash/cuda:7"], "'ash/cuda:7' is not there; the cluster has beech/cuda:0; ash: ", id="one"),
        pytest.param(["beech/cuda:0", "cuda:1"], "device 'cuda:1' is not there", id="of no node"),
    ],
)
def test_what_no_node_has_is_an_error_with_the_reasons_of_nodes(devices: str | list[str], message: str) -> None:
    found = {"ash": inventory(reason="there is no driver")}
    if devices != "cuda":
        found["beech"] = inventory("cuda:0")
    with pytest.raises(DeviceError, match=message):
        cluster_of(found, devices)


def test_nodes_of_different_versions_are_refused_with_both_versions() -> None:
    other = versions() | {"torch": "2.11.0"}
    assert version_fault("ash", versions()) == ""
    fault = version_fault("ash", other)
    assert fault.startswith(f"node ash has torch 2.11.0, and the engine has torch {versions()['torch']}; install")
    with pytest.raises(DeviceError, match="node ash has torch"):
        cluster_of({"ash": replace(inventory("cpu:0"), versions=other)}, "auto")


def test_a_directory_that_is_not_shared_is_told_from_one_that_is(tmp_path: Path) -> None:
    write_probe(tmp_path / "here", "run")
    assert agent_probe_fault(tmp_path / "here", "ash", "run", 0.0) == ""
    assert {path.name for path in (tmp_path / "here" / "agents").iterdir()} == {"run", "run-ash"}
    (tmp_path / "there").mkdir()
    assert "node ash has a directory of that name without" in agent_probe_fault(tmp_path / "there", "ash", "run", 0.0)
    fault = agent_probe_fault(tmp_path / "nowhere", "ash", "run", 0.0)
    assert "is not shared by all nodes: node ash does not have it; choose one on a file system" in fault


class Script(Carrier):
    """A carrier whose fetches return or raise what it is given, and then nothing more."""

    def __init__(self, *answers: MessageBatch | Exception, clock: "Clock | None" = None) -> None:
        self.answers = list(answers)
        self.acknowledged: list[int] = []
        self.posts: list[tuple[int, list[BackendCommand]]] = []
        self.clock = clock

    def post(self, first: int, commands: Sequence[BackendCommand]) -> None:
        self.posts.append((first, list(commands)))

    def fetch(self, acknowledged: int, timeout: float) -> MessageBatch:
        self.acknowledged.append(acknowledged)
        if self.clock is not None:
            self.clock.now += timeout
        answer = self.answers.pop(0) if self.answers else NodeGone("the script is over")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass


class Clock:
    """A clock that continues by itself by a step a look."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


JOINED = NodeJoined(Cluster(()), {})


def reported(number: int) -> Reported:
    return Reported(f"job-{number}", ())


def messages(carrier: Carrier, *commands: BackendCommand, clock: Clock | None = None) -> list[AgentMessage]:
    """All that a link delivers, until its node has ended."""
    inbox: queue.SimpleQueue[tuple[NodeLink, AgentMessage]] = queue.SimpleQueue()
    link = NodeLink("ash", carrier, inbox, lease=15.0, clock=clock or Clock())
    for command in commands:
        link.send(command)
    found: list[AgentMessage] = []
    while not found or not isinstance(found[-1], NodeEnded):
        found.append(inbox.get(timeout=30.0)[1])
    link.close()
    return found


def test_messages_that_come_again_are_delivered_once() -> None:
    one, two, three = map(reported, (1, 2, 3))
    carrier = Script(
        MessageBatch(1, (JOINED, one), 0),
        NodeUnreachable("the answer was lost"),
        MessageBatch(1, (JOINED, one, two), 0),
        MessageBatch(3, (two, three), 0),
        MessageBatch(5, (NodeEnded("done"),), 0),
    )
    assert messages(carrier) == [JOINED, one, two, three, NodeEnded("done")]
    assert carrier.acknowledged == [0, 2, 2, 3, 4]


def test_commands_wait_for_the_agent_and_are_repeated_until_it_has_them() -> None:
    clock = Clock()
    start, stop = StartJob(scripted_job("a"), CPU), StopJob("a")
    carrier = Script(
        NodeUnreachable("not yet"),
        MessageBatch(1, (JOINED,), 0),
        MessageBatch(2, (), 1),
        MessageBatch(2, (), 1),
        MessageBatch(2, (), 2),
        MessageBatch(2, (), 2),
        clock=clock,
    )
    messages(carrier, start, stop, clock=clock)
    assert carrier.posts[0] == (1, [start, stop])
    assert all(post == (2, [stop]) for post in carrier.posts[1:])


@pytest.mark.parametrize("joined", [True, False], ids=["with jobs", "before it has started"])
def test_a_node_is_given_up_only_when_its_lease_is_over(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is made for the time of a lease before that, in which the agent ends its jobs."""
    monkeypatch.setattr("shoal.run.nodes.link._RETRY_SECONDS", 0.0)
    clock = Clock(step=0.1)
    silent = [NodeUnreachable("no answer")] * 40
    carrier = Script(*([MessageBatch(1, (JOINED,), 0)] if joined else []), *silent, clock=clock)
    *_, last = messages(carrier, clock=clock)
    assert isinstance(last, NodeEnded)
    assert last.reason.startswith("its agent could not be reached" if joined else "the script is over")
    assert (len(carrier.acknowledged) < 20) is joined


class Commanded(Script):
    """Sends a command at the end of each fetch, after 10 s, and notes the time of its posts."""

    link: NodeLink | None = None

    def __init__(self, *answers: MessageBatch | Exception, clock: Clock) -> None:
        super().__init__(*answers, clock=clock)
        self.times: list[float] = []

    def post(self, first: int, commands: Sequence[BackendCommand]) -> None:
        assert self.clock is not None
        self.times.append(self.clock.now)

    def fetch(self, acknowledged: int, timeout: float) -> MessageBatch:
        try:
            return super().fetch(acknowledged, timeout)
        finally:
            assert self.clock is not None
            self.clock.now += 10.0
            if self.link is not None:
                self.link.send(StopJob("a"))


def test_commands_do_not_renew_the_lease_of_a_node_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.run.nodes.link._RETRY_SECONDS", 0.005)
    clock = Clock()
    carrier = Commanded(MessageBatch(1, (JOINED,), 0), *[NodeUnreachable("no answer")] * 400, clock=clock)
    inbox: queue.SimpleQueue[tuple[NodeLink, AgentMessage]] = queue.SimpleQueue()
    carrier.link = link = NodeLink("ash", carrier, inbox, lease=200.0, clock=clock)
    wait_for(lambda: link._silent)
    posted = len(carrier.times)
    assert posted > 0
    link.send(StopJob("b"))
    assert len(carrier.times) == posted
    last = carrier.times[-1]
    clock.step = 1.0
    assert inbox.get(timeout=30.0)[1] == JOINED
    assert isinstance(inbox.get(timeout=30.0)[1], NodeEnded)
    assert clock.now > last + 200.0
    assert len(carrier.times) == posted
    link.close()


class Recorder(Backend):
    """A back end that notes its calls, and delivers the events that it is given."""

    calls: list[object]
    to_come: list[Event]

    def __init__(self, worker_context: WorkerContext) -> None:
        super().__init__(worker_context)
        self.calls, self.to_come = [], []
        MADE.append(self)

    def start(self, job: Job, device: Device) -> None:
        self.calls.append(("start", job.id, device.name))

    def stop(self, job: str) -> None:
        self.calls.append(("stop", job))

    def kill(self, job: str) -> None:
        self.calls.append(("kill", job))
        self.to_come.append(Ended(job, Outcome.CRASHED))

    def change(self, job: str, change: JobUpdate) -> None:
        self.calls.append(("change", job))

    def poll(self, timeout: float) -> list[Event]:
        events, self.to_come = self.to_come, []
        return events

    def close(self) -> None:
        self.calls.append("close")


MADE: list[Recorder] = []


def agent(directory: Path, clock: Clock, devices: str = "cpu:1") -> Agent:
    write_probe(directory, "run")
    setup = AgentSetup("ash", WorkerContext(directory, b""), devices, None, None, 15.0, "run")
    return Agent(setup, Recorder, clock)


def fetched(agent: Agent, until: type[AgentMessage]) -> list[AgentMessage]:
    """All messages so far, with one of this type among them."""
    found: list[AgentMessage] = []
    while not any(isinstance(message, until) for message in found):
        found = list(agent.fetch(0, 1.0).messages)
    return found


def test_an_agent_carries_out_each_command_once_and_none_after_a_gap(tmp_path: Path) -> None:
    here = agent(tmp_path, Clock())
    start, stop, kill = StartJob(scripted_job("a"), CPU), StopJob("a"), KillJob("a")
    here.post(1, [start])
    here.post(3, [kill])
    here.post(1, [start, stop])
    here.post(3, [kill])
    fetched(here, NodeState)  # which may come after the end of the job
    joined, *_ = fetched(here, Ended)
    assert isinstance(joined, NodeJoined)
    assert [device.name for _, device in joined.cluster] == ["cpu:0"]
    assert joined.fault == ""
    assert here.close()
    assert MADE[-1].calls == [("start", "a", "cpu:0"), ("stop", "a"), ("kill", "a"), "close"]
    assert here.fetch(0, 0.0).messages[-1] == NodeEnded("its agent was closed")


def test_an_agent_without_calls_for_its_lease_ends_its_jobs(tmp_path: Path) -> None:
    clock = Clock()
    here = agent(tmp_path, clock)
    here.post(1, [StartJob(scripted_job("a"), CPU)])
    fetched(here, NodeState)
    clock.now += 16.0
    here._thread.join(30.0)
    assert MADE[-1].calls[-1] == "close"
    assert here.fetch(0, 0.0).messages[-1] == NodeEnded(
        "its agent had no call from the engine for 16 s, and ended its jobs"
    )


def test_an_agent_without_the_devices_says_which_are_missing(tmp_path: Path) -> None:
    here = agent(tmp_path, Clock(), "cuda:7")
    joined, end = fetched(here, NodeEnded)
    assert isinstance(joined, NodeJoined)
    assert isinstance(end, NodeEnded)
    assert "device 'cuda:7' is not there" in joined.fault == end.reason
    assert end.failed


def test_an_actor_ends_the_agent_of_an_older_run_and_ignores_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.run.nodes.ray.Agent", partial(Agent, make=Recorder))
    actor, process, made = RayAgent(), ProcessSettings.of_this_process(), len(MADE)
    for run in ("older", "newer"):
        write_probe(tmp_path, run)
        actor.begin(AgentSetup("ash", WorkerContext(tmp_path, b""), "cpu:1", None, None, 15.0, run, process=process))
        while not any(isinstance(message, NodeState) for message in actor.fetch(run, 0, 1.0).messages):
            pass
    older, newer = MADE[made:]
    assert older.calls == ["close"]
    assert actor.fetch("older", 0, 0.0) == MessageBatch(1, (), 0)
    actor.post("older", 1, [StartJob(scripted_job("a"), CPU)])
    actor.post("newer", 1, [StartJob(scripted_job("b"), CPU)])
    actor.close("older")
    actor.close("newer")
    assert newer.calls == [("start", "b", "cpu:0"), "close"]
    assert older.calls == ["close"]
