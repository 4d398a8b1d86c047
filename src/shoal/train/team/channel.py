"""`Channel`: the collective operations of the processes of a team, by gloo."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

__all__ = ["Channel", "PeerLostError"]

CONNECT_SECONDS = 10.0
"""Longest time that the processes take to connect to each other."""
IDLE_SECONDS = 0.1
"""Interval at which a waiting helper polls for requests."""


class PeerLostError(Exception):
    """Another process of the team ended, hangs, or has left. The channel cannot be used any more.

    It is no `RuntimeError`, which would let a function of an array run in another way instead.
    """


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
