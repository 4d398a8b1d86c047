"""An array and equal models that run alone, for comparison."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from looped_functions import in_loops
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import FusedOptimizer

TOLERANCE = 1e-9
Make = Callable[[], nn.Module]


class Of(nn.Module):
    """A function as a model; it is called with the model and the input."""

    def __init__(self, fn: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.fn = fn

    def forward(self, *inputs: Any) -> Any:
        return self.fn(self, *inputs)


class Table(nn.Module):
    """Models side by side, each called with inputs of its own: results by name.

    Args:
        models: by name.
        firsts: name -> a layer before several of the models, whose result they are given for this name.
    """

    def __init__(self, models: Mapping[str, nn.Module], firsts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models.values())
        self.firsts = nn.ModuleList(firsts.values())

    def forward(self, inputs: Mapping[str, Any], of_firsts: Mapping[str, Tensor]) -> dict[str, Any]:
        hidden = {name: layer(x) for layer, (name, x) in zip(self.firsts, of_firsts.items(), strict=True)}
        return {
            name: model(*(hidden[x].clone() if isinstance(x, str) else x for x in inputs[name]))
            for model, name in zip(self.models, inputs, strict=True)
        }


def build(make: Make, members: int, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Models with weights and buffers of their own."""
    models = []
    for b in range(members):
        torch.default_generator.manual_seed(b)  # that of torch also notes a stack for each kind of GPU
        model = make().to(dtype)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.add_(torch.randn_like(tensor).abs() * 0.1)
        models.append(model)
    return models


def close(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    if actual.is_floating_point() and torch.allclose(actual, expected, tolerance, tolerance, equal_nan=True):
        return  # in a tenth of the time of the check that says what differs
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def check(
    make: Make,
    *batch: Any,
    fn: Callable[..., Any] | None = None,
    members: int = 2,
    refused: bool = False,
    steps: int = 2,
    tolerance: float = TOLERANCE,
) -> ModelArray:
    """Compare outputs, gradients and buffers with the members' run alone, for some steps.

    Args:
        make: makes one model.
        batch: shared by all.
        fn: as for `ModelArray.map`; by default the model is called.
        members: B.
        refused: whether the function cannot run for all members at once; this leaves no trace.
        steps: calls, of which gradients accumulate.
        tolerance: relative and absolute.
    """
    models = build(make, members)
    twins = build(make, members)
    array = fuse(models, seeds=range(members))
    fn = fn or (lambda model, *inputs: model(*inputs))
    if refused:
        with pytest.raises(FusionError, match=r"compute with tensors, .* for model in array\.unfuse\(\)\]"):
            array.map(fn, *copy.deepcopy(batch))
        compare_state(array, twins, tolerance)
        return array
    for _ in range(steps):
        result = array.map(fn, *copy.deepcopy(batch))
        expected = [fn(twin, *copy.deepcopy(batch)) for twin in twins]
        compare(result, expected, tolerance)
        total = sum(leaf.cos().sum() for leaf in _differentiable(result))
        if isinstance(total, Tensor):
            total.backward()
            for own in expected:
                sum(leaf.cos().sum() for leaf in _differentiable(own)).backward()
    compare_state(array, twins, tolerance)
    return array


def check_table(
    cases: Mapping[str, tuple[Any, ...]],
    firsts: Mapping[str, tuple[Make, Tensor]] | None = None,
    *,
    members: Sequence[int] = (1, 3),
    loops: Collection[str] | None = None,
    **options: Any,
) -> None:
    """Compare all cases of a table as one model, in a fraction of the time that they take one by one.

    What fails is run again case by case, and the one that fails by itself is named.

    Args:
        cases: name -> what makes a model, and its inputs; one of these may be the name of a first layer.
        firsts: name -> what makes a layer that stands before several cases, and its input.
        members: several B.
        loops: the only functions that may run in a loop, by neither a rule nor vmap; all may by default.
        options: of `check`.
    """

    def run(names: Collection[str], count: int) -> None:
        inputs = {name: cases[name][1:] for name in names}
        used = {x for given in inputs.values() for x in given if isinstance(x, str)}
        layers = {name: first for name, first in (firsts or {}).items() if name in used}

        def make() -> nn.Module:
            return Table(
                {name: cases[name][0]() for name in names}, {name: layer() for name, (layer, _) in layers.items()}
            )

        with in_loops() as found:
            check(make, inputs, {name: x for name, (_, x) in layers.items()}, members=count, **options)
        assert loops is None or set(found) <= set(loops), f"{found} ran in a loop"

    for count in members:
        try:
            run(cases, count)
        except Exception:
            for name in cases:
                try:
                    run([name], count)
                except Exception as error:
                    error.add_note(f"of {name!r}, {count} members")
                    raise
            raise


def compare(result: Any, expected: Sequence[Any], tolerance: float = TOLERANCE) -> None:
    leaves = pytree.tree_flatten_with_path(result)[0]
    own = [pytree.tree_leaves(value) for value in expected]
    assert {len(leaves)} == {len(values) for values in own}
    for i, (path, leaf) in enumerate(leaves):
        assert type(leaf) in (Tensor, nn.Parameter)
        assert len(leaf) == len(expected)
        for b, values in enumerate(own):
            value = values[i]
            close(
                leaf[b],
                value if isinstance(value, Tensor) else torch.tensor(value),
                f"output {pytree.keystr(path)} of {b}",
                tolerance,
            )


def compare_state(array: ModelArray, twins: Sequence[nn.Module], tolerance: float = TOLERANCE) -> None:
    columns = {path: data for path, data, _ in array.stacked_tensors()}
    for b, (member, twin) in enumerate(zip(array.unfuse(), twins, strict=True)):
        for name, parameter in twin.named_parameters():
            grad = columns[name].grad
            assert (parameter.grad is None) == (grad is None), name
            if grad is not None:
                close(grad[b], parameter.grad, f"gradient of {name} of {b}", tolerance)
        own = dict(member.named_buffers())
        for name, buffer in twin.named_buffers():
            close(own[name], buffer, f"buffer {name} of {b}", tolerance)
            close(columns[name][b], buffer, f"stacked buffer {name} of {b}", tolerance)


def _differentiable(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


def skip_if_torch_cannot_run(model: nn.Module, x: Any) -> None:
    """Skip the test where torch has no kernel for the model in half precision, as for LSTM on some CPUs."""
    try:
        model(x)
    except RuntimeError as error:
        if "primitive descriptor" in str(error):
            pytest.skip(f"torch runs no such model on this CPU: {error}")
        raise


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a classifier for inputs and classes."""
    return F.cross_entropy(model(batch[0]), batch[1])


def eager_step(
    array: ModelArray, optimizer: FusedOptimizer, batch: Any, loss: Callable[..., Tensor] = class_loss
) -> Tensor:
    """A step by the array and its optimizer themselves; the members' losses."""
    optimizer.zero_grad()
    losses: Tensor = array.map(loss, batch)
    losses.sum().backward()
    optimizer.step()
    return losses.detach()
