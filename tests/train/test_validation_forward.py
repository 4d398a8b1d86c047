"""Loss and metrics of a validation batch share one forward pass only where two passes have given the same."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.fuse.api import fuse
from shoal.task import Task
from shoal.train.metrics import ForwardReuse, validation_values

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
BATCHES = 3
BUFFER = np.zeros((4, 3), bool)
PLAIN = ForwardReuse(observes=False)


class Counted(nn.Module):
    """Counts its passes in a container that no attribute of it holds."""

    def __init__(self, passes: list[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.adapted = True
        self.switches = {"scale": 2.0}
        self.extras: dict[str, float] = {}
        self.register_buffer("shift", torch.zeros(()))
        self.passes = lambda: passes.append(1)

    def forward(
        self, x: Tensor, scale: float = 1.0, head: str = "a", other: str = "", mask: Tensor | None = None
    ) -> Tensor:
        self.passes()
        if mask is not None:
            scale *= float((mask.to_dense() if mask.is_sparse else mask).sum()) + 1.0
        shift = self.shift + self.extras.get("shift", 0.0) + (head == "b") + 2 * (other == "a")
        return self.linear(x) * scale * (self.switches["scale"] if self.adapted else 1.0) + shift


def unadapted(model: nn.Module) -> Tensor:
    model.adapted = False
    try:
        return model(X)
    finally:
        model.adapted = True


def switched(model: nn.Module) -> Tensor:
    model.switches["scale"] = 3.0
    try:
        return model(X)
    finally:
        model.switches["scale"] = 2.0


def added(model: nn.Module) -> Tensor:
    model.extras["shift"] = 1.0
    try:
        return model(X)
    finally:
        model.extras.clear()


def shifted(model: nn.Module) -> Tensor:
    model.shift.add_(1)
    return model(X)


def replaced_buffer(model: nn.Module) -> Tensor:
    model.shift = model.shift + 1
    return model(X)


def changed_output(model: nn.Module) -> Tensor:
    return model(X).zero_()


def changed_mask(model: nn.Module) -> Tensor:
    mask = X > 0
    found = model(X, mask=mask)
    mask.zero_()
    return found


def reused_mask(model: nn.Module, value: bool) -> Tensor:
    BUFFER.fill(value)  # past the counter of versions
    return model(X, mask=torch.from_numpy(BUFFER))


def noted_mask(model: nn.Module) -> Tensor:
    mask = X > 0
    found = model(X, mask=mask)
    mask.seen = True
    return found


def gradient(model: nn.Module) -> Tensor:
    with torch.enable_grad():
        return torch.autograd.grad(model(X).sum(), model.linear.weight)[0]


def sparse() -> Tensor:
    return torch.ones(4, 3).to_sparse()


def pruned_copy(model: nn.Module) -> Tensor:
    copied = copy.deepcopy(model)
    copied.linear.weight.zero_()
    return copied(X)


def by_signature(model: nn.Module) -> Tensor:
    known = inspect.signature(model.forward).parameters
    return model(X, **{name: value for name, value in {"scale": 3.0, "shift": 1.0}.items() if name in known})


def hooked(model: nn.Module) -> Tensor:
    seen: list[Tensor] = []
    handle = model.linear.register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        model(X)
    finally:
        handle.remove()
    return seen[0]


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "the same call": (lambda m: m(X), lambda m: m(X), 1 + BATCHES),
    "equal inputs that are not the same": (lambda m: m(X), lambda m: m(X.clone()), 2 * BATCHES),
    "equal masks": (lambda m: m(X, mask=X > 0), lambda m: m(X, mask=X > 0), 1 + BATCHES),
    "other masks": (lambda m: m(X, mask=X > 0), lambda m: m(X, mask=X > 9), 2 * BATCHES),
    "a mask changed after the call": (changed_mask, lambda m: m(X, mask=X > 9), 2 * BATCHES),
    "a mask in a buffer that is used again": (
        lambda m: reused_mask(m, True),
        lambda m: reused_mask(m, False),
        2 * BATCHES,
    ),
    "a mask that gets an attribute": (noted_mask, lambda m: m(X, mask=X > 0), 2 * BATCHES),
    "sparse inputs": (lambda m: m(X, mask=sparse()), lambda m: m(X, mask=sparse()), 2 * BATCHES),
    "another setting": (lambda m: m(X), lambda m: m(X, scale=2.0), 2 * BATCHES),
    "the value of another keyword": (lambda m: m(X, head="a"), lambda m: m(X, other="a"), 2 * BATCHES),
    "another head": (lambda m: m(X, head="a"), lambda m: m(X, head="b"), 2 * BATCHES),
    "a switch": (lambda m: m(X), unadapted, 2 * BATCHES),
    "a switch in a dict": (lambda m: m(X), switched, 2 * BATCHES),
    "an entry of an empty dict": (lambda m: m(X), added, 2 * BATCHES),
    "a buffer changed in place": (lambda m: m(X), shifted, 2 * BATCHES),
    "a replaced buffer": (lambda m: m(X), replaced_buffer, 2 * BATCHES),
    "noise": (lambda m: m(X), lambda m: m(X) + torch.rand(()), 1 + BATCHES),
    "an output changed in place": (changed_output, lambda m: m(X), 2 * BATCHES),
    "two calls in the loss": (lambda m: m(X) - unadapted(m), lambda m: m(X), 3 * BATCHES),
    "two calls in the metrics": (lambda m: m(X), lambda m: m(X) + m(X), 3 * BATCHES),
    "a look at the signature": (lambda m: m(X), by_signature, 2 * BATCHES),
    "a hook": (lambda m: m(X), hooked, 2 * BATCHES),
    "no call in the loss": (lambda m: m.linear(X), lambda m: m(X), BATCHES),
}

ALONE = CASES | {
    "a gradient": (lambda m: m(X), gradient, 2 * BATCHES),
    "a pruned copy": (lambda m: m(X), pruned_copy, 2 * BATCHES),
}
"""With what an array runs member by member."""


class Uses(Task):
    def __init__(self, loss: Callable[..., Any], metric: Callable[..., Any]) -> None:
        self.of_loss, self.of_metric = loss, metric

    def data(self, config: Any) -> Any: ...

    def model(self, config: Any) -> Any: ...

    def optimizer(self, model: nn.Module, config: Any) -> Any: ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.of_loss(model).mean()

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"value": self.of_metric(model).mean()}


def values(task: Task, model: nn.Module, reuse: ForwardReuse) -> list[float]:
    torch.manual_seed(0)
    with torch.no_grad():
        found, _ = validation_values(task, torch.no_grad, reuse, model, None)
    return [float(value) for value in found.values()]


@pytest.mark.parametrize(("loss", "metric", "passes"), ALONE.values(), ids=ALONE)
def test_passes_and_values(loss: Callable[..., Any], metric: Callable[..., Any], passes: int) -> None:
    task, counted = Uses(loss, metric), []
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(Counted(counted))
    reuse = ForwardReuse()
    reuse.begin_pass()
    found = [values(task, models[0], reuse) for _ in range(BATCHES)]
    assert len(counted) == passes
    assert found == [values(task, models[1], PLAIN) for _ in range(BATCHES)], "without any reuse"
    assert Counted.__call__ is nn.Module.__call__


@pytest.mark.parametrize(("loss", "metric", "passes"), CASES.values(), ids=CASES)
def test_in_an_array(loss: Callable[..., Any], metric: Callable[..., Any], passes: int) -> None:
    task, counted = Uses(loss, metric), []
    models = [Counted(counted) for _ in range(3)]
    array, reuse = fuse(models), ForwardReuse()
    reuse.begin_pass()
    seen = []

    def of_array(model: nn.Module) -> Any:
        before = len(counted)
        found, _ = validation_values(task, torch.no_grad, reuse, model, None)
        seen.append(len(counted) - before)
        return found["value"]

    with torch.no_grad():
        for _ in range(BATCHES):
            array.map(of_array)
    assert sum(seen) == passes


def test_passes_1_and_4_show_again_that_calls_are_alike() -> None:
    counted: list[int] = []
    model, reuse = Counted(counted), ForwardReuse()
    task = Uses(lambda m: m(X), lambda m: m(X))
    taken = []
    for _ in range(5):
        reuse.begin_pass()
        before = len(counted)
        for _ in range(BATCHES):
            values(task, model, reuse)
        taken.append(len(counted) - before)
    assert taken == [BATCHES + 1, BATCHES, BATCHES, BATCHES + 1, BATCHES]


def test_a_switch_after_the_first_batch_is_seen() -> None:
    model, reuse = Counted([]), ForwardReuse()
    batches = iter(range(BATCHES))
    task = Uses(lambda m: m(X), lambda m: m(X) if next(batches) == 0 else unadapted(m))
    reuse.begin_pass()
    first, second = values(task, model, reuse), values(task, model, reuse)
    assert first[1] == first[0]
    assert second[1] == pytest.approx(float(unadapted(model).detach().mean()))


class Repairing(nn.Module):
    """Lets rows without a valid token attend to all of them."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask[mask.sum(1) == 0] = 1
        return (x * mask).sum(1)


