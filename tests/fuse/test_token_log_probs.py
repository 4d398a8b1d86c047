"""Log-probabilities of labels over a large vocabulary: equal to those of whole logits, in bounded memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import shoal
from shoal.core.errors import FusionError

HIDDEN, WORDS = 6, 11
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one row at a time": {"chunk": 1},
    "tiles of four rows": {"chunk": 4},
    "scaled": {"scale": 0.3},
    "limited": {"scale": 1.7, "softcap": 2.0, "chunk": 5},
    "another label ignored": {"ignore_index": 3},
}


def inputs(dtype: torch.dtype = torch.float64, trains: bool = False, seed: int = 0) -> tuple[Tensor, ...]:
    """Hidden states [3, 5, H], weight, bias, and labels of which some are ignored."""
    draw = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=draw).to(dtype)
        for shape in ((3, 5, HIDDEN), (WORDS, HIDDEN), (WORDS,))
    )
    labels = torch.randint(WORDS, (3, 5), generator=draw).index_fill(1, torch.tensor([seed % 5]), -100)
    return hidden.requires_grad_(), weight.requires_grad_(trains), bias.requires_grad_(trains), labels


def whole(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor, scale: float = 1.0, softcap: float = 0.0, **rest: Any
) -> tuple[Tensor, Tensor]:
    """Log-probabilities by all logits, and the logits, [rows, V]."""
    logits = F.linear(hidden, weight, bias).flatten(0, 1) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=rest.get("ignore_index", -100))
    return -losses.view(labels.shape), logits


@pytest.mark.parametrize("trains", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_cross_entropy_of_whole_logits(name: str, trains: bool) -> None:
    hidden, weight, bias, labels = inputs(trains=trains)
    labels = labels.where(labels >= 0, OPTIONS[name].get("ignore_index", -100))
    found = shoal.token_log_probs(hidden, weight, labels, bias=bias, **OPTIONS[name])
    expected, _ = whole(hidden, weight, labels, bias, **OPTIONS[name])
    wanted = (hidden, weight, bias) if trains else (hidden,)
    upstream = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(found, wanted, upstream),
        torch.autograd.grad(expected, wanted, upstream),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("name", ["plain", "limited"])
def test_statistics_are_those_of_whole_logits(name: str) -> None:
    hidden, weight, bias, labels = inputs()
    found = shoal.token_statistics(hidden, weight, labels, bias=bias, **OPTIONS[name])
    _, logits = whole(hidden, weight, labels, bias, **OPTIONS[name])
    p = logits.softmax(1)
    counted = labels >= 0
    expected = {
        "log_probs": shoal.token_log_probs(hidden, weight, labels, bias=bias, **OPTIONS[name]),
        "entropy": -(p * p.log()).sum(1).view(3, 5) * counted,
        "log_sum_squares": p.square().sum(1).log().view(3, 5) * counted,
        "mean_logits": logits.mean(1).view(3, 5) * counted,
        "is_top1": (logits.argmax(1).view(3, 5) == labels) & counted,
    }
    for field, value in expected.items():
        torch.testing.assert_close(getattr(found, field), value, rtol=1e-12, atol=1e-12)
        assert getattr(found, field).requires_grad == (field == "log_probs")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trains", [False, True], ids=["frozen head", "trained head"])
def test_statistics_of_less_than_float64_are_float32(dtype: torch.dtype, trains: bool) -> None:
    hidden, weight, bias, labels = inputs(dtype, trains)
    given = [hidden, weight, bias] if trains else [hidden]
    found = shoal.token_log_probs(hidden, weight, labels, bias=bias, chunk=2)
    exact = [each.detach().double().requires_grad_(each.requires_grad) for each in (hidden, weight, bias)]
    expected, _ = whole(exact[0], exact[1], labels, exact[2])
    gradients = torch.autograd.grad(found.sum(), given)
    assert found.dtype == torch.float32
    assert {each.dtype for each in gradients} == {dtype}
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)  # products of halves in float32, too
    rounding = torch.finfo(dtype).eps
    for own, exactly in zip(gradients, torch.autograd.grad(expected.sum(), exact[: len(given)]), strict=True):
        torch.testing.assert_close(own.double(), exactly, rtol=4 * rounding, atol=4 * rounding)


def test_autocast_rounds_the_operands() -> None:
    hidden, weight, bias, labels = inputs(torch.float32, trains=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = shoal.token_log_probs(hidden, weight, labels, bias=bias)
    halves = [each.detach().bfloat16() for each in (hidden, weight, bias)]
    assert torch.equal(found, shoal.token_log_probs(*halves[:2], labels, bias=halves[2]))
    assert [each.dtype for each in torch.autograd.grad(found.sum(), (hidden, weight))] == [torch.float32] * 2


def test_all_labels_ignored() -> None:
    hidden, weight, bias, labels = inputs(trains=True)
    found = shoal.token_log_probs(hidden, weight, torch.full_like(labels, -100), bias=bias)
    gradients = torch.autograd.grad(found.sum(), (hidden, weight, bias))
    assert not found.any()
    assert not any(each.any() for each in gradients)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, 4, dtype=torch.long)}, r"\(3, 5, 6\), \(11, 6\) and \(3, 4\)"),
        ({"weight": torch.zeros(11, 5, dtype=torch.float64)}, r"\(11, 5\)"),
        ({"weight": torch.zeros(0, 6, dtype=torch.float64)}, r"\(0, 6\)"),
        ({"bias": torch.zeros(6, dtype=torch.float64)}, r"a bias \[V\], got \(6,\)"),
        ({"labels": torch.zeros(3, 5)}, "labels of token_log_probs are indices, .*got torch.float32"),
        ({"labels": torch.full((3, 5), 11)}, "must be below 11, .* or be ignore_index=-100, got 11"),
        ({"labels": torch.full((3, 5), -1)}, "ignore_index=-100, got -1"),
        ({"chunk": 0}, "`chunk` of token_log_probs must be a whole number of rows above 0, got 0"),
        ({"chunk": 1.5}, "got 1.5"),
        ({"chunk": True}, "got True"),
    ],
)
@pytest.mark.parametrize("function", [shoal.token_log_probs, shoal.token_statistics])
def test_wrong_arguments_are_named(function: Any, change: dict[str, Any], message: str) -> None:
    hidden, weight, _, labels = inputs()
    with pytest.raises(FusionError, match=message):
        function(**({"hidden": hidden, "weight": weight, "labels": labels} | change))


def test_a_trace_holds_one_operator_for_any_number_of_tiles() -> None:
    hidden, weight, bias, labels = inputs()

    def step(hidden: Tensor) -> Tensor:
        return torch.autograd.grad(shoal.token_log_probs(hidden, weight, labels, bias=bias, chunk=2).sum(), hidden)[0]

    traced = make_fx(step)(hidden)
    names = [str(node.target) for node in traced.graph.nodes]
    assert sum("shoal.token_log_probs" in name for name in names) == 1
    assert not any("softmax" in name for name in names)
    torch.testing.assert_close(traced(hidden), step(hidden))


class Head(nn.Module):
    """A layer before a head, with labels of each member's own."""

    def __init__(self, seed: int, trains: bool) -> None:
        super().__init__()
        _, weight, _, labels = inputs(seed=seed)
        _, common, _, _ = inputs()
        self.layer = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.weight = nn.Parameter((weight if trains else common).detach(), requires_grad=trains)
        self.register_buffer("labels", labels)


