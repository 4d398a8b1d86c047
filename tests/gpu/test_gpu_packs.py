"""Packs on a GPU: lanes on streams of their own learn what they learn alone, and share samples safely."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pack_samples import EPOCHS, TASKS, Shop, reports_in, whole
from torch import Tensor, nn

from shoal.pack import Pack, load
from shoal.train.data.source import StreamSync
from shoal.train.lane_scheduler import Interleaving, LaneScheduler

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(320, 1, 6, 6, dtype=torch.float64, generator=GENERATOR)
Y = torch.randint(0, 4, (320,), generator=GENERATOR)
INTERLEAVINGS: tuple[Interleaving, ...] = ("turns", "steps", "streams")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 4))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))


SGD, ADAM = partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.01, eps=1e-3)
MIX: list[tuple[Callable[[], nn.Module], Any, int]] = [(mlp, SGD, 16), (convolutional, ADAM, 32), (mlp, ADAM, 64)]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make().double()


def mixed() -> list[Any]:
    """The members of `MIX`, loaded for a pack on the GPU."""
    return [
        load(
            seeded(make, seed),
            "cuda",
            optimizer=lambda model, kind=kind: kind(model.parameters()),
            loss=loss,
            batch_size=size,
        )
        for seed, (make, kind, size) in enumerate(MIX)
    ]


def only(interleaving: Interleaving, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds are by one interleaving, also before the lanes are settled."""
    run = LaneScheduler._run_round
    monkeypatch.setattr(
        LaneScheduler, "_run_round", lambda self, _, lanes, interrupted: run(self, interleaving, lanes, interrupted)
    )


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
def test_each_member_equals_its_lone_twin(interleaving: Interleaving, monkeypatch: pytest.MonkeyPatch) -> None:
    only(interleaving, monkeypatch)
    members = mixed()
    together = Pack(members)
    for _ in range(4):
        for rows in torch.arange(320).split(64):
            together.step([X[rows], Y[rows]])
        together.end_epoch()
    for seed, (member, (make, kind, size)) in enumerate(zip(members, MIX, strict=True)):
        twin = seeded(make, seed).to(DEVICE)
        own = kind(twin.parameters())
        for _ in range(4):
            for rows in torch.arange(320).split(size):
                own.zero_grad()
                loss(twin, [X[rows].to(DEVICE), Y[rows].to(DEVICE)]).backward()
                own.step()
        (checkpoint,) = together.free(member)
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(checkpoint["model"][name], value.cpu(), rtol=1e-5, atol=1e-6)


def test_streams_are_tried_and_timed() -> None:
    together = Pack(mixed())
    for _ in range(400):
        for rows in torch.arange(320).split(64):
            together.step([X[rows], Y[rows]])
        if together._scheduler.interleaving is not None:
            break
    assert set(together._scheduler.seconds) == {"turns", "streams"}


def test_freeing_a_member_frees_its_memory() -> None:
    def stepped(width: int) -> tuple[Pack, Any]:
        member = load(
            nn.Linear(width, width),
            "cuda",
            optimizer=lambda model: ADAM(model.parameters()),
            loss=lambda m, x: m(x).sum(),
            batch_size=4,
        )
        together = Pack([member])
        together.step(torch.ones(4, width))
        return together, member

    together, first = stepped(4096)  # libraries of torch have their workspaces now, which stay
    together.free(first)
    before = torch.cuda.memory_reserved(DEVICE)
    together, big = stepped(4096)
    assert torch.cuda.memory_reserved(DEVICE) > before + 4 * 4096 * 4096 * 3
    together.free(big)
    assert torch.cuda.memory_reserved(DEVICE) < before + 4 * 4096 * 4096


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("interleaving", ["turns", "streams"])
def test_trials_of_a_job_learn_what_they_learn_alone(
    kind: str, interleaving: Interleaving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(interleaving, monkeypatch)
    numbers = (0, 1, 2, 3, 4)
    together = reports_in(Shop(TASKS[kind](), tmp_path / "pack", DEVICE).run([whole(number) for number in numbers]))
    assert len(together) == EPOCHS * len(numbers)
    for number in numbers:
        alone = reports_in(Shop(TASKS[kind](), tmp_path / f"alone-{number}", DEVICE).run([whole(number)]))
        expected = {report.epoch: report.metrics for report in alone}
        for report in together:
            if report.trial == number:
                assert report.metrics == pytest.approx(expected[report.epoch], rel=1e-6, abs=1e-8)


def test_a_reader_on_another_stream_waits_for_the_writer() -> None:
    sync, values = StreamSync(DEVICE), torch.zeros(1 << 20, device=DEVICE)
    writer, reader = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        sync.wait_for_writes()
        torch.cuda._sleep(100_000_000)  # cycles of the clock, some hundredths of a second
        values.fill_(1.0)
        sync.record_write()
    with torch.cuda.stream(reader):
        sync.prepare_read([values])
        total = values.sum()
    torch.cuda.synchronize()
    assert float(total) == values.numel()
