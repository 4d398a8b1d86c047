"""Nodes that are processes of this machine, for tests: each agent is a process, reached over two pipes."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from shoal.core.command import BackendCommand
from shoal.run.base import WorkerContext
from shoal.run.launcher import describe_status
from shoal.run.nodes.agent import Agent, python_command
from shoal.run.nodes.backend import Nodes
from shoal.run.nodes.link import LEASE_SECONDS, Carrier, NodeGone, NodeUnreachable
from shoal.run.nodes.messages import AgentSetup, MessageBatch

__all__ = ["PipeCarrier", "PipeNodes", "main"]

_ANSWER_SECONDS = 2.0
"""Longest wait for the answer of an agent after its own time."""
_CLOSE_SECONDS = 15.0
"""Longest wait for an agent to end its jobs; then it is killed, and its workers end with it."""


class PipeNodes(Nodes):
    """Runs jobs on nodes of these names, each an agent process of this machine. A node that has ended does not return.

    Args:
        worker_context: Context of the workers of the study.
        names: Names of the nodes.
        lease: As for `Nodes`.
    """

    def __init__(
        self, worker_context: WorkerContext, names: Sequence[str] = ("ash", "beech"), lease: float = LEASE_SECONDS
    ) -> None:
        super().__init__(worker_context, lease)
        self.carriers: dict[str, PipeCarrier] = {}
        for name in names:
            self.carriers[name] = self.make_carrier(self.setup(name))
            self.add_node(name, self.carriers[name])

    def make_carrier(self, setup: AgentSetup) -> "PipeCarrier":
        """Start an agent."""
        return PipeCarrier(setup)

    def look_for_nodes(self) -> None:
        """Do nothing, as no node comes."""


class PipeCarrier(Carrier):
    """Carries calls to an agent process, which it starts: commands over one pipe, fetches and answers over the other.

    Args:
        setup: Settings of the agent.
    """

    def __init__(self, setup: AgentSetup) -> None:
        self._commands, their_commands = Pipe()
        self._messages, their_messages = Pipe()
        self._waits = False  # for an answer
        log = setup.worker_context.directory / "logs" / f"agent-{setup.node}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptors = [their_commands.fileno(), their_messages.fileno()]
        with their_commands, their_messages, log.open("ab") as output:
            self.process = subprocess.Popen(
                python_command("main", __name__, setup.process.path, *map(str, descriptors)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
                start_new_session=True,
            )
        self._commands.send(setup)

    def post(self, first: int, commands: Sequence[BackendCommand]) -> None:
        """Send the commands."""
        with suppress(OSError):  # the process has ended, as `fetch` notices
            self._commands.send((first, list(commands)))

    def fetch(self, acknowledged: int, timeout: float) -> MessageBatch:
        """Send the call and wait for the answer; an answer that is late is waited for again."""
        try:
            if not self._waits:
                self._messages.send((acknowledged, timeout))
                self._waits = True
            if not self._messages.poll(timeout + _ANSWER_SECONDS):
                raise NodeUnreachable("no answer")
            batch: MessageBatch = self._messages.recv()
        except (EOFError, OSError) as error:
            raise NodeGone(f"its agent {describe_status(self.process.wait())}") from error
        self._waits = False
        return batch

    def end(self) -> None:
        """Close the pipe of commands."""
        self._commands.close()

    def close(self) -> None:
        """Wait for the end of the process if it was asked to end, then kill it."""
        if self._commands.closed:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_CLOSE_SECONDS)
        self._commands.close()
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Be the agent; the arguments of the program are the module path and the descriptors of the two pipes."""
    commands, messages = (Connection(int(descriptor)) for descriptor in sys.argv[2:4])
    setup: AgentSetup = commands.recv()
    setup.process.apply()
    agent = Agent(setup)
    threading.Thread(target=_answer, args=(messages, agent), name="shoal-messages", daemon=True).start()
    with suppress(EOFError, OSError):  # the engine has closed the pipe, or ended
        while True:
            agent.post(*commands.recv())
    agent.close()
    os._exit(0)


def _answer(messages: Connection, agent: Agent) -> None:
    with suppress(EOFError, OSError):  # likewise
        while True:
            messages.send(agent.fetch(*messages.recv()))
