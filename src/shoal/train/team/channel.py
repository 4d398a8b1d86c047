"""Connections of the processes of a team: helpers meet their leader by a `TCPStore` in its process; then all use gloo.

1. The leader writes its address to `teams/<its job>` in the study's directory, and what it trains to the store.
2. A helper builds the same array, and announces itself as ready.
3. Between two steps, the leader calls the helpers of the next team, which answer; a helper that does not is left out.
4. The leader writes the members of the team, and all connect.

The keys begin with a secret of the address file, which only the user can read.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

__all__ = ["Channel", "HelperSide", "LeaderSide", "PeerLostError", "address_path"]

CONNECT_SECONDS = 10.0
"""Longest time that the processes take to connect to each other."""

IDLE_SECONDS = 0.1
"""Interval at which a waiting helper polls for requests."""

ANSWER_SECONDS = 0.5
"""Longest time that a leader waits for the answers to its call."""

POLL_SECONDS, ANSWER_POLL_SECONDS = 0.01, 0.0005
"""Intervals of polling the store: of a helper that waits for a call, and of processes that form a team."""

_ENDED = "ended"
"""Version of what is trained once the leader has ended."""


class PeerLostError(Exception):
    """Another process of the team ended, hangs, or has left. The channel cannot be used any more.

    It is no `RuntimeError`, which would let a function of an array run in another way instead.
    """


def address_path(directory: Path, leader: str) -> Path:
    """Path of the file with the address of a leader, which `leader` names by the id of its job."""
    return directory / "teams" / leader


class LeaderSide:
    """The leader's side of the rendezvous; hosts the store, which helpers reach at `host`."""

    def __init__(self, directory: Path, job: str, host: str) -> None:
        server = socket.create_server((host, 0))
        server.settimeout(None)  # that of `socket.setdefaulttimeout` is not for the store
        port, secret = server.getsockname()[1], secrets.token_hex(16)
        own = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        self.store = PrefixStore(secret, own)
        self.host = host
        self.generation = 0
        self._version = 0
        self._called: dict[str, str] = {}
        self._path = address_path(directory, job)
        self._path.parent.mkdir(exist_ok=True)
        self._write([host, port, secret])

    def publish(self, content: bytes) -> None:
        """Publish what is trained from now on; helpers that were ready build it anew."""
        self._version += 1
        self.store.set("content", content)  # type: ignore[arg-type]  # the stubs lack bytes
        self.store.set("version", str(self._version))

    def ready(self, helpers: Iterable[str]) -> list[str]:
        """Return those of these helpers that have built what is trained, and wait for a call."""
        found = []
        for helper in helpers:
            if self.store.check([f"ready/{helper}"]):
                announced = self.store.get(f"ready/{helper}").decode()
                if announced.startswith(f"{self._version}:") and self._called.get(helper) != announced:
                    found.append(helper)
        return sorted(found)

    def refusal(self) -> str:
        """Reason for which a helper cannot take part in what is trained; "" if there is none."""
        key = f"refused/{self._version}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def call(self, helpers: Iterable[str]) -> None:
        """Call helpers to the next team, of which those of the present one are informed by the leader's message."""
        for helper in helpers:
            self._called[helper] = self.store.get(f"ready/{helper}").decode()
            self.store.set(f"call/{helper}/{self._called[helper]}", str(self.generation))

    def gather(self, leader: str, helpers: Collection[str]) -> list[str]:
        """Return the members of the next team: the leader, and those of the called helpers that answer."""
        deadline = time.monotonic() + ANSWER_SECONDS
        waiting = set(helpers)
        while waiting and time.monotonic() < deadline:
            waiting = {each for each in waiting if not self.store.check([f"here/{self.generation}/{each}"])}
            time.sleep(ANSWER_POLL_SECONDS)
        members = [leader, *sorted(set(helpers) - waiting)]
        self.store.set(f"members/{self.generation}", json.dumps(members))
        return members

    def _write(self, address: list[Any]) -> None:
        partial = self._path.with_suffix(f".{os.getpid()}")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(address, file)
        partial.replace(self._path)

    def close(self) -> None:
        """End the rendezvous, also for helpers that come later; the store ends with this object."""
        with suppress(OSError):  # for example of a full disk
            self._write([])
        self.store.set("version", _ENDED)


