"""The torch device of a job in its worker process."""

import pytest
import torch

from shoal.core.device import Device
from shoal.train.run import _torch_device


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        pytest.param(Device("cuda:3", "A100", 1, uuid="GPU-3"), "GPU-3", "cuda:0", id="it sees it alone"),
        pytest.param(Device("cuda:3", "A100", 1, uuid="GPU-3"), None, "cuda:3", id="it sees all"),
        pytest.param(Device("cuda:1", "A100", 1, uuid="GPU-3"), "GPU-2,GPU-3", "cuda:1", id="it sees some"),
        pytest.param(Device("mig:1", "A100 MIG 1g.10gb", 1, uuid="MIG-1"), "MIG-1", "cuda:0", id="part of a GPU"),
        pytest.param(Device("cuda:3", "A100", 1), None, "cuda:3", id="unknown UUID"),
        pytest.param(Device("cpu:3", "cpu", 1), "", "cpu", id="CPU slot"),
    ],
)
def test_place(device: Device, visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _torch_device(device) == torch.device(expected)
