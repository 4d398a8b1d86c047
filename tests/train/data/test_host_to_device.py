"""Copies of batches to a GPU, whose streams and pinned memory are stand-ins here: from pinned memory, on one stream."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.train.data.source import HostToDevice


class Stream:
    """A stand-in for a CUDA stream, which records what waits for what."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def __enter__(self) -> None:
        self.log.append(("in", self.name))

    def __exit__(self, *_: object) -> None:
        self.log.append(("out", self.name))

    def wait_stream(self, other: "Stream") -> None:
        self.log.append((self.name, "waits for", other.name))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    log: list[Any] = []
    current = Stream(log, "current")
    copy_to = Tensor.to
    pinned: list[Tensor] = []

    def to(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
        is_pinned = any(tensor is each for each in pinned)
        log.append(("copy", tensor.numel(), str(device), non_blocking, is_pinned))
        return copy_to(tensor, copy=True)

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: log.append(("keeps", tensor.numel())))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, f"of {device}"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    return log


def test_a_batch_is_copied_from_pinned_memory_on_a_stream_of_its_own(log: list[Any]) -> None:
    copy = HostToDevice(torch.device("cuda:0"))
    moved = copy({"x": torch.arange(3.0), "name": "digits", "y": [torch.arange(2)]})
    assert moved["name"] == "digits"
    assert moved["x"].tolist() == [0.0, 1.0, 2.0]
    expected = [
        ("in", "of cuda:0"),
        ("copy", 3, "cuda:0", True, True),
        ("copy", 2, "cuda:0", True, True),
        ("out", "of cuda:0"),
        ("current", "waits for", "of cuda:0"),
        ("keeps", 3),
        ("keeps", 2),
    ]
    assert log == expected
    copy(torch.ones(3))
    assert [entry for entry in log[len(expected) :] if entry[0] == "in"] == [("in", "of cuda:0")]


@pytest.mark.parametrize(
    "tensor", [torch.ones(3, requires_grad=True), torch.ones(3).to_sparse()], ids=["with a graph", "sparse"]
)
def test_other_tensors_are_copied_as_they_are(tensor: Tensor, log: list[Any]) -> None:
    HostToDevice(torch.device("cuda:0"))(tensor)
    assert ("copy", 3, "cuda:0", True, False) in log