class HelperSide:
    """A helper's side of the rendezvous; it waits as long as `idle` returns True and the leader has not ended."""

    def __init__(self, path: Path, job: str, idle: Callable[[], bool]) -> None:
        self.job = job
        self._idle = idle
        self._announced = ""
        self._count = 0
        address = json.loads(path.read_text())
        if not address:
            raise PeerLostError("the leader has ended")
        host, port, secret = address
        timeout = timedelta(seconds=10)
        self.store = PrefixStore(
            secret,
            self._request(lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)),
        )

    def content(self) -> tuple[str, bytes] | None:
        """Version and content of what is trained; None if it waited in vain."""
        if not self._wait_for("version"):
            return None
        version = self._get("version").decode()  # first, since the content is written before it
        if version == _ENDED:
            raise PeerLostError("the leader has ended")
        return version, self._get("content")

    def announce(self, version: str) -> None:
        """Announce that this helper has built a version of what is trained."""
        self._count += 1
        self._announced = f"{version}:{self._count}:{os.getpid()}"
        self._request(lambda: self.store.set(f"ready/{self.job}", self._announced))

    def refuse(self, version: str, reason: str) -> None:
        """Publish why this helper cannot take part."""
        self._request(lambda: self.store.set(f"refused/{version}", reason))

    def await_call(self, version: str) -> int | None:
        """Wait for a call; return the number of the team, or None if something else is trained or it waited in vain."""
        key = f"call/{self.job}/{self._announced}"
        if self._wait_for(key, lambda: self._get("version").decode() == version):
            return int(self._get(key))
        return None

    def answer(self, generation: int) -> list[str] | None:
        """Answer a call; return the members of the team, or None if it was formed without this helper."""
        self._request(lambda: self.store.set(f"here/{generation}/{self.job}", ""))
        if not self._wait_for(key := f"members/{generation}", poll=ANSWER_POLL_SECONDS):
            return None
        members: list[str] = json.loads(self._get(key))
        return members if self.job in members else None

    def _wait_for(self, key: str, valid: Callable[[], bool] = lambda: True, poll: float = POLL_SECONDS) -> bool:
        """Return whether a key was set while the helper is wanted."""
        while not self._request(lambda: self.store.check([key])):
            if not valid() or not self._idle():
                return False
            time.sleep(poll)
        return True

    def _get(self, key: str) -> bytes:
        found: bytes = self._request(lambda: self.store.get(key))
        return found

    def _request(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error


class Channel:
    """Connection of the processes of a team, of which rank 0 is the leader.

    Tensors on a GPU are copied to host memory and back, since a test of NCCL needs several GPUs. An operation fails
    after `seconds`, with PeerLostError if a process did not connect.

    Args:
        generation: Number of the team; each team of a leader has its own.
        members: Ids of the jobs, in the order of their ranks.
        host: Address of this machine at which the other processes reach this one.
    """

    def __init__(
        self, store: Store, generation: int, members: Sequence[str], rank: int, host: str, seconds: float
    ) -> None:
        self.members = tuple(members)
        self.rank = rank
        self.size = len(members)
        self._process_group: Any = None
        self._sent: list[Work] = []
        gloo: Any = ProcessGroupGloo  # whose methods the stubs lack
        options = gloo._Options()
        options._timeout = timedelta(seconds=min(CONNECT_SECONDS, seconds))
        try:
            options._devices = [gloo.create_device(hostname=host)]
            self._process_group = gloo(PrefixStore(f"generation-{generation}", store), rank, self.size, options)
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error
        self._process_group._set_default_timeout(timedelta(seconds=seconds))

    def broadcast(self, data: Tensor) -> None:
        """Replace a tensor in host memory by the leader's."""
        self._finish(lambda: self._process_group.broadcast(data, 0))

    def await_broadcast(self, data: Tensor, idle: Callable[[], bool]) -> bool:
        """As `broadcast` for a helper; return whether the tensor was filled before `idle` returned False."""
        arrived = Event()

        def wait() -> Work:
            work: Work = self._process_group.broadcast(data, 0)
            work.get_future().add_done_callback(lambda _: arrived.set())
            while not arrived.wait(IDLE_SECONDS) and idle():
                pass
            return work

        self._finish(wait, lambda: arrived.is_set())
        return arrived.is_set()

    def sum_to_leader(self, data: Tensor) -> None:
        """Replace the leader's tensor in host memory by the sum over all processes; the others' are undefined then."""
        self._finish(lambda: self._process_group.reduce(data, 0))

    def all_reduce(self, data: Tensor) -> None:
        """Replace a tensor by the sum over all processes."""
        host = data.cpu()
        self._finish(lambda: self._process_group.allreduce(host))
        if host is not data:
            data.copy_(host)

    def send(self, data: Tensor, rank: int) -> None:
        """Start to send a tensor in host memory, which must not change before `finish_sending`."""
        self._sent.append(self._checked(lambda: self._process_group.send([data], rank, 0)))

    def receive(self, data: Tensor) -> None:
        """Fill a tensor in host memory with what the leader sends."""
        self._finish(lambda: self._process_group.recv([data], 0, 0))

    def finish_sending(self) -> None:
        """Wait until all is sent."""
        for work in self._sent:
            self._checked(work.wait)
        self._sent.clear()

    def close(self) -> None:
        """Close the connections; operations that other processes wait for fail."""
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            with suppress(RuntimeError):
                process_group.abort()  # ends operations of this process; the connections end with the objects
            self._sent.clear()

    def _finish(self, start: Callable[[], Work], ready: Callable[[], bool] = lambda: True) -> None:
        work = self._checked(start)
        if ready():
            self._checked(work.wait)

    def _checked(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except RuntimeError as error:
            self.close()
            raise PeerLostError(str(error)) from error
