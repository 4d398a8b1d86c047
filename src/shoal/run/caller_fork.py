"""Forks the calling process, which has torch and the modules of the task already, where a fork is safe.

A fork copies only the thread that calls it: a lock that another thread holds stays locked in the copy, and a pool of
threads is empty there. `prepare_fork` ends the pools of OpenMP, which start again when they are used, and finds out
whether another thread is left. All that may be left are the threads of OpenBLAS, jemalloc and torch's pthreadpool,
which see to a fork themselves.
"""

import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from multiprocessing.connection import wait
from subprocess import TimeoutExpired
from typing import Any

from shoal.host.file_system import kernel_lines
from shoal.host.machine import openblas_libraries, openmp_libraries
from shoal.host.processes import driver_files

__all__ = ["ForkedProcess", "prepare_fork"]

_OPENBLAS_VARIABLES = "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"
_JEMALLOC = "jemalloc_bg_thd"
"""Name of the background threads of jemalloc (in pyarrow), which ends them before a fork and begins them again."""
_HARD_PAUSE = 2
"""`omp_pause_hard` of OpenMP 5.0: `omp_pause_resource_all` ends all threads of the pools of the calling thread."""
_EXIT_SECONDS = 0.2
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
"""Environment variable of glibc -> parameter of `mallopt`, which sets the same in a running process."""


def prepare_fork() -> str | None:
    """End the thread pools of OpenMP; return why this process must not be forked all the same, or None if it may be."""
    if sys.platform != "linux":
        return f"{sys.platform} is not Linux"
    if not _has_pidfd():
        return "this Python or this kernel has no pidfd_open"
    if multiprocessing.current_process().daemon:  # a copy would be one, too, and could have no loader processes
        return "it is a daemonic process of multiprocessing"
    if _has_forkserver():
        return "it has begun the forkserver of multiprocessing, and a copy could not use the one or begin another"
    if (context := _torch_context()) is not None:
        return f"the call is within {context}"
    if threading.active_count() > 1:
        others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        return f"it has other threads: {', '.join(others)}"
    if opened := driver_files():
        return f"it has opened {opened[0]}"
    for library in openmp_libraries():
        pause = getattr(ctypes.CDLL(library), "omp_pause_resource_all", None)
        if pause is None or pause(_HARD_PAUSE):
            return f"{library} cannot end its threads"
    known = len(openblas_libraries()) * _openblas_threads() + _pthreadpool_threads()
    deadline = time.monotonic() + _EXIT_SECONDS
    while (unknown := _native_threads() - known) > 0:
        if time.monotonic() > deadline:
            return f"{unknown} of its threads are those of a library that may not survive it"
        time.sleep(0.001)
    return None


def _openblas_threads() -> int:
    """Largest number of threads that OpenBLAS begins at its import, by its own rules."""
    cores = len(os.sched_getaffinity(0))
    asked = next((os.environ[name] for name in _OPENBLAS_VARIABLES if os.environ.get(name, "").isdigit()), "")
    return max(0, min(cores, int(asked or cores)) - 1)


def _pthreadpool_threads() -> int:
    """Return the number of threads that `torch.set_num_threads` begins for XNNPACK; torch has new ones after a fork."""
    torch: Any = sys.modules.get("torch")
    return 0 if torch is None else torch.get_num_threads() - 1


def _native_threads() -> int:
    """Return the number of threads of this process beside the calling one, without those of jemalloc."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            names.append(kernel_lines(f"/proc/self/task/{thread}/comm")[0])
    return sum(name != _JEMALLOC for name in names) - 1


def _has_forkserver() -> bool:
    """Return whether the forkserver of `multiprocessing` was begun, for which only its parent can wait."""
    module: Any = sys.modules.get("multiprocessing.forkserver")
    return module is not None and module._forkserver._forkserver_pid is not None


def _has_pidfd() -> bool:
    """Return whether a process can be waited for by a descriptor: Linux 5.3, and a Python that was built for it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _torch_context() -> str | None:
    """Return an active context of torch, which a copy of this thread could not leave; None if there is none."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    contexts = {
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.autocast": any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
        "torch.autograd.detect_anomaly": torch.is_anomaly_enabled(),
        "torch.device or another mode for functions": torch._C._len_torch_function_stack() > 0,
        "a mode for operators": torch._C._len_torch_dispatch_stack() > 0,
    }
    return next((name for name, active in contexts.items() if active), None)


class ForkedProcess:
    """A forked process, with the methods of a `subprocess.Popen`.

    It has a session of its own, the default handlers of signals, and no standard input. It does not run the exit
    handlers of the caller. `allocator` are variables of glibc's allocator, as in the environment of a new process.
    """

    def __init__(self, target: Callable[[], None], log: int, allocator: dict[str, str]) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # None, a full pipe, or closed: not to be written twice
                stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(target, log, allocator)
        self._descriptor = os.pidfd_open(self.pid)
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit status, negative for a signal; TimeoutExpired after `timeout` s."""
        if self._status is None:
            if not wait([self._descriptor], timeout):
                raise TimeoutExpired("fork", timeout or 0.0)
            self._status = 0
            with suppress(ChildProcessError):  # the caller ignores SIGCHLD, so that nobody learns the status
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._descriptor)
        return self._status

    def terminate(self) -> None:
        """Send SIGTERM, if it has not ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, if it has not ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._status is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)


def _become(target: Callable[[], None], log: int, allocator: dict[str, str]) -> None:
    """Run the target in the child process; never return to the caller's code."""
    status = 1
    try:
        os.setsid()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _replace_streams(log)
        for name, value in allocator.items():
            if name not in os.environ:
                ctypes.CDLL(None).mallopt(_MALLOPT[name], int(value))
        logging.getLogger().handlers.clear()  # records go to the log of the job, as in a new process
        _restore_defaults_of_torch()
        gc.freeze()  # objects of the caller are not collected here: they stay shared, and no finalizer of theirs runs
        target()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _replace_streams(log: int) -> None:
    """Redirect the standard streams; those of the caller may be objects of a test runner or of an editor."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, number)
    os.close(null)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (open as long as the process)
    sys.stdout, sys.stderr = (_unbuffered(number) for number in (1, 2))


def _unbuffered(number: int) -> TextIOWrapper:
    raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115  (likewise)
    return TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _restore_defaults_of_torch() -> None:
    """Give torch the settings that it has after its import, as `shoal resume` will find them in another process."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():  # else the call imports the compiler for nothing
            torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
