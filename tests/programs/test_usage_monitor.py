"""Profiles that the usage monitor measures of a program."""

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from shoal.core.device import Device
from shoal.programs.process import UsageMonitor, visible_device

SLOT = Device("cpu:0", "cpu/2", memory=1 << 40, cores=2)
GPU = Device("cuda:1", "NVIDIA H200", memory=100, cores=4)


def me() -> list[psutil.Process]:
    return [psutil.Process()]


@pytest.mark.parametrize(("allowed", "threads"), [("2", 2), ("1", 1)])
def test_from_the_second_report_on_it_is_known_what_a_program_takes(
    allowed: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    watch = UsageMonitor(me, SLOT)
    assert watch.report(3.0) is None
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    profile = watch.report(0.25)
    assert profile is not None
    assert profile.step_seconds == {1: 0.25}
    assert profile.base_memory == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert 0.05 < profile.cores <= 2
    assert profile.compute == pytest.approx(min(1.0, profile.cores / threads))
    assert watch.report(0.25) is None
    assert watch.finish() is None


def test_one_report_is_better_than_none() -> None:
    watch = UsageMonitor(me, SLOT)
    assert watch.finish() is None
    watch.report(3.0)
    profile = watch.finish()
    assert profile is not None
    assert profile.step_seconds == {1: 3.0}


def test_memory_that_a_fork_shares_with_its_worker_is_not_counted() -> None:
    resident = psutil.Process().memory_info().rss
    watch = UsageMonitor(me, SLOT, inherited_memory=resident // 2)
    watch.report(1.0)
    profile = watch.report(1.0)
    assert profile is not None
    assert profile.base_memory == pytest.approx(resident - resident // 2, rel=0.2)


class Nvml(SimpleNamespace):
    """Minimal fake of pynvml; `processes` are (pid, bytes)."""

    class NVMLError(Exception):
        pass

    def __init__(self, processes: list[tuple[int, int]], used: list[int], load: Any = 40) -> None:
        super().__init__(processes=processes, used=used, load=load, asked=None, open=0)

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"index {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return f"uuid {uuid}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        self.asked = handle
        return SimpleNamespace(used=self.used.pop(0) if len(self.used) > 1 else self.used[0])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in self.processes]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        if isinstance(self.load, Exception):
            raise self.load
        return SimpleNamespace(gpu=self.load)


@pytest.mark.parametrize(
    ("processes", "used", "memory"),
    [
        pytest.param([(os.getpid(), 30), (1, 50)], [10, 90], 30, id="its own processes"),
        pytest.param([(1, 50)], [10, 90], 80, id="processes of other numbers"),
    ],
)
def test_of_a_gpu_nvml_is_asked(
    processes: list[tuple[int, int]], used: list[int], memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml(processes, used)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    watch = UsageMonitor(me, GPU)
    watch.report(1.0)
    profile = watch.report(0.5)
    assert profile is not None
    assert (profile.base_memory, profile.compute) == (memory, 0.4)
    assert nvml.asked == "uuid GPU-b"
    assert nvml.open == 1
    watch.close()
    watch.close()
    assert nvml.open == 0, "the worker can be forked again"


def test_a_gpu_that_says_nothing_of_its_load_is_taken_to_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([(os.getpid(), 30)], [10], Nvml.NVMLError("not supported")))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    watch = UsageMonitor(me, GPU)
    watch.report(1.0)
    profile = watch.report(0.5)
    assert profile is not None
    assert (profile.base_memory, profile.compute) == (30, 1.0)


@pytest.mark.parametrize(
    ("device", "setting", "visible"),
    [
        pytest.param(SLOT, "0,1", "", id="a slot of the CPU"),
        pytest.param(GPU, None, "1", id="all GPUs"),
        pytest.param(GPU, "3, 5", "5", id="some GPUs"),
    ],
)
def test_a_program_sees_its_device_alone(
    device: Device, setting: str | None, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert visible_device(device) == visible
