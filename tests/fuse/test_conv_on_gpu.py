"""Lowerings of convolutions that only GPUs have, whose streams and graphs are stand-ins here."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.demand import Profile
from shoal.core.errors import FusionError
from shoal.fuse import autotune
from shoal.fuse import step as step_module
from shoal.fuse.api import fuse
from shoal.fuse.autotune import TuningCache, timed_by_replay, times_replays
from shoal.fuse.backward import MemberSteps, MicroBatches, micro_batches
from shoal.fuse.capture_decision import CaptureDecision
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.rules import conv

MEMBERS, SAMPLES, CHANNELS, OUTPUTS = 5, 3, 4, 6


def run(x: Tensor, w: Tensor, b: Tensor | None, groups: int) -> Tensor:
    return F.conv2d(x, w, b, stride=(2, 1), padding=1, groups=groups)


def arguments(own_bias: bool, groups: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    new = partial(torch.randn, generator=generator, dtype=torch.float64)
    x, w = new(MEMBERS, SAMPLES, CHANNELS, 7, 6), new(MEMBERS, OUTPUTS, CHANNELS // groups, 3, 3)
    tensors = [x, w, new(MEMBERS, OUTPUTS) if own_bias else None]
    return [None if tensor is None else tensor.requires_grad_() for tensor in tensors]


class Streams:
    """Stand-ins for CUDA streams: what ran on which one, and what waited for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.current = self.made = self._new("current")
        count = iter(range(100))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self._new(next(count)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(conv, "_side_streams", {})

    def _new(self, name: Any) -> Any:
        stream = SimpleNamespace(name=name)
        stream.wait_stream = lambda other: self.log.append((name, "waits for", other.name))
        return stream

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        self.log.append(("on", stream.name))
        yield


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("own_bias", [False, True])
def test_every_lowering_equals_the_loop(own_bias: bool, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    for lowering in (conv._grouped_channels_last, conv._on_streams):
        given, expected = arguments(own_bias, groups), arguments(own_bias, groups)
        results = lowering(run, groups, *given), conv._loop(run, groups, *expected)
        for out in results:
            out.square().sum().backward()
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
        for mine, other in zip(given, expected, strict=True):
            if mine is not None and other is not None:
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert [entry for entry in streams.log if entry[0] == "on"] == [("on", number) for number in (0, 1, 2, 3, 0)]
    assert streams.log[:4] == [(number, "waits for", "current") for number in range(4)]
    assert streams.log[-4:] == [("current", "waits for", number) for number in range(4)]


def test_a_chain_in_channels_last_copies_no_activation() -> None:
    x, w, _ = arguments(False, 1)
    assert x is not None
    first = conv._grouped_channels_last(run, 1, x, w, None)
    merged = conv.merge_channels(first.relu())
    assert merged.is_contiguous(memory_format=torch.channels_last)
    assert merged.untyped_storage().data_ptr() != first.untyped_storage().data_ptr(), "that of relu"
    relu = first.relu()
    assert conv.merge_channels(relu).data_ptr() == relu.data_ptr()


def test_a_step_that_is_to_be_a_graph_has_its_lowerings_timed_as_graphs(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**6))
    replayed: list[str] = []

    def record(function: Any, device: Any) -> Any:
        function()
        return SimpleNamespace(replay=lambda: replayed.append("graph")), None

    monkeypatch.setattr(autotune, "record_graph", record)
    monkeypatch.setattr(autotune, "_now", lambda device: 1e-3 * next(clock))
    ran: list[str] = []

    def lowering(name: str, x: Tensor) -> Tensor:
        ran.append(name)
        return x * 2

    x = torch.ones(3, requires_grad=True)
    lowerings = {name: partial(lowering, name) for name in ("one", "two")}
    tuner = autotune._Tuner(True, TuningCache(tmp_path / "lowerings"))
    with autotune._using(tuner):
        with timed_by_replay():
            assert autotune.times_replays()
            assert torch.equal(autotune.fastest("double", lowerings, [x]), x * 2)
        counts = len(replayed), len(ran)
        assert counts[0] >= 6
        assert counts[1] == 5, "each twice before its graph is there, then the fastest one"
        autotune.fastest("double", lowerings, [x])
        assert len(replayed) == counts[0], "a step without a graph is timed as it runs"
        assert len(ran) > counts[1] + 6


def noting_step(found: list[bool], *args: Any, **options: Any) -> step_module.TrainingStep:
    """A step that notes whether lowerings are timed as graphs in it."""
    models = [nn.Linear(2, 1) for _ in range(2)]
    array = fuse(models)
    optimizer = fuse_optimizers([torch.optim.SGD(model.parameters(), 0.1) for model in models], array)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found.append(times_replays())
        out: Tensor = model(batch).mean()
        return out

    return step_module.TrainingStep(array, optimizer, loss, *args, **options)


BATCH = torch.ones(3, 2)
KNOWN = Profile({2: 1.0}, 10, 3, 0, 0, 1.0, 1.0, recorded_gain={2: 2.0}, record_seconds=1.0)
OF_THREE = MemberSteps(BATCH, torch.full((2,), 1 / 3), torch.tensor([True, False]), torch.tensor([False, True]))
EXPECTED = {
    "an unknown structure, a few steps": (None, 10, BATCH, False),
    "an unknown structure, many steps": (None, 10_000, BATCH, True),
    "two steps of a batch save 1 s, and recording costs 1 s": (KNOWN, 2, BATCH, False),
    "two steps of three batches save 3 s": (KNOWN, 2, MicroBatches((BATCH,) * 3, (1 / 3,) * 3), True),
    "two batches of members with steps of their own save 1 s": (KNOWN, 2, OF_THREE, False),
    "five of these save 2.5 s": (KNOWN, 5, OF_THREE, True),
}


@pytest.mark.parametrize(("profile", "steps", "batch", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_lowerings_are_timed_as_graphs_where_recording_is_expected_to_pay(
    profile: Profile | None, steps: int, batch: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "records_graphs", lambda device: True)
    found: list[bool] = []
    compiling = CaptureDecision(profile, 2, steps)
    noting_step(found, ("eager", "captured"), compiling, profile=profile)(batch)
    assert found == [expected] * len(micro_batches(batch))
    assert not times_replays()


def test_lowerings_are_timed_as_they_run_once_the_step_turns_out_not_to_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise FusionError("two runs of it differ")

    monkeypatch.setattr(step_module, "records_graphs", lambda device: True)
    monkeypatch.setattr(step_module, "CapturedStep", refuse)
    found: list[bool] = []
    step = noting_step(found, ("eager", "captured"), clock=count().__next__)
    while step.mode is None:
        step(torch.ones(3, 2))
    assert found == [True] * len(found)
    step(torch.ones(3, 2))
    assert (step.mode, found[-1]) == ("eager", False)