class Masked(Task):
    def data(self, config: Any) -> Any: ...

    def model(self, config: Any) -> Any: ...

    def optimizer(self, model: nn.Module, config: Any) -> Any: ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(*self.inputs(batch)).mean()

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        x, mask = self.inputs(batch)
        model(x, mask)
        return {"attended": mask.double().mean()}

    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, lengths = batch
        return x, (torch.arange(4) < lengths[:, None]).long()


def test_a_mask_that_the_model_repairs_in_a_later_batch_is_repaired_for_each_method() -> None:
    batches = [(torch.ones(3, 4), torch.tensor(lengths)) for lengths in ([1, 2, 3], [0, 2, 0], [4, 4, 1])]
    model, found = Repairing(), []
    for reuse in (ForwardReuse(), PLAIN):
        reuse.begin_pass()
        with torch.no_grad():
            of_pass = [validation_values(Masked(), torch.no_grad, reuse, model, each)[0] for each in batches]
        found.append([float(each["attended"]) for each in of_pass])
    assert found[0] == found[1] == [0.5, 10 / 12, 0.75]


def test_a_forward_of_the_instance_comes_back() -> None:
    model = Counted([])
    own = lambda x: x * 2  # noqa: E731
    model.forward = own
    found = values(Uses(lambda m: m(X), lambda m: m(X)), model, ForwardReuse())
    assert found == [pytest.approx(float((X * 2).mean()))] * 2
    assert vars(model)["forward"] is own


