"""The engine's side of one agent: how calls reach it, and a link that delivers commands and messages exactly once."""

import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from shoal.core.command import BackendCommand, StartJob
from shoal.run.nodes.messages import AgentMessage, MessageBatch, NodeEnded, NodeJoined

__all__ = ["LEASE_SECONDS", "Carrier", "NodeGone", "NodeLink", "NodeUnreachable"]

LEASE_SECONDS = 15.0
"""Seconds without a call of the engine after which an agent ends its jobs. Ray needs 13 s to say that a node died."""

FETCH_SECONDS = 1.0
"""Longest wait of an agent for a message; the link calls at least so often."""
_RETRY_SECONDS = 0.2
_REPEAT_SECONDS = 1.0
"""Seconds after which a command that the agent has not confirmed is sent again."""
_MARGIN_SECONDS = 2.0
"""Seconds for the last call to arrive and for the agent to end its workers."""


class NodeUnreachable(Exception):  # noqa: N818  (a state of the network)
    """A call did not reach its agent, or its answer was lost; a later one may succeed."""


class NodeGone(Exception):  # noqa: N818
    """The process of an agent has ended, with all workers of its node; if `failed`, another one would fail, too."""

    def __init__(self, reason: str, failed: bool = False) -> None:
        super().__init__(reason)
        self.failed = failed


class Carrier(ABC):
    """Carries calls to the agent of one node.

    A link calls `fetch` from a thread of its own, and `post`, `end` and `close` from the engine's thread or from that
    one. Each call may reach the agent or not. A carrier that delivers calls late or twice is no fault.
    """

    @abstractmethod
    def post(self, first: int, commands: Sequence[BackendCommand]) -> None:
        """Call `Agent.post`, and return at once; the link notices by itself if that fails."""

    @abstractmethod
    def fetch(self, acknowledged: int, timeout: float) -> MessageBatch:
        """Call `Agent.fetch` and return the answer; NodeUnreachable: none yet, NodeGone: there will be none."""

    @abstractmethod
    def end(self) -> None:
        """Call `Agent.close`, and return at once."""

    @abstractmethod
    def close(self) -> None:
        """End the agent's process in any way; after `end` wait some seconds for its effect. May be called twice."""


class NodeLink:
    """Sends commands to one agent in their order, and puts its messages into the inbox of the back end, each once.

    The agent's last message is a `NodeEnded`. The link adds one if the agent is gone or cannot be reached. Then it must
    be sure that the agent has ended its jobs: it tries to reach it for the time of a lease, falls silent for the time
    of a lease, in which the agent ends its jobs, and only then declares the end.
    """

    def __init__(
        self,
        node: str,
        carrier: Carrier,
        inbox: "queue.SimpleQueue[tuple[NodeLink, AgentMessage]]",
        lease: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self.joined: NodeJoined | None = None
        self._carrier = carrier
        self._inbox = inbox
        self._lease = lease
        self._clock = clock
        self._lock = threading.Lock()
        self._unconfirmed: list[BackendCommand] = []
        self._confirmed = 0  # number of the last command that the agent has confirmed
        self._posted = clock()
        self._silent = False  # it falls silent, so no call may renew the agent's lease
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shoal-{node}", daemon=True)
        self._thread.start()

    def send(self, command: BackendCommand) -> None:
        """Send a command and return at once; commands wait until the agent has started. A silent link sends none."""
        with self._lock:
            self._unconfirmed.append(command)
            if self.joined is not None and not self._silent:
                self._posted = self._clock()
                self._carrier.post(self._confirmed + len(self._unconfirmed), [command])

    def withdraw(self, job: str) -> bool:
        """Drop the start of a job and its other commands if nothing has been sent to the agent so far."""
        with self._lock:
            if self.joined is not None:
                return False
            kept = [x for x in self._unconfirmed if (x.job.id if isinstance(x, StartJob) else _job(x)) != job]
            self._unconfirmed[:] = kept
            return True

    def end(self) -> None:
        """Ask the agent to end, and return at once; `close` ends one that has not started."""
        self._closed.set()
        if self.joined is not None:
            self._carrier.end()

    def close(self) -> None:
        """End the agent and the link. May be called twice."""
        self._closed.set()
        self._carrier.close()
        self._thread.join(2 * FETCH_SECONDS)

    def _run(self) -> None:
        try:
            self._receive()
        except Exception:  # a bug must not leave a study that waits for ever: the back end raises it
            self._put(NodeEnded(f"the link to its agent failed:\n{traceback.format_exc()}", failed=True))

    def _receive(self) -> None:
        acknowledged, answered = 0, self._clock()
        while not self._closed.is_set():
            called = self._clock()
            try:
                batch = self._carrier.fetch(acknowledged, FETCH_SECONDS)
            except NodeGone as error:
                self._put(NodeEnded(str(error), error.failed))
                return
            except NodeUnreachable as error:
                if self.joined is None:  # it has not started so far: no job runs there, and no lease
                    answered = self._clock()
                elif self._clock() > answered + self._lease:
                    self._be_silent(called)
                    silence = self._clock() - answered
                    self._put(NodeEnded(f"its agent could not be reached for {silence:.0f} s: {error}"))
                    return
                self._closed.wait(_RETRY_SECONDS)
                continue
            answered = self._clock()
            new = batch.messages[max(0, acknowledged + 1 - batch.first) :]
            acknowledged = max(acknowledged, batch.first + len(batch.messages) - 1)
            for message in new:
                self._put(message)
                if isinstance(message, NodeEnded):
                    return
            self._confirm(batch.received)

    def _be_silent(self, called: float) -> None:
        """Wait until the lease is over that the last call has renewed, a fetch or a command; no other call is made."""
        with self._lock:
            self._silent = True
            over = max(called, self._posted) + self._lease + _MARGIN_SECONDS
        while self._clock() < over and not self._closed.is_set():
            self._closed.wait(_RETRY_SECONDS)

    def _put(self, message: AgentMessage) -> None:
        if isinstance(message, NodeJoined):
            with self._lock:
                self.joined = message
                self._post_again()
        self._inbox.put((self, message))

    def _confirm(self, received: int) -> None:
        """Forget commands that have arrived, and repeat those that should have."""
        with self._lock:
            del self._unconfirmed[: max(0, received - self._confirmed)]
            self._confirmed = max(self._confirmed, received)
            if self._unconfirmed and self._clock() > self._posted + _REPEAT_SECONDS:
                self._post_again()

    def _post_again(self) -> None:
        if self._unconfirmed:
            self._posted = self._clock()
            self._carrier.post(self._confirmed + 1, list(self._unconfirmed))


def _job(command: BackendCommand) -> str | None:
    job = getattr(command, "job", None)
    return job if isinstance(job, str) else None
