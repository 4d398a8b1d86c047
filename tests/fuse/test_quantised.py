"""Frozen weights quantised by bitsandbytes, and packed parameters of other classes: kept and computed once."""

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse, stack
from shoal.fuse.frozen import load_own_state, same_values
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.quantised import prepare_quantised, state_tensors
from shoal.fuse.rows import bytes_of, is_packed
from shoal.fuse.structure import structure_digest

bnb: Any = pytest.importorskip("bitsandbytes")

X = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1))

NF4 = {"quant_type": "nf4", "compute_dtype": torch.float32, "compress_statistics": False}
FOUR: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "doubly": {**NF4, "compress_statistics": True},
    "bfloat16 storage": {**NF4, "quant_storage": torch.bfloat16},
    "fp4": {**NF4, "quant_type": "fp4"},
    "dtype of the first input": {**NF4, "compute_dtype": None},
}
EIGHT: dict[str, dict[str, Any]] = {"int8": {"threshold": 0.0}, "int8 with outliers": {"threshold": 6.0}}
KINDS = {**FOUR, **EIGHT}


def layer(kind: str, inputs: int, outputs: int, scale: float = 1.0, bias: bool = True) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias)
    with torch.no_grad():
        made.weight.mul_(scale)
    if kind in FOUR:
        quantised = bnb.nn.Linear4bit(inputs, outputs, bias, **FOUR[kind])
    else:
        quantised = bnb.nn.Linear8bitLt(inputs, outputs, bias, has_fp16_weights=False, **EIGHT[kind])
    quantised.load_state_dict(made.state_dict())
    return quantised.requires_grad_(False)


class Adapted(nn.Module):
    """Two quantised layers, beside the first of which is an adapter."""

    def __init__(self, kind: str, b: int = 0, rank: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = layer(kind, 64, 64, scale), layer(kind, 64, 32)
        torch.manual_seed(b + 1)
        self.down, self.up = nn.Linear(64, rank, bias=False), nn.Linear(rank, 64, bias=False)
        self.alpha = 1.0 + b
        self.dropout = nn.Dropout(0.1 + 0.05 * b)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.alpha * self.up(self.down(self.dropout(x)))
        return self.second(hidden.tanh())


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), Y)


def models(kind: str, ranks: Iterable[int] = (4, 4, 4)) -> list[nn.Module]:
    return [Adapted(kind, b, rank).to("cpu") for b, rank in enumerate(ranks)]


def optimizer_of(model: nn.Module, b: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01 * (b + 1))


def train(members: Sequence[nn.Module], first: int = 0) -> Tensor:
    """Train models as one array, the first of which has this number; return the losses [B, 4] of steps and the end."""
    array = fuse(members, range(first, first + len(members)), strict=False)
    optimizer = fuse_optimizers([optimizer_of(model, b) for b, model in enumerate(members, first)], array)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = array.map(loss, X)
        losses.sum().backward()
        optimizer.step()
        found.append(losses.detach())
    array.eval()
    with torch.no_grad():
        found.append(array.map(loss, X))
    return torch.stack(found, dim=1)


def storages(members: Iterable[nn.Module]) -> set[int]:
    """Addresses of the memory of codes and scales."""
    packed = [each for model in members for each in model.parameters() if is_packed(each)]
    scales = [each for model in members for each in state_tensors(model)]
    return {each.untyped_storage().data_ptr() for each in (*packed, *scales)}


@pytest.mark.parametrize("kind", KINDS)
def test_members_train_as_alone_and_the_base_is_kept_once(kind: str) -> None:
    ranks = [4, 2, 8]
    own, alone = models(kind, ranks), models(kind, ranks)
    found = train(own)
    for b, model in enumerate(alone):
        torch.testing.assert_close(found[b], train([model], b)[0], rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(own[b].parameters(), model.parameters(), strict=True):
            if mine.requires_grad:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)
    assert len(storages(own)) == len(storages(own[:1])) == len(storages(alone[:1]))
    assert {type(each) for each in own[2].parameters()} == {type(each) for each in alone[2].parameters()}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_twice_the_weights_have_equal_codes_and_are_no_array(kind: str) -> None:
    one, twice = Adapted(kind).to("cpu"), Adapted(kind, scale=2.0).to("cpu")
    prepare_quantised(one), prepare_quantised(twice)
    assert torch.equal(one.first.weight.detach(), twice.first.weight.detach())
    assert not same_values(one.first.weight, twice.first.weight)
    with pytest.raises(FusionError, match=r"'first\.weight' is a bitsandbytes\.nn\.modules\..*, of which an array can"):
        fuse([one, twice])


def gradients(members: list[Any], validate: bool) -> list[Tensor]:
    for model in members:
        model.first.support_avx512bf16_for_cpu = model.second.support_avx512bf16_for_cpu = True
    array = fuse(members, range(len(members)))
    if validate:
        array.eval()
        with torch.no_grad():
            array.map(loss, X)
            loss(array.unfuse()[0], X)
        array.train()
    array.tick = 0
    array.map(loss, X).sum().backward()
    return [each.grad for each in array.stacked.parameters() if each.requires_grad]


