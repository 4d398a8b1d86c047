"""Messages between the engine and the agents of nodes.

The engine sends commands of the state machine (`StartJob`, `UpdateJob`, `StopJob`, `KillJob`, `ReleaseDevice`) with the
names that devices have on their node. An agent sends one `NodeJoined`, then events of jobs and `NodeState`s, and one
`NodeEnded` as its last message.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from shoal.core.device import Cluster
from shoal.core.event import Event
from shoal.core.job import WorkerContext
from shoal.host.monitor import Condition
from shoal.run.nodes.inventory import PROBE_SECONDS

__all__ = [
    "AgentMessage",
    "AgentSetup",
    "MessageBatch",
    "NodeEnded",
    "NodeJoined",
    "NodeState",
    "ProcessSettings",
]


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of the engine's process for an agent's: arguments, directory ("" if removed), and `OMP_NUM_THREADS`."""

    path: Sequence[str] = ()
    argv: Sequence[str] = ()
    directory: str = ""
    threads: str | None = None

    @classmethod
    def of_this_process(cls) -> Self:
        """The settings of this process."""
        try:
            here = os.getcwd()
        except FileNotFoundError:
            here = ""
        path = [path or here for path in sys.path]
        return cls(path, list(sys.argv), here, os.environ.get("OMP_NUM_THREADS"))

    def apply(self) -> None:
        """Give this process the settings."""
        sys.path[:] = [*self.path, *(path for path in sys.path if path not in self.path)]
        sys.argv[:] = self.argv
        with suppress(OSError):  # the node does not have the directory; no file of a study depends on it
            os.chdir(self.directory or "/")
        os.environ.pop("OMP_NUM_THREADS", None)
        if self.threads is not None:
            os.environ["OMP_NUM_THREADS"] = self.threads


@dataclass(frozen=True)
class AgentSetup:
    """Settings of an agent.

    Args:
        cores: Number of CPU cores that the cluster lets the study use there; None: all.
        gpus: Number of GPUs that the cluster lets the study use there; None: all.
        lease: Seconds without a call of the engine after which the agent ends its jobs.
        probe: Name of a file that the engine has written below `agents` in the study's directory.
    """

    node: str
    worker_context: WorkerContext
    devices: str | Sequence[str]
    cores: int | None
    gpus: int | None
    lease: float
    probe: str
    probe_seconds: float = PROBE_SECONDS
    process: ProcessSettings = field(default_factory=ProcessSettings)


@dataclass(frozen=True)
class NodeJoined:
    """An agent has started on a node with these devices, by their names there; with a `fault` it cannot be used."""

    cluster: Cluster
    versions: Mapping[str, str]
    fault: str = ""


@dataclass(frozen=True)
class NodeState:
    """The state of a node: conditions of devices, those that limit compute, and whether workers import modules yet."""

    conditions: Mapping[str, Condition] = field(default_factory=dict)
    limited: frozenset[str] = frozenset()
    starting: bool = True


@dataclass(frozen=True)
class NodeEnded:
    """An agent has ended all its jobs, and takes no others; if it `failed`, another agent on the node would, too."""

    reason: str
    failed: bool = False


AgentMessage = NodeJoined | NodeState | NodeEnded | Event


@dataclass(frozen=True)
class MessageBatch:
    """The answer of an agent to a fetch: all messages that the engine has not acknowledged, in order.

    `first` is the number of the first one and `received` that of the last command; both sides count from 1.
    """

    first: int
    messages: tuple[AgentMessage, ...]
    received: int
