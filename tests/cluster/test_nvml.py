import sys
from types import ModuleType, SimpleNamespace

import pytest

from shoal.cluster.nvml import Gpu, gpus
from shoal.errors import DeviceError


class Failed(Exception):  # noqa: N818
    """Stands for pynvml.NVMLError."""


def fail(*_):
    raise Failed("Driver Not Loaded")


@pytest.fixture
def pynvml(monkeypatch):
    """An invented binding with two GPUs."""
    module = ModuleType("pynvml")
    module.NVMLError = Failed
    module.shut_down = 0
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetCount = lambda: 2
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    module.nvmlDeviceGetName = lambda handle: "NVIDIA H200"
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=1000 + handle)

    def shut_down():
        module.shut_down += 1

    module.nvmlShutdown = shut_down
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_all_gpus_are_listed_and_nvml_is_shut_down(pynvml):
    assert gpus() == [Gpu("GPU-0", "NVIDIA H200", 1000), Gpu("GPU-1", "NVIDIA H200", 1001)]
    assert pynvml.shut_down == 1


def test_without_a_driver_there_are_none(pynvml):
    pynvml.nvmlInit = fail
    assert gpus() == []


def test_without_the_binding_there_are_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == []


def test_a_gpu_that_cannot_be_read_is_an_error(pynvml):
    pynvml.nvmlDeviceGetMemoryInfo = fail
    with pytest.raises(DeviceError, match=r"Driver Not Loaded.*devices='cpu'"):
        gpus()
    assert pynvml.shut_down == 1
