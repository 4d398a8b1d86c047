"""Recorded steps of one process share no workspace: they may run at once, and outlive each other."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.fuse.api import fuse
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import fuse_optimizers

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
WIDE, ROUNDS, REPLAYS = 8192, 300, 4
POOLED_STREAMS = 32
"""Streams that torch hands out in turn."""
FILLED_BYTES = 2 * 2**30
"""Taken and overwritten after a graph is dropped."""


def loss(model: Any, batch: Any) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return F.cross_entropy(model(batch[0]), batch[1])


def recorded(seed: int) -> tuple[CapturedStep, list[Tensor]]:
    """A step of two members whose thin and long products need a workspace, and its batch; the learning rate is 0."""
    torch.manual_seed(seed)
    models = [
        nn.Sequential(nn.Linear(WIDE, 256), nn.ReLU(), nn.Linear(256, WIDE), nn.ReLU(), nn.Linear(WIDE, 16)).to(DEVICE)
        for _ in range(2)
    ]
    array = fuse(models, seeds=[0, 1])
    optimizer = fuse_optimizers([torch.optim.SGD(model.parameters(), 0.0) for model in models], array)
    batch = [torch.randn(64, WIDE, device=DEVICE), torch.randint(0, 16, (64,), device=DEVICE)]
    array.map(loss, batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    array.map(loss, batch).sum().backward()
    step = CapturedStep(array, optimizer, loss, batch, compiling=False)
    for _ in range(POOLED_STREAMS - 1):
        torch.cuda.Stream()  # so that the next step is recorded on the same one
    return step, batch


def test_two_steps_replayed_at_once_have_the_losses_that_each_has_alone() -> None:
    steps = [recorded(seed) for seed in (1, 2)]
    alone = [torch.stack([step(batch) for _ in range(REPLAYS)]) for step, batch in steps]
    assert all(bool((losses == losses[0]).all()) for losses in alone)
    streams = [torch.cuda.Stream() for _ in steps]
    for _ in range(ROUNDS):
        found = []
        for stream, (step, batch) in zip(streams, steps, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(torch.stack([step(batch) for _ in range(REPLAYS)]))
        torch.cuda.synchronize()
        for now, then in zip(found, alone, strict=True):
            assert torch.equal(now, then)


def test_a_step_outlives_another_whose_memory_is_taken() -> None:
    (dropped, batch), (kept, own) = (recorded(seed) for seed in (1, 2))
    dropped(batch)
    alone = kept(own).clone()
    del dropped
    torch.cuda.empty_cache()
    filled = [torch.full((2**20,), torch.nan, device=DEVICE) for _ in range(FILLED_BYTES // 2**22)]
    for _ in range(ROUNDS):
        assert torch.equal(kept(own), alone)
    assert all(bool(part.isnan().all()) for part in filled)