Loss = Callable[[Head, Tensor], Tensor]


def of_tokens(model: Head, x: Tensor) -> Tensor:
    found = shoal.token_log_probs(model.layer(x), model.weight, model.labels, chunk=4)
    return -found.sum() / model.labels.ne(-100).sum()


def of_torch(model: Head, x: Tensor) -> Tensor:
    return F.linear_cross_entropy(model.layer(x).flatten(0, 1), model.weight, model.labels.flatten())


@pytest.mark.parametrize("trains", [False, True], ids=["common head", "own heads"])
@pytest.mark.parametrize(
    "loss",
    [
        of_tokens,
        pytest.param(
            of_torch, marks=pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch before 2.13")
        ),
    ],
)
def test_members_of_an_array_lose_what_they_lose_alone(loss: Loss, trains: bool) -> None:
    models = [Head(seed, trains) for seed in range(3)]
    x, *_ = inputs(seed=7)
    x = x.detach()
    alone = []
    for model in models:
        wanted = {name: each for name, each in model.named_parameters() if each.requires_grad}
        own = loss(model, x)
        gradients = torch.autograd.grad(own, list(wanted.values()))
        alone.append((own.detach(), dict(zip(wanted, gradients, strict=True))))
    array = shoal.fuse(models)
    losses = array.map(loss, x)
    losses.sum().backward()
    columns = {path: data.grad for path, data, _ in array.stacked_tensors()}
    for b, (expected, gradients) in enumerate(alone):
        torch.testing.assert_close(losses[b], expected, rtol=1e-12, atol=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(columns[name][b], gradient, rtol=1e-12, atol=1e-12)


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that a function holds at a time, besides what was there before."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    held = most = 0
    for event in sorted(profile.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_memory_does_not_grow_by_the_logits_of_members() -> None:
    words, rows, width = 32_000, 64, 8
    logits = 4 * words * rows  # bytes of one member
    weight = torch.randn(words, width)
    adapters = [nn.Linear(width, width) for _ in range(16)]
    x, labels = torch.randn(rows, width), torch.randint(words, (rows,))

    class Adapted(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer, self.weight = layer, nn.Parameter(weight, requires_grad=False)

    def peak(members: int, loss: Loss) -> int:
        array = shoal.fuse([Adapted(adapters[b]) for b in range(members)])
        return peak_bytes(lambda: array.map(loss, x).sum().backward())

    def tiled(model: Any, x: Tensor) -> Tensor:
        return -shoal.token_log_probs(model.layer(x), model.weight, labels, chunk=64).mean()

    def plain(model: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(model.layer(x), model.weight), labels)

    one, eight, sixteen = (peak(members, tiled) for members in (1, 8, 16))
    assert logits < one < 3 * logits, one / logits
    assert max(eight, sixteen) < 1.1 * one, (one, eight, sixteen)
    assert peak(2, plain) > 4 * logits  # the measure sees logits: there, they grow by member
