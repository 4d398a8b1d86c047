"""Norms: outputs, gradients and running statistics equal those of each member alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared_or_stacked import check_mixes
from torch import Tensor, nn
from twins import Make, check, check_table

from shoal.fuse.autotune import forced_lowerings
from shoal.fuse.stacked import NeedsMemberError, Stacked

torch.manual_seed(7)
X = torch.randn(6, 4, dtype=torch.float64)
SEQUENCE = torch.randn(3, 4, 5, dtype=torch.float64)
IMAGE = torch.randn(3, 4, 5, 4, dtype=torch.float64)
VOLUME = torch.randn(2, 4, 3, 3, 2, dtype=torch.float64)

FIRSTS: dict[str, tuple[Make, Tensor]] = {
    "rows": (lambda: nn.Linear(4, 4), X),
    "a row": (lambda: nn.Linear(4, 4), X[0]),
    "sequences": (lambda: nn.Conv1d(4, 4, 1), SEQUENCE),
    "images": (lambda: nn.Conv2d(4, 4, 1), IMAGE),
    "an image": (lambda: nn.Conv2d(4, 4, 1), IMAGE[0]),
    "volumes": (lambda: nn.Conv3d(4, 4, 1), VOLUME),
}
CASES: dict[str, tuple[Make, Any]] = {
    "batch": (lambda: nn.BatchNorm1d(4), "rows"),
    "batch of shared input": (lambda: nn.BatchNorm1d(4), X),
    "batch of shared images": (lambda: nn.BatchNorm2d(4), IMAGE),
    "batch 1d": (lambda: nn.BatchNorm1d(4), "sequences"),
    "batch 2d": (lambda: nn.BatchNorm2d(4), "images"),
    "batch 3d": (lambda: nn.BatchNorm3d(4), "volumes"),
    "batch cumulative": (lambda: nn.BatchNorm1d(4, momentum=None), "rows"),
    "batch without statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), "images"),
    "batch without weights": (lambda: nn.BatchNorm2d(4, affine=False), "images"),
    "batch of nothing but numbers": (lambda: nn.BatchNorm1d(4, affine=False, track_running_stats=False), "rows"),
    "batch with other settings": (lambda: nn.BatchNorm2d(4, eps=0.1, momentum=0.4), "images"),
    "synchronised batch": (lambda: nn.SyncBatchNorm(4), "images"),
    "lazy batch": (lambda: _initialised(nn.LazyBatchNorm2d(), IMAGE), IMAGE),
    "group": (lambda: nn.GroupNorm(2, 4), "images"),
    "group of one": (lambda: nn.GroupNorm(1, 4), "sequences"),
    "group of rows": (lambda: nn.GroupNorm(2, 4), "rows"),
    "group of shared input": (lambda: nn.GroupNorm(4, 4), IMAGE),
    "group without weights": (lambda: nn.GroupNorm(2, 4, affine=False), "rows"),
    "instance 1d": (lambda: nn.InstanceNorm1d(4), "sequences"),
    "instance 2d": (lambda: nn.InstanceNorm2d(4, affine=True), "images"),
    "instance 2d of one sample": (lambda: nn.InstanceNorm2d(4, affine=True), "an image"),
    "instance 2d tracked": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), "images"),
    "instance 3d": (lambda: nn.InstanceNorm3d(4, track_running_stats=True), "volumes"),
    "instance of shared input": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGE),
    "layer": (lambda: nn.LayerNorm(4), "rows"),
    "layer of one row": (lambda: nn.LayerNorm(4), "a row"),
    "layer of shared input": (lambda: nn.LayerNorm(4), X),
    "layer over axes": (lambda: nn.LayerNorm((4, 5, 4)), "images"),
    "layer without bias": (lambda: nn.LayerNorm(4, bias=False), "rows"),
    "layer without weights": (lambda: nn.LayerNorm(4, elementwise_affine=False), "rows"),
    "root mean square": (lambda: nn.RMSNorm(4), "rows"),
    "root mean square over axes": (lambda: nn.RMSNorm((5, 4), eps=0.1), "images"),
    "root mean square of shared input": (lambda: nn.RMSNorm(4), X),
    "root mean square without weights": (lambda: nn.RMSNorm(4, elementwise_affine=False), "rows"),
    "local response": (lambda: nn.LocalResponseNorm(2), "images"),
    "local response 1d": (lambda: nn.LocalResponseNorm(3, 0.1, 0.5, 2.0), "sequences"),
    "own momenta": (lambda: nn.BatchNorm2d(4, momentum=_own(0.1, 0.2)), "images"),
    "own momenta of rows": (lambda: nn.BatchNorm1d(4, momentum=_own(0.1, 0.2)), "rows"),
    "own momenta without statistics": (
        lambda: nn.BatchNorm1d(4, momentum=_own(0.1, 0.2), track_running_stats=False),
        "rows",
    ),
    "own momenta and nothing else": (
        lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=_own(0.1, 0.2), affine=False, track_running_stats=False)),
        X,
    ),
    "own momenta of instances": (
        lambda: nn.InstanceNorm2d(4, momentum=_own(0.1, 0.2), track_running_stats=True),
        "images",
    ),
    "own eps of batches": (lambda: nn.BatchNorm2d(4, eps=_own(0.1, 1.0)), "images"),
    "own eps of groups": (lambda: nn.GroupNorm(2, 4, eps=_own(0.1, 1.0)), "images"),
    "own eps of instances": (lambda: nn.InstanceNorm2d(4, eps=_own(0.1, 1.0)), "images"),
    "own eps of layers": (lambda: nn.LayerNorm(4, eps=_own(0.1, 1.0)), "rows"),
    "own eps of root mean squares": (lambda: nn.RMSNorm(4, eps=_own(0.1, 1.0)), "rows"),
}


def _own(start: float, width: float) -> float:
    """A number of the member that is being built, whose number is the seed."""
    return start + width * (torch.initial_seed() % 4) / 4


def _initialised(module: nn.Module, x: Tensor) -> nn.Module:
    module(x.float())
    return module


def test_norms() -> None:
    check_table(CASES, FIRSTS)


def test_evaluation_uses_the_running_statistics() -> None:
    kept = [name for name in CASES if "batch" in name or "tracked" in name or "own m" in name]
    check_table(
        {f"{name} in evaluation": (partial(evaluating, *CASES[name][:1]), *CASES[name][1:]) for name in kept},
        FIRSTS,
        members=[3],
    )


def evaluating(make: Make) -> nn.Module:
    return make().eval()


def test_training_and_evaluation_by_turns() -> None:
    def turns(model: nn.Module, x: Tensor) -> Tensor:
        first = model.train()(x)
        return first + model.eval()(x)

    check(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), X, fn=turns, members=3)


@pytest.mark.parametrize("momentum", [0.1, None], ids=["fixed", "cumulative"])
def test_members_that_have_seen_different_numbers_of_batches(momentum: float | None) -> None:
    def make() -> nn.Module:
        norm = nn.BatchNorm1d(4, momentum=momentum)
        norm.num_batches_tracked += torch.initial_seed() % 4  # which is the member's number
        return norm

    array = check(make, X, members=3, refused=momentum is None)  # a cumulative average asks for the number
    steps = 0 if momentum is None else 2
    assert [int(model.num_batches_tracked) for model in array.unfuse()] == [steps, 1 + steps, 2 + steps]


def test_a_custom_function_that_resizes_is_refused() -> None:
    check(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.CrossMapLRN2d(2)), IMAGE, members=3, refused=True)


def test_one_value_per_channel_is_refused_in_the_members_shape() -> None:
    x = Stacked(torch.randn(3, 1, 4))
    with pytest.raises(ValueError, match=r"more than 1 value per channel when training, got input size .*\[1, 4\]"):
        F.batch_norm(x, None, None, training=True)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(3, *shape, dtype=torch.float64))


MIXES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "batch in training": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        (_parameter(2, 4, 3), _parameter(4), _parameter(4)),
    ),
    "batch in evaluation": (
        lambda x, mean, var, w, b: F.batch_norm(x, mean, var, w, b),
        (_parameter(2, 4), torch.rand(3, 4).double(), torch.rand(3, 4).double(), _parameter(4), _parameter(4)),
    ),
    "instance": (
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        (_parameter(2, 4, 3), _parameter(4), _parameter(4)),
    ),
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), (_parameter(2, 4, 3), _parameter(4), _parameter(4))),
    "group of torch": (lambda x, w, b: torch.group_norm(x, 2, w, b), (_parameter(2, 4), _parameter(4), _parameter(4))),
    "layer": (lambda x, w, b: F.layer_norm(x, (4,), w, b), (_parameter(2, 4), _parameter(4), _parameter(4))),
    "layer without bias": (lambda x, w: F.layer_norm(x, (4, 2), w), (_parameter(4, 2), _parameter(4, 2))),
    "layer without weight": (lambda x, b: F.layer_norm(x, (4,), None, b), (_parameter(2, 4), _parameter(4))),
    "root mean square": (lambda x, w: F.rms_norm(x, (4,), w), (_parameter(2, 4), _parameter(4))),
    "root mean square of torch": (lambda x, w: torch.rms_norm(x, (4,), w, 0.1), (_parameter(2, 4), _parameter(4))),
}


@pytest.mark.parametrize("name", MIXES)
def test_shared_and_own_tensors_in_every_mix(name: str) -> None:
    fn, columns = MIXES[name]
    check_mixes(fn, *columns)


@pytest.mark.parametrize("lowering", ["at once", "loop"])
def test_large_layers_run_by_either_lowering(lowering: str) -> None:
    firsts = {"rows": (lambda: nn.Linear(4, 4), X.repeat(512, 1))}
    with forced_lowerings({"layer_norm": lowering}):
        check_table({name: CASES[name] for name in ("layer", "layer without bias")}, firsts, members=[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_higher_precision_leave_the_type_of_the_input(dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(2, *shape) for shape in ((3, 4), (4,), (4,)))
    whole = F.layer_norm(Stacked(x.to(dtype)), (4,), Stacked(weight), Stacked(bias)).whole
    assert whole.dtype == dtype
    expected = torch.stack([F.layer_norm(x[b], (4,), weight[b], bias[b]) for b in range(2)])
    torch.testing.assert_close(whole.float(), expected, rtol=0.02, atol=0.02)


def test_statistics_that_all_members_share_are_not_written_to() -> None:
    mean, var = torch.zeros(4), torch.ones(4)
    for norm in (F.batch_norm, F.instance_norm):
        with pytest.raises(NeedsMemberError, match="updates statistics that all members share"):
            norm(Stacked(torch.randn(3, 2, 4, 5)), mean, var, None, None, True)
    assert torch.equal(mean, torch.zeros(4))
