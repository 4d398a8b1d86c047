"""GPUs of a node: its agent discovers and monitors them, the back end shows them to the study; NVML is invented."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pynvml
import pytest
from nvml_samples import GB, Card

from shoal.core.command import BackendCommand
from shoal.core.device import Device
from shoal.core.job import Job, JobUpdate
from shoal.run.base import Backend, Event, WorkerContext
from shoal.run.nodes.agent import Agent
from shoal.run.nodes.backend import Nodes
from shoal.run.nodes.link import Carrier
from shoal.run.nodes.messages import MessageBatch

ASH = "ash/cuda:0"


class Idle(Backend):
    """Runs no job; its first GPU is limited by MPS."""

    def start(self, job: Job, device: Device) -> None: ...
    def stop(self, job: str) -> None: ...
    def kill(self, job: str) -> None: ...
    def change(self, job: str, change: JobUpdate) -> None: ...
    def close(self) -> None: ...

    def poll(self, timeout: float) -> list[Event]:
        return []

    def can_limit_compute(self, device: Device) -> bool:
        return device.name == "cuda:0"


class Direct(Carrier):
    """Calls an agent of this process."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def post(self, first: int, commands: Sequence[BackendCommand]) -> None:
        self.agent.post(first, commands)

    def fetch(self, acknowledged: int, timeout: float) -> MessageBatch:
        return self.agent.fetch(acknowledged, timeout)

    def end(self) -> None:
        self.agent.close(0.0)

    def close(self) -> None:
        assert self.agent.close(10.0)


class OneNode(Nodes):
    def __init__(self, worker_context: WorkerContext) -> None:
        super().__init__(worker_context)
        self.add_node("ash", Direct(Agent(self.setup("ash"), Idle)))

    def look_for_nodes(self) -> None: ...


@pytest.fixture
def nodes(nvml: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneNode]:
    monkeypatch.setattr("shoal.run.nodes.agent._STATE_SECONDS", 0.05)
    nvml.cards = [Card("GPU-a"), Card("GPU-b")]
    with closing(OneNode(WorkerContext(tmp_path, b"", devices="cuda"))) as made:
        until(made, lambda: made.can_limit_compute(Device(ASH, "H200", GB)))
        yield made


def until(nodes: OneNode, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        nodes.poll(0.05)


def test_gpus_have_the_names_of_their_node_and_their_uuids(nodes: OneNode) -> None:
    found = nodes.find("cuda")
    assert [(device.name, device.uuid, device.kind) for _, device in found] == [
        ("ash/cuda:0", "GPU-a", "NVIDIA H200"),
        ("ash/cuda:1", "GPU-b", "NVIDIA H200"),
    ]
    assert all(device.is_cuda and device.healthy for _, device in found)
    assert not nodes.can_limit_compute(found.device("ash/cuda:1"))


def test_a_gpu_that_is_lost_on_its_node_is_lost_in_the_study_and_its_use_is_known(nodes: OneNode, nvml: Any) -> None:
    monitor = nodes.monitor(nodes.find("cuda"))
    nvml.cards[0].held, nvml.cards[0].busy = 3 * GB, 71
    until(nodes, lambda: monitor.conditions(())[ASH].utilisation == 71)
    nvml.cards[0].failing = {"": pynvml.NVMLError_GpuIsLost}
    until(nodes, lambda: not monitor.conditions(())[ASH].healthy)
    conditions = monitor.conditions(())
    assert conditions[ASH].reason == "has fallen off the bus"
    assert conditions["ash/cuda:1"].healthy
