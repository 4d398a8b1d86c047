"""Generators are not seeded for steps that draw nothing; whoever begins to draw late learns what it would have."""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pack_samples import CPU, EPOCHS, Mixed, Shop, reports_in, whole
from torch import Tensor, nn

from shoal.fuse.generators import Silence, reseed
from shoal.worker.checkpoint import load_newest

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand((), dtype=torch.float64),
    "Python": random.random,
    "NumPy": np.random.rand,
}


class DrawsFrom(Mixed):
    """A loss that is disturbed once a model has done so many steps.

    Args:
        generator: a key of `DRAWS`.
        first: the step of which numbers are used.
        always: they are drawn at all other steps as well.
    """

    def __init__(self, generator: str, first: int, always: bool) -> None:
        self.draw = DRAWS[generator]
        self.first = first
        self.always = always

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if not model.training:
            return loss
        with torch.no_grad():
            model.steps.add_(1)
        late = model.steps.item() >= self.first
        if late or self.always:
            loss = loss * (1 + 0.5 * late * self.draw())
        return loss


def learnt(task: DrawsFrom, numbers: list[int], directory: Path, seconds: float) -> dict[tuple[int, int], Any]:
    """Every report; and the weights in the end, as of epoch 0."""
    reports = reports_in(Shop(task, directory).run([whole(number) for number in numbers], seconds=seconds))
    found: dict[tuple[int, int], Any] = {(report.trial, report.epoch): report.metrics for report in reports}
    for number in numbers:
        checkpoint = load_newest(directory, number)
        assert checkpoint is not None
        assert checkpoint.epoch == EPOCHS
        found[number, 0] = {name: tensor.clone() for name, tensor in checkpoint.model.items()}
    return found


COMPANIES = {"a lone trial": [0], "an array": [0, 1], "a pack": [0, 2, 3, 4]}


@pytest.mark.parametrize("first", [4, 8, 9, 16], ids=lambda first: f"from step {first}")
@pytest.mark.parametrize("seconds", [30.0, 0.0], ids=["few checkpoints", "many"])
@pytest.mark.parametrize("numbers", COMPANIES.values(), ids=COMPANIES)
@pytest.mark.parametrize("generator", DRAWS)
def test_who_begins_to_draw_late_learns_the_same(
    generator: str, numbers: list[int], seconds: float, first: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = learnt(DrawsFrom(generator, first, always=True), numbers, tmp_path / "always", seconds)
    assert "go back" not in caplog.text
    with caplog.at_level(logging.WARNING, "shoal.worker"):
        got = learnt(DrawsFrom(generator, first, always=False), numbers, tmp_path / "late", seconds)
    assert "begun to draw random numbers: they go back to their checkpoints" in caplog.text
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


def step(silence: Silence, draws: bool, generator: str = "torch", seen: bool = True) -> None:
    silence.begin_step()
    if draws:
        DRAWS[generator]()
    silence.end_step(seen)


@pytest.mark.parametrize("generator", DRAWS)
def test_silence_begins_after_steps_that_draw_nothing(generator: str) -> None:
    silence = Silence(CPU)
    for tried in range(Silence.TRIED):
        assert not silence.lasts, tried
        step(silence, draws=False)
    assert silence.lasts
    step(silence, draws=False)
    assert not silence.broken()
    step(silence, draws=True, generator=generator)
    assert silence.broken()
    for _ in range(2 * Silence.TRIED):
        assert not silence.lasts
        step(silence, draws=False)


def test_there_is_none_where_a_step_draws_or_hides_what_it_draws() -> None:
    draws, hides = Silence(CPU), Silence(CPU)
    for number in range(3 * Silence.TRIED):
        step(draws, draws=number == 1)
        step(hides, draws=False, seen=False)
        assert not draws.lasts
        assert not hides.lasts


def test_other_steps_are_tried_anew() -> None:
    silence = Silence(CPU)
    for _ in range(Silence.TRIED):
        step(silence, draws=False)
    silence.pause()
    assert not silence.lasts
    for _ in range(Silence.TRIED):
        step(silence, draws=False)
    assert silence.lasts


def silent(count: int) -> list[Silence]:
    found = [Silence(CPU) for _ in range(count)]
    for silence in found:
        for _ in range(Silence.TRIED):
            step(silence, draws=False)
    return found


def test_who_seeds_the_generators_is_no_disturbance() -> None:
    (silence,) = silent(1)
    for seed in range(3):
        step(silence, draws=False)
        reseed(seed, CPU)
        torch.rand(3), random.random(), np.random.rand()
        reseed(seed, CPU)
        step(silence, draws=False)
    assert not silence.broken()
    assert silence.lasts


def test_what_was_drawn_before_somebody_seeds_is_not_forgotten() -> None:
    (silence,) = silent(1)
    step(silence, draws=True)
    reseed(0, CPU)
    step(silence, draws=False)
    assert silence.broken()


def test_all_who_were_silent_together_are_told() -> None:
    one, other = silent(2)
    step(one, draws=False)
    step(other, draws=True)
    step(one, draws=False)
    assert other.broken()
    assert one.broken()
