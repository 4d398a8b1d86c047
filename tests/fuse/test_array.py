"""`ModelArray`: making, calling, selecting and unfusing arrays of models."""

import copy
import gc
import multiprocessing
import pickle
import resource
import runpy
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import build, check, compare, compare_state

import shoal.fuse
from shoal.core.errors import FusionError
from shoal.fuse.api import concat, fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.step import TrainingStep
from shoal.fuse.structure import entries, structure_digest

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.0), nn.Linear(5, 3))


def array_of(members: int = 3, make: Callable[[], nn.Module] = make) -> ModelArray:
    return fuse(build(make, members), seeds=range(members))


def assert_views(array: ModelArray) -> None:
    for _, data, own in array.stacked_tensors():
        for b, tensor in enumerate(own):
            assert tensor.data_ptr() == data[b].data_ptr()
            assert tensor.dtype == data.dtype


def test_members_are_views_of_the_stacked_tensors() -> None:
    array = array_of()
    assert_views(array)
    assert [path for path, _, _ in array.stacked_tensors()] == [
        *("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"),
        *("4.weight", "4.bias"),
    ]
    with torch.no_grad():
        for parameter in array.parameters():
            parameter.mul_(2)
    array(X)
    for member in array.unfuse():
        for name, tensor in member.state_dict().items():
            whole = dict(array.state_dict())[f"stacked.{name}"]
            assert any(torch.equal(tensor, row) for row in whole)


def test_unfused_members_are_the_users_own() -> None:
    models = build(make, 2)
    array = fuse(models)
    assert all(mine is own for mine, own in zip(array.unfuse(), models, strict=True))
    assert type(array.unfuse()[0][0].weight) is nn.Parameter
    whole = array.eval()(X)
    compare(whole, [model(X) for model in models])


def test_state_dict_round_trip() -> None:
    array, other = array_of(), array_of()
    array(X)
    with torch.no_grad():
        other.stacked.get_submodule("0").weight.zero_()
    other.load_state_dict(array.state_dict())
    torch.testing.assert_close(other.eval()(X), array.eval()(X))
    assert_views(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moves_to_another_number_type(dtype: torch.dtype) -> None:
    array = array_of()
    array(X)
    array.to(dtype)
    assert_views(array)
    assert array(X.to(dtype)).dtype == dtype
    assert {p.dtype for member in array.unfuse() for p in member.parameters()} == {dtype}
    array.double()
    assert array(X).dtype == torch.float64


def test_train_and_eval_reach_the_members() -> None:
    array = array_of()
    assert array.eval() is array
    assert not array.training
    assert not any(module.training for member in array.unfuse() for module in member.modules())
    before = array.stacked.get_submodule("1").num_batches_tracked.clone()
    array(X)
    assert torch.equal(array.stacked.get_submodule("1").num_batches_tracked, before)
    array.train()
    array(X)
    assert torch.equal(array.stacked.get_submodule("1").num_batches_tracked, before + 1)


def test_models_that_are_evaluating_stay_so() -> None:
    array = fuse([model.eval() for model in build(make, 2)])
    assert not array.training
    torch.testing.assert_close(array(X), array(X))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda array: pickle.loads(pickle.dumps(array))], ids=["copy", "pickle"]
)
def test_a_copy_is_an_array_of_its_own(how: Callable[[ModelArray], ModelArray]) -> None:
    array = array_of()
    array(X)
    other = how(array)
    assert_views(other)
    assert (other.seeds, other.tick, len(other)) == (array.seeds, array.tick, 3)
    torch.testing.assert_close(other(X), array(X))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not torch.allclose(other(X), array(X))


def test_select_and_concat_keep_each_members_course() -> None:
    def course(array: ModelArray) -> list[Tensor]:
        return [array(X) for _ in range(2)]

    noisy = lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.BatchNorm1d(8))  # noqa: E731
    whole = array_of(4, noisy)
    second = course(whole)[1]
    parts = array_of(4, noisy)
    _ = parts(X)
    picked = parts.select([3, 1])
    assert_views(picked)
    torch.testing.assert_close(picked(X), second[[3, 1]])
    joined = concat([picked, fused_again(noisy, [0, 2])])
    assert_views(joined)
    assert joined.seeds == (3, 1, 0, 2)
    third = whole(X)
    torch.testing.assert_close(joined(X), third[[3, 1, 0, 2]])