@pytest.mark.parametrize("kind", FOUR)
def test_training_after_an_evaluation_has_the_gradients_of_that_without_one(kind: str) -> None:
    """On some CPUs, bitsandbytes repacks the weights in an evaluation, and then computes without autograd."""
    plain, validated = (gradients(models(kind), validate) for validate in (False, True))
    assert len(plain) == 2
    assert all(torch.equal(one, other) and one.norm() > 0 for one, other in zip(plain, validated, strict=True))


def test_an_outlier_of_a_member_leaves_the_others_alone() -> None:
    """With a threshold, the columns of outliers are computed in another way for all rows of a call."""
    array = fuse(models("int8 with outliers"))
    array.eval()
    other = X.clone()
    other[0, 0, 3] = 50.0
    with torch.no_grad():
        before, after = (array.map(lambda model, x: model.first(x), stack([X, x, X])) for x in (X, other))
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1, 1:], after[1, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_for_all_members(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Linear4bit" if kind in FOUR else "Linear8bitLt"
    plain, shapes = getattr(bnb.nn, name).forward, []

    def counted(self: Any, x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return plain(self, x)

    array = fuse(models(kind))
    monkeypatch.setattr(f"bitsandbytes.nn.modules.{name}.forward", counted)
    array.map(loss, X)
    each = [(3, 5, 64)] * 3 if kind == "int8 with outliers" else [(3 * 3 * 5, 64)]
    assert shapes == [(3, 5, 64), *each], "the first has an input that all members share"


def test_a_bias_of_each_member_is_trained() -> None:
    def biased(b: int) -> nn.Module:
        model = Adapted("nf4", b).to("cpu")
        model.second.bias.requires_grad_(True)
        with torch.no_grad():
            model.second.bias.add_(b)
        return model

    own, alone = ([biased(b) for b in range(2)] for _ in range(2))
    found = train(own)
    for b, model in enumerate(alone):
        torch.testing.assert_close(found[b], train([model], b)[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own[b].second.bias, model.second.bias)


def double(model: nn.Module) -> nn.Module:
    model.down.double(), model.up.double()
    return model


def repacked(model: nn.Module) -> nn.Module:
    model.first.weight.quant_state.packing_format_for_cpu = True
    return model


BAD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "not quantised, 4 bit": (
        lambda: Adapted("nf4"),
        r"'first\.weight' is a weight .* not quantised yet; .*model\.to\(",
    ),
    "not quantised, 8 bit": (lambda: Adapted("int8"), r"'first\.weight' is a weight .* not quantised yet"),
    "in float64": (
        lambda: double(Adapted("dtype of the first input").to("cpu")),
        r"'first\.weight' would be computed in float64, .*bnb_4bit_compute_dtype=torch\.float32",
    ),
    "repacked": (lambda: repacked(Adapted("nf4").to("cpu")), r"'first\.weight' was repacked .*make the model anew, or"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_base_that_cannot_train_is_refused(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(FusionError, match=message):
        fuse([make(), make()])


def test_adapters_in_float64_are_as_alone_on_a_base_that_computes_in_float32() -> None:
    own, alone = ([double(model) for model in models("nf4")] for _ in range(2))
    array = fuse(own)
    array.eval()
    found = array.map(loss, X.double())
    for b, model in enumerate(alone):
        prepare_quantised(model)  # else a processor with instructions for bfloat16 evaluates in bfloat16
        torch.testing.assert_close(found[b], loss(model.eval(), X.double()), rtol=1e-6, atol=0)


def test_what_is_unpickled_has_its_class_and_its_scales() -> None:
    array = fuse(models("doubly"))
    array.eval()
    again = pickle.loads(pickle.dumps(array))
    assert {type(model.first.weight) for model in again.members} == {bnb.nn.Params4bit}
    assert len(storages(again.members)) == len(storages(again.members[:1]))
    torch.testing.assert_close(again.map(loss, X), array.map(loss, X))


@pytest.mark.parametrize("kind", ["nf4", "doubly", "bfloat16 storage", "int8"])
def test_a_state_dict_of_another_base_is_loaded_with_its_scales(kind: str) -> None:
    one, other = Adapted(kind).to("cpu").eval(), Adapted(kind, scale=3.0).to("cpu").eval()
    prepare_quantised(one), prepare_quantised(other)
    if kind == "int8":
        one(X)  # which moves the scales to the layer's state
    load_own_state(one, copy.deepcopy(other.state_dict()))
    assert same_values(one.first.weight, other.first.weight)
    torch.testing.assert_close(one(X), other(X))


def test_settings_of_a_layer_are_part_of_its_structure() -> None:
    made = {kind: [Adapted(kind).to("cpu") for _ in range(2)] for kind in KINDS}
    for same in made.values():
        assert structure_digest(same[0]) == structure_digest(same[1])
    assert len({structure_digest(one) for one, _ in made.values()}) == len(KINDS)


class Packed(nn.Parameter):
    """A parameter of another library: halves of numbers, and what to multiply them by."""

    def __new__(cls, codes: Tensor, scale: Tensor, bits: int = 8) -> "Packed":
        made: Packed = Tensor._make_subclass(cls, codes, False)  # type: ignore[attr-defined]
        made.scale, made.bits = scale, bits
        return made

    def __deepcopy__(self, memo: Any) -> "Packed":
        return Packed(self.detach().clone(), self.scale.clone(), self.bits)


class Foreign(nn.Module):
    def __init__(self, b: int, factor: float = 1.0, bits: int = 8) -> None:
        super().__init__()
        codes = torch.arange(64 * 32).remainder(17).view(32, 64).to(torch.int8)
        self.weight = Packed(codes, torch.linspace(0.1, 0.2, 32) * factor, bits)
        torch.manual_seed(b)
        self.first = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        held: Any = self.weight
        return F.linear(self.first(x), held.to(x.dtype) * 0.01)


def test_a_packed_parameter_of_any_library_is_shared_if_equal() -> None:
    own, alone = ([Foreign(b) for b in range(3)] for _ in range(2))
    found = train(own)
    for b, model in enumerate(alone):
        torch.testing.assert_close(found[b], train([model], b)[0], rtol=1e-5, atol=1e-6)
    held: list[Any] = [model.weight for model in own]
    assert len({each.data_ptr() for each in held}) == len({each.scale.data_ptr() for each in held}) == 1
    assert bytes_of([held[0]]) == 64 * 32 + 32 * 4
    with pytest.raises(FusionError, match=r"'weight' is a .*Packed, a class of tensors of its own"):
        fuse([Foreign(0), Foreign(1, factor=2.0)])
    with pytest.raises(FusionError, match=r"member 1 differs from member 0 at 'weight'"):
        fuse([Foreign(0), Foreign(1, bits=4)])


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_models_of_the_same_parameters_are_not_compared(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Adapted(kind).to("cpu")
    prepare_quantised(base)
    shells: list[Any] = []
    for b in range(3):
        shell = copy.deepcopy(base, {id(each): each for each in base.parameters() if not each.requires_grad})
        torch.manual_seed(b + 1)
        nn.init.normal_(shell.up.weight, std=0.1)
        shells.append(shell)
    alone = [copy.deepcopy(shell) for shell in shells]

    def refuse(*_: Tensor) -> bool:
        raise AssertionError("values are compared")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", refuse)
        array = fuse(shells)
    assert all(shell.first.weight is base.first.weight for shell in shells)
    optimizer = fuse_optimizers([torch.optim.SGD(shell.parameters(), 0.1) for shell in shells], array)
    array.eval()
    losses = array.map(loss, X)
    losses.sum().backward()
    optimizer.step()
    for b, model in enumerate(alone):
        made = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
        prepare_quantised(model.eval())
        value = loss(model, X)
        value.backward()
        made.step()
        torch.testing.assert_close(losses[b], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(shells[b].up.weight, model.up.weight)


def test_members_some_of_which_share_a_parameter_are_refused() -> None:
    base, other = Adapted("nf4").to("cpu"), Adapted("nf4", scale=2.0).to("cpu")
    twin = copy.deepcopy(base, {id(each): each for each in base.parameters() if not each.requires_grad})
    with pytest.raises(FusionError, match=r"some members share the frozen parameter 'first\.weight', and others have"):
        fuse([base, twin, other])


class Wide(nn.Module):
    """A trained layer large enough for states of 8 bits, and one that is not."""

    def __init__(self, b: int) -> None:
        super().__init__()
        torch.manual_seed(b)
        self.large, self.small = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.large(x).tanh())


def test_states_of_8_bits_are_each_members_own() -> None:
    def trained(factors: Sequence[float]) -> tuple[list[nn.Module], list[Any]]:
        members: list[nn.Module] = [Wide(b) for b in range(len(factors))]
        made = [bnb.optim.AdamW8bit(model.parameters(), lr=0.01) for model in members]
        array = fuse(members)
        optimizer = fuse_optimizers(made, array)
        weights = torch.tensor(factors)
        for _ in range(3):
            optimizer.zero_grad()
            (array.map(loss, X) * weights).sum().backward()
            optimizer.step()
        return members, made

    calm, optimizers = trained([1.0, 1.0])
    wild, _ = trained([1.0, 1e6])
    alone, _ = trained([1.0])
    for mine, theirs, own in zip(calm[0].parameters(), wild[0].parameters(), alone[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)
    kinds = {name: optimizers[1].state[each]["state1"].dtype for name, each in calm[1].named_parameters()}
    assert kinds["large.weight"] == torch.uint8
    assert kinds["small.weight"] == torch.float32, "2,048 weights; those of both members are more than 4,096 or as many"
