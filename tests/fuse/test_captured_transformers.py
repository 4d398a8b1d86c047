"""Captured steps of unmodified models of `transformers` compute what their eager steps compute."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optim_twins import same
from test_transformers_models import IMAGES, LABELS, MODELS, TEXT, TOKENS, VISION
from torch import Tensor
from twins import build

from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("default")]  # of the models, about themselves


def of_text(model: Any, batch: Any) -> Tensor:
    tokens, labels = batch
    return F.cross_entropy(model(input_ids=tokens).logits, labels)


def of_image(model: Any, batch: Any) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(pixel_values=images).logits, labels)


CASES: dict[str, tuple[Any, Any, Any]] = {
    "BERT": (replace(MODELS["BERT"], settings={**TEXT, "num_hidden_layers": 1}), of_text, (TOKENS, LABELS)),
    "ViT": (replace(MODELS["ViT"], settings={**VISION, "num_hidden_layers": 1}), of_image, (IMAGES, LABELS)),
    "ResNet": (MODELS["ResNet"], of_image, (IMAGES, LABELS)),
}
"""Of one layer, as tracing a second takes as long as the first."""


def members(make: Any) -> tuple[ModelArray, FusedOptimizer]:
    """AdamW's ε keeps it from making a full step of a gradient that is zero but for rounding."""
    models = build(make, 2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01 * (b + 1), eps=1e-3) for b, m in enumerate(models)]
    array = fuse(models, [1, 2])
    return array, fuse_optimizers(optimizers, array)


def eager(array: ModelArray, optimizer: FusedOptimizer, loss: Any, batch: Any) -> Tensor:
    optimizer.zero_grad()
    losses = array.map(loss, batch)
    losses.sum().backward()
    optimizer.step()
    return losses.detach()


def steps_agree(name: str, compiling: bool) -> None:
    model, loss, batch = CASES[name]
    make = partial(model.make, 0.2)
    array, optimizer = members(make)
    twin, optimizer_of_twin = members(make)
    for side in ((array, optimizer), (twin, optimizer_of_twin)):
        eager(*side, loss, batch)
    step = CapturedStep(array, optimizer, loss, batch, compiling=compiling)
    for shift in (1, 2):
        other = torch.utils._pytree.tree_map(lambda leaf, shift=shift: leaf.roll(shift, 0), batch)
        assert step.fits(other)
        torch.testing.assert_close(step(other), eager(twin, optimizer_of_twin, loss, other), rtol=1e-9, atol=0)
    for mine, other in zip(array.unfuse(), twin.unfuse(), strict=True):
        same(mine.state_dict(), other.state_dict(), 1e-9, "weights")


@pytest.mark.parametrize("name", CASES)
def test_traced_steps(name: str) -> None:
    steps_agree(name, compiling=False)


@pytest.mark.slow
def test_a_compiled_step() -> None:
    steps_agree("BERT", compiling=True)