@pytest.mark.parametrize("metric", [lambda m: len(pickle.dumps(m)), lambda m: pickle.loads(pickle.dumps(m))(X).mean()])
def test_a_metric_that_pickles_the_model(metric: Callable[[nn.Module], Any]) -> None:
    model, reuse = nn.Linear(3, 2), ForwardReuse()
    task = Uses(lambda m: m(X), lambda m: torch.as_tensor(metric(m), dtype=torch.float32))
    assert [values(task, model, reuse) for _ in range(BATCHES)] == [values(task, model, PLAIN)] * BATCHES


def test_an_error_of_a_metric_leaves_the_class_as_it_was() -> None:
    def fails(model: nn.Module) -> Tensor:
        raise KeyError("head")

    with pytest.raises(KeyError, match="head"):
        values(Uses(lambda m: m(X), fails), Counted([]), ForwardReuse())
    assert "__call__" not in vars(Counted)


def test_a_model_that_is_no_more_than_its_modules() -> None:
    model = nn.Module()
    model.body, model.head = nn.Linear(3, 2), nn.Linear(2, 1)
    found = values(Uses(lambda m: m.body(X), lambda m: m.head(m.body(X))), model, ForwardReuse())
    with torch.no_grad():
        assert found == [float(model.body(X).mean()), float(model.head(model.body(X)).mean())]


def test_a_plain_copy_of_the_proof_calls_the_model_as_user_code_does() -> None:
    found: list[Any] = []
    task = Uses(lambda m: m(X), lambda m: found.append(type(m).__call__) or m(X))
    for reuse in (PLAIN, ForwardReuse()):
        values(task, Counted([]), reuse)
    assert found[0] is nn.Module.__call__
    assert found[1] is not nn.Module.__call__
