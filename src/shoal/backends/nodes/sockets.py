"""Agents that call the engine over TCP: the engine's listener and carrier, and the agent's side of the connection.

The address of the engine and the key of its run are in a file of the study's directory, which only its user can read. A
connection without the key is refused. When a connection breaks, the agent ends its jobs and itself.
"""

import json
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from shoal.backends.nodes.agent import Agent
from shoal.backends.nodes.inventory import version_fault
from shoal.backends.nodes.link import Carrier, NodeGone, NodeUnreachable
from shoal.backends.nodes.messages import AgentSetup, MessageBatch
from shoal.cluster.machine import own_addresses
from shoal.core.command import BackendCommand

__all__ = ["AgentListener", "Launch", "SocketCarrier", "call_engine"]

_log = logging.getLogger("shoal.backends")

_ANSWER_SECONDS = 2.0
"""Longest wait for the answer of an agent after its own time."""
_CLOSE_SECONDS = 15.0
"""Longest wait for an agent to end its jobs; then its process is ended."""
_STALL_SECONDS = 10
"""Longest wait for the rest of a message, and for each step of the handshake."""
_CALL_SECONDS = 30.0
"""Seconds for which an agent tries to reach the engine, and for which it waits for its settings."""
_ACCEPT_PAUSE_SECONDS = 1.0
"""Pause after a connection that could not be accepted."""
_GREETING_BYTES = 2**16


class Launch(ABC):
    """An agent that a scheduler was asked to start, and that is to call the engine; its name is unique in a run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.greeting: Mapping[str, Any] = {}
        """First message of the agent, on its node: node, cores, gpus (UUIDs), versions. Empty until it has called."""
        self.connection: Connection | None = None

    @abstractmethod
    def ended(self) -> NodeGone | None:
        """Return how the agent's process ended; None while it may live."""

    @abstractmethod
    def close(self, seconds: float) -> None:
        """End the agent's process after waiting so long for its own end. May be called twice."""


class AgentListener:
    """Accepts the calls of agents on a free port of all addresses of this machine.

    The addresses and the key are in a new file of mode 0600.
    """

    def __init__(self, file: Path) -> None:
        self._key = secrets.token_bytes(32)
        self._closed = threading.Event()
        self._launches: dict[str, Launch] = {}
        self._socket = socket.create_server(("", 0), backlog=128)
        hosts, port = [*own_addresses(), socket.gethostname()], self._socket.getsockname()[1]
        contact = {"key": self._key.hex(), "hosts": hosts, "port": port}
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as output:
            json.dump(contact, output)
            output.flush()
            os.fsync(output.fileno())
        threading.Thread(target=self._accept, name="shoal-listener", daemon=True).start()

    def expect(self, launch: Launch) -> None:
        """Accept the call of the agent of a launch."""
        self._launches[launch.name] = launch

    def close(self) -> None:
        """Accept no calls any more. May be called twice."""
        self._closed.set()
        with suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                if not self._closed.wait(_ACCEPT_PAUSE_SECONDS):
                    _log.warning("an agent could not be accepted: %s", error)
            else:
                threading.Thread(target=self._admit, args=(peer,), name="shoal-caller", daemon=True).start()

    def _admit(self, peer: socket.socket) -> None:
        """Give a launch its connection; one without the key is closed, and so is a second one of a launch."""
        with suppress(OSError, EOFError, AuthenticationError):
            connection = _connection(peer)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            greeting = json.loads(connection.recv_bytes(_GREETING_BYTES))
            if launch := self._launches.pop(greeting["launch"], None):
                launch.greeting, launch.connection = greeting, connection


