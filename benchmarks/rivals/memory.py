"""The most memory that tensors take during a training step, and that a process takes for itself."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

__all__ = ["peak_of_process", "peak_of_step"]


def peak_of_step(step: Callable[[], Any], held: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the tensors held plus the peak of those that come and go in one step.

    On a GPU the allocator counts; on a CPU the profiler records each allocation through torch's allocator, which
    leaves out what libraries (oneDNN) take for themselves.

    Args:
        step: takes one training step.
        held: see `Rival.held`; of those before the step.
        device: that it runs on.
    """
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return sum(kept.values()) + torch.cuda.max_memory_allocated(device) - before
    with (
        _without_messages(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record,
    ):
        step()
    now = peak = 0
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        peak = max(peak, now)
    return sum(kept.values()) + peak


@contextmanager
def _without_messages() -> Iterator[None]:
    """The profiler's native code says on the standard error that it starts and stops."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_of_process(make: Callable[[Any], Any], cell: Any, steps: int) -> int:
    """Bytes that a new process shares with no other, at their peak, while a rival takes some steps there.

    Args:
        make: Makes the rival.
        cell: What it trains.
        steps: Number of its steps.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_take_steps, args=(theirs, make, cell, steps))
    process.start()
    theirs.close()
    peak: int = ours.recv()
    process.join()
    return peak


def _take_steps(connection: Connection, make: Callable[[Any], Any], cell: Any, steps: int) -> None:
    torch.set_num_threads(cell.threads)
    rival = make(cell)
    for _ in range(steps):
        rival.step()
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    memory = psutil.Process().memory_full_info()
    connection.send(peak - (memory.rss - memory.uss))
