import sys

import pytest
from nvml_samples import FakeNvml


@pytest.fixture
def nvml(monkeypatch):
    """An invented `pynvml` without GPUs, which the test adds; NVML must be shut down at the end."""
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield module
    assert module.begun == 0