class SocketCarrier(Carrier):
    """Carries calls over the connection that the agent of a launch makes."""

    def __init__(self, setup: AgentSetup, launch: Launch) -> None:
        self._setup = setup
        self._launch = launch
        self._writing = threading.Lock()
        self._begun = False
        self._waits = False  # for an answer
        self._ending = False

    def post(self, first: int, commands: Sequence[BackendCommand]) -> None:
        """Send the commands."""
        with suppress(OSError):  # the connection is broken, as `fetch` notices
            self._send(("post", first, list(commands)))

    def fetch(self, acknowledged: int, timeout: float) -> MessageBatch:
        """Send the call and wait for the answer; an answer that is late is waited for again."""
        connection = self._launch.connection
        if connection is None:
            raise self._launch.ended() or NodeUnreachable("it has not called the engine")
        try:
            if not self._begun:
                self._begin()
            if not self._waits:
                self._send(("fetch", acknowledged, timeout))
                self._waits = True
            if not connection.poll(timeout + _ANSWER_SECONDS):
                raise NodeUnreachable("no answer")
            batch: MessageBatch = connection.recv()
        except (EOFError, OSError) as error:
            raise self._launch.ended() or NodeUnreachable("its connection to the engine broke") from error
        self._waits = False
        return batch

    def end(self) -> None:
        """Send the end."""
        self._ending = True
        with suppress(OSError):  # likewise
            self._send(None)

    def close(self) -> None:
        """Wait for the end of the process if it was asked to end, then end it."""
        self._launch.close(_CLOSE_SECONDS if self._ending else 0.0)

    def _begin(self) -> None:
        if fault := version_fault(self._setup.node, self._launch.greeting["versions"]):
            raise NodeGone(fault, failed=True)
        self._send(self._setup)
        self._begun = True

    def _send(self, message: object) -> None:
        if self._launch.connection is not None:
            with self._writing:
                self._launch.connection.send(message)


def call_engine(file: Path, greeting: Mapping[str, Any]) -> None:
    """Be an agent: call the engine and serve its calls. All jobs have ended when this returns.

    It returns when the engine has asked for the end, when the connection breaks, or after the time of the lease without
    a call. `greeting` is `Launch.greeting` with the name of the launch as "launch"; `file` is that of `AgentListener`.
    """
    contact = json.loads(file.read_text(encoding="utf-8"))
    connection = _call(contact["hosts"], contact["port"], bytes.fromhex(contact["key"]))
    connection.send_bytes(json.dumps(greeting).encode())
    if not connection.poll(_CALL_SECONDS):
        return
    try:
        setup: AgentSetup = connection.recv()
    except (EOFError, OSError):  # the engine does not expect this agent any more
        return
    setup.process.apply()
    agent = Agent(replace(setup, cores=greeting["cores"]))
    fetches: queue.SimpleQueue[Sequence[Any]] = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(connection, agent, fetches), name="shoal-messages", daemon=True).start()
    with suppress(EOFError, OSError):
        while connection.poll(setup.lease):
            match connection.recv():
                case ("post", *arguments):
                    agent.post(*arguments)
                case ("fetch", *arguments):
                    fetches.put(arguments)
                case _:
                    break
    agent.close()


def _answer(connection: Connection, agent: Agent, fetches: "queue.SimpleQueue[Sequence[Any]]") -> None:
    with suppress(OSError):  # the connection is broken
        while True:
            connection.send(agent.fetch(*fetches.get()))


def _call(hosts: Sequence[str], port: int, key: bytes) -> Connection:
    """A connection to the engine, at the first of its addresses that has the key."""
    deadline = time.monotonic() + _CALL_SECONDS
    while True:
        faults = []
        for host in hosts:
            try:
                connection = _connection(socket.create_connection((host, port), _STALL_SECONDS))
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
                return connection
            except (OSError, EOFError, AuthenticationError) as error:
                faults.append(f"{host}: {error or 'it closed the connection'}")
        if time.monotonic() > deadline:
            raise ConnectionError(
                f"the engine does not answer at port {port} ({'; '.join(faults)}): it has ended, or the machine of the "
                "engine cannot be reached from nodes by TCP"
            )
        time.sleep(1.0)


def _connection(peer: socket.socket) -> Connection:
    """Return a connection over a socket that sends at once, and waits for the rest of a message only so long."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STALL_SECONDS, 0))
    return Connection(peer.detach())
