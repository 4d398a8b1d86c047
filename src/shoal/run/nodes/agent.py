"""The agent of a node: one thread that owns a local back end, and the two calls by which the engine reaches it."""

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace

from shoal.core.command import BackendCommand, StartJob
from shoal.core.device import Cluster
from shoal.core.errors import BackendError
from shoal.host.machine import own_addresses
from shoal.host.nvml import NvmlMonitor
from shoal.host.process_lock import remove_abandoned
from shoal.run.base import Backend, Ended, WorkerContext
from shoal.run.local import Local
from shoal.run.nodes.inventory import agent_probe_fault, devices_on, take_node_inventory
from shoal.run.nodes.messages import AgentMessage, AgentSetup, MessageBatch, NodeEnded, NodeJoined, NodeState

__all__ = ["Agent", "python_command"]

_POLL_SECONDS = 0.005
"""Longest wait for events while jobs run; a command waits so long."""
_IDLE_SECONDS = 0.05
"""Longest wait for a command while no job runs."""
_STATE_SECONDS = 3.0


def python_command(function: str, module: str, path: Sequence[str], *arguments: str) -> list[str]:
    """The command of a process that calls a function of a module of Shoal, the same Shoal as the caller's.

    `arguments` are `sys.argv[2:]` there; the module is imported after the module path is set.
    """
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import {function}; {function}()"
    return [sys.executable, "-P", "-u", "-c", code, json.dumps(list(path)), *arguments]


class Agent:
    """Runs the jobs of one node in a local back end, which only the agent's thread uses.

    The engine calls `post` and `fetch`, each from one thread. Commands and messages have numbers, so both sides may
    repeat what may have been lost: a command is carried out once, and a message is kept until it is acknowledged.

    The agent ends its jobs and itself after `close`, after an error of the back end, or if the engine has made no call
    for the time of the lease: it may have started the jobs elsewhere by then.
    """

    def __init__(
        self,
        setup: AgentSetup,
        make: Callable[[WorkerContext], Backend] = Local,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._setup = setup
        self._make = make
        self._clock = clock
        self._commands: queue.SimpleQueue[BackendCommand | None] = queue.SimpleQueue()  # None: close
        self._received = 0
        self._outbox: deque[AgentMessage] = deque()
        self._first = 1  # number of the first message of the outbox
        self._changed = threading.Condition()
        self._last_call = clock()
        self._running: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="shoal-agent", daemon=True)
        self._thread.start()

    def post(self, first: int, commands: Sequence[BackendCommand]) -> None:
        """Take commands; those that were taken before, and those after a gap, are ignored."""
        with self._changed:
            self._last_call = self._clock()
            for number, command in enumerate(commands, first):
                if number == self._received + 1:
                    self._received = number
                    self._commands.put(command)

    def fetch(self, acknowledged: int, timeout: float) -> MessageBatch:
        """Messages after the last one that the engine has (0: none); wait up to `timeout` seconds for the first."""
        with self._changed:
            self._last_call = self._clock()
            while self._outbox and self._first <= acknowledged:
                self._outbox.popleft()
                self._first += 1
            self._changed.wait_for(lambda: self._outbox, timeout)
            return MessageBatch(self._first, tuple(self._outbox), self._received)

    def close(self, timeout: float | None = None) -> bool:
        """End all jobs without a checkpoint; return whether that was done in `timeout` seconds. May be called twice."""
        self._commands.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _send(self, *messages: AgentMessage) -> None:
        if messages:
            with self._changed:
                self._outbox.extend(messages)
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            end = self._serve()
        except BackendError as error:
            end = NodeEnded(str(error), failed=True)
        except Exception:  # a bug must not leave an engine that waits for ever: it goes to the engine in full
            end = NodeEnded(f"its agent failed:\n{traceback.format_exc()}", failed=True)
        self._send(end)

    def _serve(self) -> NodeEnded:
        joined = self._join()
        self._send(joined)
        if joined.fault:
            return NodeEnded(joined.fault, failed=True)
        monitor = NvmlMonitor(joined.cluster)
        starting, due = False, self._clock()
        context = replace(self._setup.worker_context, host=own_addresses()[0])
        with closing(self._make(context)) as backend:
            while self._carry_out_commands(backend):
                if (silence := self._clock() - self._last_call) > self._setup.lease:
                    return NodeEnded(f"its agent had no call from the engine for {silence:.0f} s, and ended its jobs")
                events = backend.poll(_POLL_SECONDS if self._running else 0.0)
                self._running.difference_update(event.job for event in events if isinstance(event, Ended))
                self._send(*events)
                if self._clock() >= due or starting != backend.starting:
                    starting, due = backend.starting, self._clock() + _STATE_SECONDS
                    self._send(self._look(backend, monitor, joined.cluster))
        return NodeEnded("its agent was closed")

    def _join(self) -> NodeJoined:
        setup = self._setup
        remove_abandoned()
        found = take_node_inventory(devices_on(setup.node, setup.devices), setup.cores, setup.gpus)
        directory = setup.worker_context.directory
        fault = found.absence_reason or agent_probe_fault(directory, setup.node, setup.probe, setup.probe_seconds)
        return NodeJoined(found.cluster, found.versions, fault)

    def _carry_out_commands(self, backend: Backend) -> bool:
        """Carry out the commands that are there, or wait for one while no job runs; False: the agent is to end."""
        with suppress(queue.Empty):
            command = self._commands.get(timeout=_IDLE_SECONDS) if not self._running else self._commands.get_nowait()
            while True:
                if command is None:
                    return False
                backend.carry_out(command)
                if isinstance(command, StartJob):
                    self._running.add(command.job.id)
                command = self._commands.get_nowait()
        return True

    def _look(self, backend: Backend, monitor: NvmlMonitor, cluster: Cluster) -> NodeState:
        """The state of the node now; this process and its descendants are the study's."""
        limited = frozenset(device.name for _, device in cluster if backend.can_limit_compute(device))
        return NodeState(monitor.conditions({os.getpid()}), limited, backend.starting)