def fused_again(make: Callable[[], nn.Module], which: list[int]) -> ModelArray:
    models = build(make, 4)
    array = fuse([models[b] for b in which], which)
    array(X)
    array(X)
    return array


def test_members_of_arrays_at_different_steps_keep_their_random_numbers() -> None:
    ahead, behind, alone = (array_of(2, lambda: nn.Dropout(0.5)) for _ in range(3))
    ahead(X), ahead(X), behind(X)
    joined = concat([ahead.select([1]), behind])
    assert joined.ticks == (2, 1, 1)
    together = [joined(X) for _ in range(2)]
    expected = [alone(X) for _ in range(4)]
    for step, masked in enumerate(together):
        assert torch.equal(masked, torch.stack([expected[2 + step][1], *expected[1 + step]]))
    assert pickle.loads(pickle.dumps(joined)).ticks == (4, 3, 3)


def peak_of_fusing(found: Connection) -> None:
    """Send by how many MB the peak of this process grows as models of 32 MB each become an array."""
    models = [nn.Linear(2048, 4096, bias=False) for _ in range(4)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    array = fuse(models)
    assert array.stacked.weight.shape == (4, 4096, 2048)
    found.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def test_building_takes_the_memory_of_one_member_more() -> None:
    """In a process of its own, whose peak only grows."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=peak_of_fusing, args=(theirs,))
    process.start()
    assert ours.recv() < 2 * 32
    process.join()


def test_a_run_of_members_is_a_view_of_their_array() -> None:
    array = array_of(5)
    data = {path: data.data_ptr() for path, data, _ in array.stacked_tensors()}
    part = array.select([1, 2, 3])
    sizes = {path: own[0].nbytes for path, _, own in part.stacked_tensors()}
    assert {path: d.data_ptr() - sizes[path] for path, d, _ in part.stacked_tensors()} == data
    back = concat([part.select([0]), fused_to(part, 2), fused_to(part, 1)])
    assert len(back) == 3
    assert_views(back)


def fused_to(array: ModelArray, b: int) -> ModelArray:
    other = fuse([array.members[b]])
    other.tick = array.tick
    return other


def test_keyword_arguments() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor, *, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
            out = self.linear(x) * scale
            return out if shift is None else out + shift

    models = build(Scaled, 2)
    whole = fuse(models)(x=X, scale=3.0, shift=torch.ones(2, dtype=torch.float64))
    compare(whole, [model(x=X, scale=3.0, shift=torch.ones(2, dtype=torch.float64)) for model in models])


def test_gradients_without_backward() -> None:
    models = build(make, 3)
    twins = copy.deepcopy(models)
    array = fuse(models)
    loss = lambda model, x: F.mse_loss(model(x), torch.ones(6, 3, dtype=x.dtype))  # noqa: E731
    grads = torch.autograd.grad(array.map(loss, X).sum(), list(array.parameters()))
    for b, twin in enumerate(twins):
        own = torch.autograd.grad(loss(twin, X), list(twin.parameters()))
        for mine, expected in zip(grads, own, strict=True):
            torch.testing.assert_close(mine[b], expected)


def test_backward_twice_and_accumulation() -> None:
    models = build(make, 2)
    twins = copy.deepcopy(models)
    array = fuse(models)
    loss = array(X).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for twin in twins:
        own = twin(X).square().sum()
        own.backward(retain_graph=True)
        own.backward()
    compare_state(array, twins)


@pytest.mark.parametrize("members", [1, 2])
def test_nothing_is_recorded_without_gradients(members: int) -> None:
    array = array_of(members)
    with torch.no_grad():
        assert not array(X).requires_grad
    with torch.inference_mode():
        array(X)
    assert array(X).requires_grad


def test_second_derivatives() -> None:
    def curvature(model: nn.Module, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(model(x).tanh().sum(), model.weight, create_graph=True)
        return grad.square().sum()

    check(lambda: nn.Linear(4, 3), X, fn=curvature, members=3)


def test_gradients_of_a_batch_at_once_are_refused() -> None:
    def slope(model: nn.Module, x: Tensor) -> Tensor:
        own = x * model.weight.sum()
        return torch.autograd.functional.jacobian(lambda y: model(y).sum(1), own, vectorize=True).square().mean()

    with pytest.raises(FusionError, match="it computes gradients of a batch at once"):
        array_of(2, lambda: nn.Linear(4, 3)).map(slope, X)


def test_a_stacked_batch() -> None:
    array = array_of(2, lambda: nn.Linear(4, 4))
    with array.open() as model:
        hidden = model(X)
    whole = array.map(lambda model, x: model(x), hidden)
    compare(whole, [model(model(X)) for model in array.unfuse()])


def test_the_tick_counts_calls_and_decides_the_masks() -> None:
    array = array_of(2, lambda: nn.Dropout(0.5))
    first = array(X)
    assert array.tick == 1
    second = array(X)
    array.tick = 0
    assert torch.equal(array(X), first)
    with array.open() as model:
        assert torch.equal(model(X + 0).whole, second)
    assert array.tick == 2


def test_lambdas_run_at_once() -> None:
    array = array_of()
    for _ in range(5):
        array.map(lambda model, x: model(x), X)


def test_frozen_parameters_stay_frozen() -> None:
    models = build(make, 2)
    for model in models:
        model[0].requires_grad_(False)
    array = fuse(models)
    array(X).sum().backward()
    frozen = {path: data.requires_grad for path, data, _ in array.stacked_tensors() if isinstance(data, nn.Parameter)}
    assert [path for path, wanted in frozen.items() if not wanted] == ["0.weight", "0.bias"]
    assert array.stacked.get_submodule("0").weight.grad is None


class Lists(nn.Module):
    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.tensors = tensors


class Holding(nn.Module):
    """Whatever steers a forward pass."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "arguments of a partial": (partial(F.leaky_relu, negative_slope=0.1), partial(F.leaky_relu, negative_slope=0.3)),
    "functions of a partial": (partial(torch.tanh), partial(torch.relu)),
    "numpy numbers": (np.int64(1), np.int64(2)),
    "numpy arrays": (np.arange(3), np.arange(3) * 2),
    "slices": (slice(1), slice(2)),
    "ranges": (range(1), range(2)),
    "queues": (deque([1]), deque([2])),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_values_that_steer_a_forward_pass_tell_structures_apart(name: str) -> None:
    one, other = (Holding(value) for value in DIFFERENT[name])
    assert entries(one) != entries(other)
    assert entries(one) == entries(copy.deepcopy(one))


def shared_parameter() -> list[nn.Module]:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return [first, second]


def same_twice() -> list[nn.Module]:
    model = nn.Tanh()
    return [model, model]


def one_memory(bias: Callable[[nn.Parameter], Any]) -> nn.Module:
    """A model whose second bias is made of the memory of the first."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    del model[1].bias
    model[1].bias = bias(model[0].bias)
    return model


IN_ONE_MEMORY: dict[str, Callable[[nn.Parameter], Any]] = {
    "of two parameters": lambda bias: nn.Parameter(bias.data),
    "of a parameter that is frozen": lambda bias: nn.Parameter(bias.data, requires_grad=False),
    "of a buffer": lambda bias: nn.Buffer(bias.data),
}


@pytest.mark.parametrize("bias", IN_ONE_MEMORY.values(), ids=IN_ONE_MEMORY)
def test_what_is_trained_in_the_memory_of_another_tensor_is_trained_alone(bias: Callable[[nn.Parameter], Any]) -> None:
    model = one_memory(bias)
    with pytest.raises(FusionError, match=r"member 0: '0.bias' and '1.bias' lie in one memory"):
        fuse([model, one_memory(bias)])
    twin = one_memory(bias)
    twin.load_state_dict(model.state_dict())
    array = fuse([model])
    mine = torch.optim.SGD(array.members[0].parameters(), lr=0.1)
    step = TrainingStep(array, fuse_optimizers([mine], array), lambda model, x: model(x).square().mean())
    own = torch.optim.SGD(twin.parameters(), lr=0.1)
    for x in torch.randn(9, 4, 2, dtype=torch.float64):
        own.zero_grad()
        twin(x).square().mean().backward()
        own.step()
        step(x)
    for trained, wanted in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(trained, wanted, rtol=1e-9, atol=1e-12)


def test_what_nobody_trains_may_lie_in_one_memory() -> None:
    models = [one_memory(lambda bias: nn.Buffer(bias.data)) for _ in range(2)]
    for model in models:
        model[0].bias.requires_grad_(False)
    assert len(fuse(models)) == 2


REFUSED: dict[str, tuple[Callable[[], list[nn.Module]], str]] = {
    "none": (list, "empty list"),
    "width": (lambda: [nn.Linear(2, 2), nn.Linear(2, 3)], r"member 1 differs from member 0 at 'weight': .*\(2, 2\)"),
    "class": (lambda: [nn.Sequential(nn.Tanh()), nn.Sequential(nn.ReLU())], "at '0'"),
    "depth": (lambda: [nn.Sequential(nn.Tanh()), nn.Sequential(nn.Tanh(), nn.Tanh())], "'1'"),
    "mode": (lambda: [nn.Tanh(), nn.Tanh().eval()], "training against .* evaluating"),
    "option": (lambda: [nn.MaxPool2d(2), nn.MaxPool2d(3)], "at 'kernel_size': 2 against 3"),
    "type": (lambda: [nn.Linear(2, 2), nn.Linear(2, 2).double()], r"float32 against .*float64"),
    "frozen": (lambda: [nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)], "frozen"),
    "shared": (shared_parameter, "members 0 and 1 share the tensor 'weight'"),
    "same": (same_twice, "the same model"),
    "device": (lambda: [nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)], "several devices"),
    "tensors in a tuple": (lambda: [Lists((torch.zeros(2),)), Lists((torch.ones(2),))], "'tensors': .* of values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    models, message = REFUSED[name]
    with pytest.raises(FusionError, match=message):
        fuse(models())


def test_seeds_are_counted() -> None:
    with pytest.raises(FusionError, match="2 models need as many seeds, got 1"):
        fuse([nn.Tanh(), nn.Tanh()], seeds=[1])


def test_digests_tell_structures_apart_and_ignore_values() -> None:
    same = {structure_digest(nn.Sequential(nn.Linear(2, 2), nn.Dropout(rate))) for rate in (0.1, 0.5)}
    others = {
        structure_digest(model)
        for model in (nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 3), nn.Linear(2, 2).double())
    }
    assert len(same) == 1
    assert len(others | same) == 5


OF_A_PROCESS: dict[str, tuple[Any, Any]] = {
    "hashes": (hash("seeded anew"), hash("in each process")),
    "ids": ({id(DIFFERENT): "held"}, {id(Holding): "held"}),
    "addresses in strings": ("<Cache object at 0x7f28c9be1a10>", "<Cache object at 0x7f5d01a3c450>"),
    "orders of sets": (dict.fromkeys(["a", "b"], 1), dict.fromkeys(["b", "a"], 1)),
}


@pytest.mark.parametrize("name", OF_A_PROCESS)
def test_digests_ignore_what_each_process_has_of_its_own(name: str) -> None:
    one, other = (Holding(value) for value in OF_A_PROCESS[name])
    assert entries(one) != entries(other), "within a process it is told apart"
    assert structure_digest(one) == structure_digest(other)


def test_digests_tell_arrays_of_objects_by_what_these_hold() -> None:
    arrays = [np.array([object(), value], dtype=object) for value in (1, 1, 2)]
    one, same, other = (structure_digest(Holding(array)) for array in arrays)
    assert one == same != other


def test_digests_of_classes_made_by_functions_are_those_of_before_a_pickle() -> None:
    def made() -> nn.Module:
        class Slotted:
            __slots__ = ("value",)

        held = Slotted()
        held.value = 1
        return Holding(held)

    once = made()
    before = structure_digest(once)
    copy.copy(once.value)  # notes the names of slots on the class
    assert structure_digest(once) == before == structure_digest(made())


SCRIPT = """
import cloudpickle
from torch import nn
from shoal.fuse.structure import structure_digest
class Net(nn.Module):
    slope = 2
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
    def forward(self, x):
        return [self.slope * y for y in self.layer(x)]
digest, pickled = structure_digest(Net()), cloudpickle.dumps(Net)
"""


def test_a_script_and_its_workers_have_one_digest_of_its_classes(tmp_path: Path) -> None:
    """To the workers `__main__` is another module, as it is here, and its classes come by value."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    of_script = runpy.run_path(str(path), run_name="__main__")
    digest, pickled, net = of_script["digest"], of_script["pickled"], weakref.ref(of_script["Net"])
    del of_script
    gc.collect()
    assert net() is None, "which would be found by the pickle"
    assert structure_digest(pickle.loads(pickled)()) == digest


def test_exports() -> None:
    assert {"ModelArray", "concat", "fuse"} <= set(shoal.fuse.__all__)
    assert all(hasattr(shoal.fuse, name) for name in shoal.fuse.__all__)
