"""Steps of an array on a GPU: eager, member after member, as a CUDA graph, and compiled, equal plain PyTorch."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.autotune import autotuning
from shoal.fuse.capture import CapturedStep
from shoal.fuse.cuda_graph import record_graph
from shoal.fuse.generators import DrawDetector, forked_rng, preserved_rng, seed_all
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.scaler import GradScaler
from shoal.fuse.step import StepMode, TrainingStep
from shoal.train.metrics import MetricMeans

pytestmark = pytest.mark.gpu

MEMBERS = 3
DEVICE = torch.device("cuda:0")
IMAGES = torch.randn(6, 8, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
"""Six batches."""
LABELS = torch.arange(48).view(6, 8) % 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(self.embed(x.flatten(1, 2).unflatten(1, (8, 3)).flatten(2))).mean(1))
        return out


def mlp(rate: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 4))


def convolutional(rate: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(rate),
        nn.Linear(72, 4),
    )


class Checkpointed(nn.Sequential):
    """All but its last layer run again in the backward pass, in a thread of autograd."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self[-1](checkpoint(self.hidden, x, use_reentrant=False))
        return out

    def hidden(self, x: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            x = layer(x)
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(24, 8, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(x.flatten(1).unflatten(1, (8, 24)))[0][:, -1])
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convolutional": convolutional,
    "attention": Attention,
    "recurrent": Recurrent,
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adam": partial(Adam, lr=0.01, eps=1e-3),
    "adamw": partial(AdamW, lr=0.01, eps=1e-3, weight_decay=0.1),
    "adagrad": partial(Adagrad, lr=0.05),
    "rmsprop": partial(RMSprop, lr=0.003, eps=1e-3),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_under(dtype: torch.dtype) -> Callable[[nn.Module, Any], Tensor]:
    """The loss under autocast."""

    def half(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", dtype):
            return loss(model, batch)

    return half


def batches(dtype: torch.dtype = torch.float64) -> list[Any]:
    return [(x.to(DEVICE, dtype), y.to(DEVICE)) for x, y in zip(IMAGES, LABELS, strict=True)]


def models_of(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    models = []
    for seed in range(MEMBERS):
        torch.manual_seed(seed)
        models.append(make().to(DEVICE, dtype))
    return models


def array_of(
    make: Callable[[], nn.Module],
    kind: Callable[..., Optimizer] = OPTIMIZERS["adam"],
    dtype: torch.dtype = torch.float64,
) -> tuple[ModelArray, FusedOptimizer]:
    array = fuse(models_of(make, dtype), seeds=range(MEMBERS))
    return array, fuse_optimizers([kind(model.parameters()) for model in array.members], array)


def trained(
    array: ModelArray, step: Callable[[Any], Tensor], given: list[Any]
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    losses = torch.stack([step(batch) for batch in given])
    return losses, [copy.deepcopy(member.state_dict()) for member in array.members]


def captured(
    array: ModelArray,
    optimizer: FusedOptimizer,
    given: list[Any],
    compiling: bool = False,
    of: Any = loss,
    **options: Any,
) -> Callable[[Any], Tensor]:
    """The first step eager, the others as one CUDA graph."""
    eager = TrainingStep(array, optimizer, of, ("eager",), **options)
    steps: list[CapturedStep] = []

    def step(batch: Any) -> Tensor:
        if not steps:
            losses = eager(batch)
            limits = options.get("max_norm")
            limits = None if limits is None else torch.full((MEMBERS,), limits, device=DEVICE, dtype=losses.dtype)
            steps.append(CapturedStep(array, optimizer, of, batch, compiling, max_norms=limits))
            return losses
        assert steps[0].fits(batch)
        assert steps[0]._replay is not None, "the step is a CUDA graph"
        return steps[0](batch)

    return step


def same(mine: Any, others: Any, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(mine, others, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", ["eager", "plain", "captured"])
@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_each_member_equals_its_lone_twin(
    make: Callable[[], nn.Module], kind: Callable[..., Optimizer], mode: str
) -> None:
    twins, given = models_of(make), batches()
    array, optimizer = array_of(make, kind)
    step = captured(array, optimizer, given) if mode == "captured" else TrainingStep(array, optimizer, loss, (mode,))  # type: ignore[arg-type]
    losses, states = trained(array, step, given)
    for b, twin in enumerate(twins):
        own = kind(twin.parameters())
        for number, batch in enumerate(given):
            own.zero_grad()
            value = loss(twin, batch)
            value.backward()
            own.step()
            same(losses[number, b], value.detach(), 1e-6)
        same(states[b], twin.state_dict(), 1e-6)


@pytest.mark.parametrize("make", [partial(mlp, 0.4), partial(convolutional, 0.4)], ids=["mlp", "convolutional"])
@pytest.mark.parametrize("mode", ["plain", "captured"])
def test_random_numbers_are_those_of_eager_steps(make: Callable[[], nn.Module], mode: str) -> None:
    given = batches()
    array, optimizer = array_of(make)
    eager = trained(array, TrainingStep(array, optimizer, loss, ("eager",)), given)
    array, optimizer = array_of(make)
    step = captured(array, optimizer, given) if mode == "captured" else TrainingStep(array, optimizer, loss, ("plain",))
    same(trained(array, step, given), eager)


@pytest.mark.parametrize("mode", ["eager", "plain", "captured"])
def test_checkpointed_parts_draw_their_numbers_again(mode: str) -> None:
    given = batches()
    array, optimizer = array_of(partial(mlp, 0.4))
    eager = trained(array, TrainingStep(array, optimizer, loss, ("eager",)), given)
    array, optimizer = array_of(lambda: Checkpointed(*mlp(0.4)))
    step = captured(array, optimizer, given) if mode == "captured" else TrainingStep(array, optimizer, loss, (mode,))  # type: ignore[arg-type]
    same(trained(array, step, given), eager)


def test_dropout_masks_are_those_of_the_cpu() -> None:
    x = torch.ones(4, 50)
    masks = [
        fuse([nn.Dropout(0.5).train()] * 1, seeds=[5]).to(device)(x.to(device)).cpu() for device in ("cpu", "cuda")
    ]
    assert torch.equal(*masks)
    assert 0 < int((masks[0] == 0).sum()) < masks[0].numel()


@pytest.mark.parametrize("name", ["mlp", "convolutional", "attention"])
def test_a_compiled_step_equals_eager_ones(name: str) -> None:
    given = batches(torch.float32)
    array, optimizer = array_of(MODELS[name], OPTIMIZERS["sgd"], torch.float32)
    losses, _ = trained(array, TrainingStep(array, optimizer, loss, ("eager",)), given)
    array, optimizer = array_of(MODELS[name], OPTIMIZERS["sgd"], torch.float32)
    others, _ = trained(array, captured(array, optimizer, given, compiling=True), given)
    same(others, losses, 2e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_graph_reads_rates_and_limits_anew_at_each_step(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """In float32 the graph updates by torch's fused kernels, which read the rates and the numbers of steps."""
    results = []
    for mode in ("eager", "captured"):
        given = batches(dtype)
        array, optimizer = array_of(mlp, OPTIMIZERS[name], dtype)
        step = (
            captured(array, optimizer, given, max_norm=0.05)
            if mode == "captured"
            else TrainingStep(array, optimizer, loss, ("eager",), max_norm=0.05)
        )
        losses = []
        for number, batch in enumerate(given):
            for b, own in enumerate(optimizer.members):
                own.param_groups[0]["lr"] = 0.1 * (b + 1) / (number + 1)
            losses.append(step(batch))
        results.append((torch.stack(losses), [member.state_dict() for member in array.members]))
    same(*results, tolerance)


@pytest.mark.parametrize("mode", ["plain", "captured"])
def test_slopes_and_rates_of_each_member(mode: str) -> None:
    def array() -> tuple[ModelArray, FusedOptimizer]:
        models = []
        for seed in range(MEMBERS):
            torch.manual_seed(seed)
            between = [nn.LeakyReLU(0.1 * (seed + 1)), nn.Dropout(0.2 * seed)]
            layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), *between, nn.Linear(16, 4))
            models.append(layers.to(DEVICE, torch.float64))
        joined = fuse(models, seeds=range(MEMBERS))
        return joined, fuse_optimizers([OPTIMIZERS["sgd"](model.parameters()) for model in models], joined)

    given = batches()
    members, optimizer = array()
    eager = trained(members, TrainingStep(members, optimizer, loss, ("eager",)), given)
    members, optimizer = array()
    step = (
        captured(members, optimizer, given)
        if mode == "captured"
        else TrainingStep(members, optimizer, loss, ("plain",))
    )
    same(trained(members, step, given), eager)


def test_a_graph_fits_no_other_shape_and_no_other_memory() -> None:
    given = batches()
    array, optimizer = array_of(mlp)
    TrainingStep(array, optimizer, loss, ("eager",))(given[0])
    step = CapturedStep(array, optimizer, loss, given[0], compiling=False)
    assert step.fits(given[1])
    assert not step.fits((given[0][0][:4], given[0][1][:4]))
    array.to("cpu")
    array.to(DEVICE)
    assert not step.fits(given[0])


def test_the_fastest_mode_is_found_by_timing_all_of_them(tmp_path: Any) -> None:
    array, optimizer = array_of(mlp, dtype=torch.float32)
    step = TrainingStep(array, optimizer, loss)
    with autotuning(tmp_path / "tuning.sqlite"):
        for batch in batches(torch.float32) * 40:
            step(batch)
            if step.mode is not None:
                break
    assert step.mode is not None
    assert {"eager", "plain", "captured"} <= set(step.seconds)
    assert all(seconds > 0 for seconds in step.seconds.values())


def test_a_compiled_step_in_half_precision_equals_eager_ones() -> None:
    """It rounds less than eager steps, which is no fault of the compiler."""
    given, half = batches(torch.float32), loss_under(torch.bfloat16)
    array, optimizer = array_of(convolutional, OPTIMIZERS["sgd"], torch.float32)
    losses, _ = trained(array, TrainingStep(array, optimizer, half, ("eager",)), given)
    array, optimizer = array_of(convolutional, OPTIMIZERS["sgd"], torch.float32)
    others, _ = trained(array, captured(array, optimizer, given, compiling=True, of=half), given)
    same(others, losses, 0.1)


def test_a_compiled_mode_is_timed_where_it_may_pay_off() -> None:
    array, optimizer = array_of(mlp, dtype=torch.float32)
    modes: tuple[StepMode, ...] = ("eager", "compiled")
    step = TrainingStep(array, optimizer, loss, modes, compiling=lambda seconds: True, clock=count().__next__)
    for batch in batches(torch.float32) * 10:
        step(batch)
    assert set(step.seconds) == {"eager", "compiled"}


def on_the_host(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch) * torch.tensor(2.0, dtype=torch.float64).to(DEVICE)


def test_a_step_that_computes_on_the_cpu_is_refused_in_words() -> None:
    array, optimizer = array_of(mlp)
    given = batches()
    TrainingStep(array, optimizer, on_the_host, ("eager",))(given[0])
    with pytest.raises(FusionError, match="copies between devices"):
        CapturedStep(array, optimizer, on_the_host, given[0], compiling=False)


def weighted(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], torch.tensor([1.0, 2.0, 0.5, 1.0], device=DEVICE).double())


def test_tensors_that_the_loss_makes_of_numbers_are_constants_of_a_graph() -> None:
    given = batches()
    array, optimizer = array_of(mlp)
    eager = trained(array, TrainingStep(array, optimizer, weighted, ("eager",)), given)
    array, optimizer = array_of(mlp)
    same(trained(array, captured(array, optimizer, given, of=weighted), given), eager)


def test_a_graph_holds_what_it_reads() -> None:
    """A buffer of all members, and what the loss names, may be dropped by their owners."""
    weights = [torch.tensor([1.0, 2.0, 0.5, 1.0], device=DEVICE).double()]

    def of_a_list(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weights[0] * 1.0)

    given = batches()
    array, optimizer = array_of(mlp)
    eager = trained(array, TrainingStep(array, optimizer, of_a_list, ("eager",)), given)
    array, optimizer = array_of(mlp)
    TrainingStep(array, optimizer, of_a_list, ("eager",))(given[0])
    step = CapturedStep(array, optimizer, of_a_list, given[0], compiling=False)
    weights.clear()
    torch.cuda.empty_cache()
    filled = [torch.full((4,), float("nan"), dtype=torch.float64, device=DEVICE) for _ in range(64)]
    losses = torch.stack([step(batch) for batch in given[1:]])
    same(losses, eager[0][1:])
    assert len(filled) == 64


def test_after_a_failed_record_torch_works_as_before() -> None:
    x = torch.ones(8, device=DEVICE)
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        record_graph(lambda: x * x.sum().item(), DEVICE)
    assert torch.cuda.current_stream() == before
    assert F.dropout(x, 0.5).shape == (8,), "the generator draws"
    torch.cuda.manual_seed(3)
    torch.cuda.empty_cache()
    graph, result = record_graph(lambda: x + F.dropout(x, 0.5), DEVICE)
    graph.replay()
    assert float(result.min()) >= 1.0
    del graph, result
    torch.cuda.empty_cache()


@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_bfloat16_by_autocast_equals_members_alone(mode: str) -> None:
    half = loss_under(torch.bfloat16)
    given = batches(torch.float32)
    twins = models_of(convolutional, torch.float32)
    array, optimizer = array_of(convolutional, OPTIMIZERS["sgd"], torch.float32)
    step = (
        captured(array, optimizer, given, of=half)
        if mode == "captured"
        else TrainingStep(array, optimizer, half, ("eager",))
    )
    losses, _ = trained(array, step, given)
    for b, twin in enumerate(twins):
        own = OPTIMIZERS["sgd"](twin.parameters())
        for number, batch in enumerate(given):
            own.zero_grad()
            value = half(twin, batch)
            value.backward()
            own.step()
            same(losses[number, b].float(), value.detach().float(), 0.1)


def test_float16_with_a_loss_scale_of_each_member() -> None:
    half = loss_under(torch.float16)
    given = batches(torch.float32)
    twins = models_of(mlp, torch.float32)
    array, optimizer = array_of(mlp, OPTIMIZERS["sgd"], torch.float32)
    scaler = GradScaler(array, init_scale=2.0**30, growth_interval=2)
    step = TrainingStep(array, optimizer, half, ("eager",), scaler=scaler)
    losses = torch.stack([step(batch) for batch in given])
    for b, twin in enumerate(twins):
        own, scales = (
            OPTIMIZERS["sgd"](twin.parameters()),
            torch.amp.GradScaler("cuda", init_scale=2.0**30, growth_interval=2),
        )
        for number, batch in enumerate(given):
            own.zero_grad()
            value = half(twin, batch)
            scales.scale(value).backward()
            scales.step(own)
            scales.update()
            same(losses[number, b].float(), value.detach().float(), 0.05)
        assert float(scaler.get_scale()[b]) == scales.get_scale()


def test_the_lowerings_of_a_function_are_timed_on_the_device(tmp_path: Any) -> None:
    path = tmp_path / "tuning.sqlite"
    array, optimizer = array_of(convolutional, dtype=torch.float32)
    with autotuning(path):
        TrainingStep(array, optimizer, loss, ("eager",))(batches(torch.float32)[0])
    assert path.exists()
    assert torch.cuda.get_device_name(DEVICE).encode() in path.read_bytes()


def test_own_batches_of_the_members() -> None:
    array, optimizer = array_of(mlp)
    given = batches()
    losses = TrainingStep(array, optimizer, loss, ("eager",))(shoal.stack(given[:MEMBERS]))
    for b, twin in enumerate(models_of(mlp)):
        same(losses[b], loss(twin, given[b]).detach())


def test_generators_of_the_device_are_seeded_watched_and_restored() -> None:
    def drawn() -> Tensor:
        return torch.rand(4, device=DEVICE)

    seed_all(7, DEVICE)
    first = drawn()
    seed_all(7, DEVICE)
    assert torch.equal(drawn(), first)
    detector = DrawDetector(DEVICE)
    assert not detector()
    second = drawn()
    assert detector()
    detector.restore()
    assert torch.equal(drawn(), second)
    for context in (lambda: forked_rng([0]), lambda: preserved_rng(DEVICE)):
        seed_all(7, DEVICE)
        with context():
            drawn()
        assert torch.equal(drawn(), first)


def test_a_step_that_does_not_fit_the_memory_says_so_and_leaves_the_members_alone() -> None:
    def too_much(model: nn.Module, batch: Any) -> Tensor:
        if model.training and not fine:
            torch.empty(1 << 50, device=DEVICE)
        return loss(model, batch)

    fine = True
    array, optimizer = array_of(mlp)
    step = TrainingStep(array, optimizer, too_much, ("eager",))
    batch = batches()[0]
    step(batch)
    before = [copy.deepcopy(member.state_dict()) for member in array.members]
    fine = False
    with pytest.raises(torch.OutOfMemoryError):
        step(batch)
    same([member.state_dict() for member in array.members], before, 0.0)
    fine = True
    assert step(batch).shape == (MEMBERS,)


def test_a_metric_may_be_a_number_in_one_batch_and_on_the_gpu_in_another() -> None:
    column = torch.tensor([2.0, 4.0], dtype=torch.float64)
    for devices in (("cpu", DEVICE, "cpu"), (DEVICE, "cpu", DEVICE)):
        means = MetricMeans(2)
        for device in devices:
            means.add({"mixed": column.to(device)}, 3)
        assert means.per_trial() == [{"mixed": 2.0}, {"mixed": 4.0}]
