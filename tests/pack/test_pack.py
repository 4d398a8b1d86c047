"""Members of a pack equal the same models trained alone on the same rows; refused arguments; members that leave."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import FusionError, PackError
from shoal.pack import Loaded, Pack, free, load

SAMPLES = 330
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, 1, 6, 6, dtype=torch.float64, generator=GENERATOR)
Y = torch.randint(0, 4, (SAMPLES,), generator=GENERATOR)


def mlp(rate: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Dropout(rate), nn.Linear(12, 4))


def convolutional(rate: float = 0.0) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(rate), nn.Flatten(), nn.Linear(48, 4))
    )


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make().double()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)
RMSPROP = partial(torch.optim.RMSprop, lr=0.003, eps=1e-3)

MIX = [(mlp, SGD, 20), (convolutional, ADAM, 50), (mlp, ADAGRAD, 80), (convolutional, RMSPROP, 100)]
"""Models, optimizers and batch sizes of the paper's example, and one more."""


def of(kind: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters())


def epoch(size: int) -> Iterator[list[Tensor]]:
    """Return the batches of the loader."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3))
    return iter(DataLoader(TensorDataset(X[order], Y[order]), batch_size=size))


def alone(model: nn.Module, kind: Any, size: int, epochs: int = 2) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Train in a plain loop."""
    optimizer = kind(model.parameters())
    losses = []
    for _ in range(epochs):
        for batch in epoch(size):
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            losses.append(value.detach())
    return losses, optimizer


def train(together: Pack, size: int, epochs: int = 2) -> dict[Loaded, Tensor]:
    parts: dict[Loaded, list[Tensor]] = {member: [] for member in together.members}
    for _ in range(epochs):
        for part in (*map(together.step, epoch(size)), together.end_epoch()):
            for member, values in part.items():
                parts[member].append(values)
    return {member: torch.cat(values) for member, values in parts.items()}


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def loaded(kind: Any = SGD, make: Callable[[], nn.Module] = mlp, size: int = 50, seed: int = 0) -> Loaded:
    return load(seeded(make, seed), "cpu", optimizer=of(kind), loss=loss, batch_size=size)


@pytest.mark.parametrize("size", [64, 1000])
def test_each_member_equals_its_lone_twin(size: int) -> None:
    twins = [seeded(make, seed) for seed, (make, _, _) in enumerate(MIX)]
    expected = [alone(twin, kind, own) for twin, (_, kind, own) in zip(twins, MIX, strict=True)]
    members = [loaded(kind, make, own, seed) for seed, (make, kind, own) in enumerate(MIX)]
    together = Pack(members)
    losses = train(together, size)
    for member, twin, (values, optimizer) in zip(members, twins, expected, strict=True):
        same(losses[member], torch.stack(values).unsqueeze(1))
        (checkpoint,) = together.free(member)
        same(checkpoint["model"], dict(twin.state_dict()))
        same(_numbers(checkpoint["optimizer"]), _numbers(optimizer.state_dict()))
    assert together.members == ()


def _numbers(state: dict[str, Any]) -> Any:
    return {i: {k: torch.as_tensor(v).double() for k, v in of.items()} for i, of in state["state"].items()}


def test_arrays_and_plain_models_side_by_side() -> None:
    kinds = [SGD, partial(SGD, lr=0.01), partial(SGD, momentum=0.5)]
    twins = [seeded(mlp, seed) for seed in range(3)]
    expected = [alone(twin, kind, 80)[0] for twin, kind in zip(twins, kinds, strict=True)]
    array = shoal.fuse([seeded(mlp, seed) for seed in range(3)])
    member = load(array, "cpu", optimizer=[of(kind) for kind in kinds], loss=loss, batch_size=80)
    together = Pack([member, loaded(ADAM, convolutional, 20)])
    losses = train(together, 100)[member]
    same(losses, torch.stack([torch.stack(values) for values in expected], dim=1))
    checkpoints = together.free(member)
    same([one["model"] for one in checkpoints], [dict(twin.state_dict()) for twin in twins])


def test_random_numbers_belong_to_the_member() -> None:
    def member() -> Loaded:
        array = shoal.fuse([seeded(partial(mlp, 0.4), 0)], seeds=[7])
        return load(array, "cpu", optimizer=of(SGD), loss=loss, batch_size=20)

    lone, packed = member(), member()
    expected = train(Pack([lone]), 100)[lone]
    others = [loaded(ADAM, partial(convolutional, 0.3), 50), loaded(SGD, partial(mlp, 0.2), 80)]
    same(train(Pack([packed, *others]), 100)[packed], expected)


def test_steps_come_when_there_are_rows_for_them() -> None:
    sizes = {size: loaded(size=size) for size in (20, 50, 80, 100)}
    together = Pack(sizes.values())
    batches = list(epoch(100))
    steps = [{size: len(losses[member]) for size, member in sizes.items()} for losses in map(together.step, batches)]
    assert steps[0] == {20: 5, 50: 2, 80: 1, 100: 1}
    assert steps[1] == {20: 5, 50: 2, 80: 1, 100: 1}
    assert steps[2] == {20: 5, 50: 2, 80: 1, 100: 1}
    last = together.end_epoch()
    assert {size: len(last[member]) for size, member in sizes.items()} == {20: 1, 50: 1, 80: 1, 100: 1}
    assert together.end_epoch()[sizes[20]].shape == (0, 1)


def test_every_row_is_seen_once_and_in_order() -> None:
    seen: dict[int, list[int]] = {30: [], 70: []}

    class Counting(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.size = size

        def forward(self, rows: Tensor) -> Tensor:
            seen[self.size] += rows.tolist()
            rows.zero_()  # its own to change
            return self.weight.square()

    members = [
        load(Counting(size), "cpu", optimizer=of(SGD), loss=lambda model, rows: model(rows), batch_size=size)
        for size in seen
    ]
    together = Pack(members)
    rows = torch.arange(200)
    buffer = torch.empty(40, dtype=torch.long)
    for part in rows.split(40):
        together.step(buffer.copy_(part))  # what came before is overwritten
    together.end_epoch()
    assert torch.equal(rows, torch.arange(200))
    assert seen == {30: list(range(200)), 70: list(range(200))}


class Pair(nn.Module):
    """Takes a dict as its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        first, second = batch["both"]
        return (self.out(first) - second).square().mean()


def test_a_batch_may_be_nested() -> None:
    model = nn.Sequential(Pair()).double()
    member = load(model, "cpu", optimizer=of(SGD), loss=lambda m, batch: m(batch), batch_size=4)
    batch = {"both": (torch.ones(6, 3).double(), torch.ones(6, 1).double())}
    together = Pack([member])
    assert len(together.step(batch)[member]) == 1
    assert len(together.step(batch)[member]) == 2
    assert len(together.end_epoch()[member]) == 0


def test_another_takes_the_place_of_one_that_is_freed_in_the_middle_of_an_epoch() -> None:
    stays, goes = loaded(size=80), loaded(ADAM, convolutional, 50)
    together = Pack([stays, goes])
    batches = list(epoch(100))
    losses = [together.step(batches[0])[stays]]
    (checkpoint,) = together.free(goes)
    comes = together.load(seeded(convolutional, 5), optimizer=of(SGD), loss=loss, batch_size=60)
    assert together.members == (stays, comes)
    twin = seeded(convolutional, 5)
    expected, optimizer = [], SGD(twin.parameters())
    rest = [torch.cat(column) for column in zip(*batches[1:], strict=True)]
    for x, y in zip(*(column.split(60) for column in rest), strict=True):
        optimizer.zero_grad()
        value = loss(twin, (x, y))
        value.backward()
        optimizer.step()
        expected.append(value.detach())
    news = []
    for part in (*map(together.step, batches[1:]), together.end_epoch()):
        losses.append(part[stays])
        news.append(part[comes])
    same(torch.cat(news), torch.stack(expected).unsqueeze(1))
    same(torch.cat(losses), torch.stack(alone(seeded(mlp, 0), SGD, 80, 1)[0]).unsqueeze(1))
    restored = convolutional().double()
    restored.load_state_dict(checkpoint["model"])
    optimizer = ADAM(restored.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert int(optimizer.state_dict()["state"][0]["step"]) == 2


def test_what_is_freed_is_gone_and_its_checkpoint_is_by_itself() -> None:
    array = shoal.fuse([seeded(mlp, seed) for seed in range(4)])
    member = load(array, "cpu", optimizer=of(ADAM), loss=loss, batch_size=50)
    together = Pack([member, loaded(size=20)])
    together.step([X[:100], Y[:100]])
    gone = [weakref.ref(tensor) for tensor in array.parameters()]
    checkpoints = together.free(member)
    del array
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
    tensors = [tensor for one in checkpoints for tensor in one["model"].values()]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    assert len(checkpoints) == 4


def test_a_model_that_was_freed_trains_on_in_plain_pytorch() -> None:
    model = seeded(mlp, 0)
    member = load(model, "cpu", optimizer=of(ADAM), loss=loss, batch_size=50)
    (optimizer,) = member.optimizers
    together = Pack([member])
    together.step([X[:100], Y[:100]])
    together.free(member)
    assert all(parameter.grad is None for parameter in model.parameters()), "which would stay in the device's memory"
    optimizer.zero_grad()
    loss(model, (X[100:150], Y[100:150])).backward()
    optimizer.step()
    twin = seeded(mlp, 0)
    expected = ADAM(twin.parameters())
    for rows in (slice(50), slice(50, 100), slice(100, 150)):
        expected.zero_grad()
        loss(twin, (X[rows], Y[rows])).backward()
        expected.step()
    same(dict(model.state_dict()), dict(twin.state_dict()))


def test_schedulers_work_on_the_members_optimizers() -> None:
    member = loaded(SGD, size=50)
    scheduler = torch.optim.lr_scheduler.StepLR(member.optimizers[0], 1, gamma=0.1)
    together = Pack([member, loaded(size=20)])
    together.step([X[:50], Y[:50]])
    scheduler.step()
    twin = seeded(mlp, 0)
    optimizer = SGD(twin.parameters())
    for group, rows in zip((0.1, 0.01), (slice(50), slice(50, 100)), strict=True):
        optimizer.param_groups[0]["lr"] = group
        optimizer.zero_grad()
        loss(twin, (X[rows], Y[rows])).backward()
        optimizer.step()
    together.step([X[50:100], Y[50:100]])
    same(dict(member.models[0].state_dict()), dict(twin.state_dict()))


class BrokenError(Exception):
    pass


def breaking(model: nn.Module, batch: Any, calls: list[int], at: int) -> Tensor:
    calls.append(1)
    if len(calls) == at:
        raise BrokenError("nothing works")
    return loss(model, batch)


def test_who_raises_leaves_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    bad = load(
        seeded(convolutional, 1), "cpu", optimizer=of(SGD), loss=partial(breaking, calls=[], at=4), batch_size=20
    )
    good = loaded(size=80)
    together = Pack([bad, good])
    losses = [part for batch in epoch(100) if (part := together.step(batch))]
    assert bad not in losses[-1]
    assert together.members == (good,)
    assert isinstance(together.failed[bad].__cause__, BrokenError)
    assert "Sequential of batch size 20 failed at its step 4 in the pack: BrokenError: nothing works" in str(
        together.failed[bad]
    )
    assert "leaves the pack" in caplog.text
    values = torch.cat([*(part[good] for part in losses), together.end_epoch()[good]])
    same(values, torch.stack(alone(seeded(mlp, 0), SGD, 80, 1)[0]).unsqueeze(1))
    assert set(together.free(bad)[0]) == {"model", "optimizer"}
    assert together.failed == {}


def leaving(model: nn.Module, batch: Any) -> Tensor:
    raise SystemExit(3)


def test_who_leaves_the_process_is_let_go() -> None:
    together = Pack([load(seeded(mlp, 1), "cpu", optimizer=of(SGD), loss=leaving, batch_size=20), loaded()])
    with pytest.raises(SystemExit, match="3"):
        together.step([X[:50], Y[:50]])


def test_a_member_for_other_inputs_is_named() -> None:
    wrong = load(nn.Linear(5, 4).double(), "cpu", optimizer=of(SGD), loss=loss, batch_size=10)
    good = loaded()
    together = Pack([wrong, good])
    together.step([X[:50], Y[:50]])
    assert together.members == (good,)
    said = str(together.failed[wrong])
    assert "Linear of batch size 10 failed at its first step" in said
    assert "train it in another pack" in said


def test_when_all_have_failed_there_is_an_end() -> None:
    together = Pack([load(nn.Linear(5, 4).double(), "cpu", optimizer=of(SGD), loss=loss, batch_size=10)])
    with pytest.raises(PackError, match=r"all members of the pack have failed, the last with: Linear of batch size 10"):
        together.step([X[:50], Y[:50]])
    with pytest.raises(PackError, match="all members"):
        together.step([X[:50], Y[:50]])


def test_a_loss_that_is_not_a_number_stays_its_members_own() -> None:
    wild, calm = loaded(partial(SGD, lr=1e308)), loaded()
    losses = train(Pack([wild, calm]), 100)
    assert not losses[wild].isfinite().all()
    same(losses[calm], torch.stack(alone(seeded(mlp, 0), SGD, 50)[0]).unsqueeze(1))


BATCHES: list[Any] = [
    ([X[:10], Y[:9]], r"must all have its rows as their first axis, got shapes \[\(10, 1, 6, 6\), \(9,\)\]"),
    ([X[:10], torch.tensor(1)], r"got one of shape \(\)"),
    ([X[:10], "label"], "got str in it"),
    ([], r"got shapes \[\]"),
    (
        [X[:10].float(), Y[:10]],
        r"\['float32 \(1, 6, 6\)', 'int64 \(\)'\] cannot follow one of \['float64 \(1, 6, 6\)', 'int64",
    ),
    ([X[:10, :, :3], Y[:10]], r"cannot follow one of .* call `end_epoch` in between"),
    (
        (X[:10], Y[:10]),
        r"a batch of \('float64 .*'\) cannot follow one of \['float64 .*'\], .*; nest all batches in the same way",
    ),
    ((X[:10], {"y": Y[:10]}), r"\{'y': 'int64 \(\)'\}\) cannot follow"),
]


@pytest.mark.parametrize(("batch", "message"), BATCHES, ids=[message[:30] for _, message in BATCHES])
def test_a_batch_that_cannot_be_taken_changes_nothing(batch: Any, message: str) -> None:
    member = loaded(size=80)
    together = Pack([member])
    together.step([X[:50], Y[:50]])
    with pytest.raises(PackError, match=message):
        together.step(batch)
    twin = seeded(mlp, 0)
    same(together.step([X[50:80], Y[50:80]])[member].squeeze(), loss(twin, (X[:80], Y[:80])).detach())


def test_an_empty_batch_is_not_a_step() -> None:
    member = loaded()
    assert Pack([member]).step([X[:0], Y[:0]])[member].shape == (0, 1)


def test_what_was_freed_is_refused() -> None:
    member, other = loaded(), loaded()
    together = Pack([member])
    together.free(member)
    with pytest.raises(PackError, match="is not in this pack"):
        together.free(member)
    with pytest.raises(PackError, match="was freed"):
        free(member)
    with pytest.raises(PackError, match="was freed"):
        Pack([other, member])
    with pytest.raises(PackError, match="no members any more; bring in a model with its `load`"):
        together.step([X, Y])
    with pytest.raises(PackError, match="no members any more"):
        together.end_epoch()
    with pytest.raises(PackError, match="is not in this pack"):
        together.free(other)
    free(other)
    with pytest.raises(PackError, match="was freed"):
        _ = other.optimizers


def test_a_member_that_was_freed_by_itself_has_left() -> None:
    first, second = loaded(), loaded()
    together = Pack([first, second])
    together.step([X[:7], Y[:7]])
    free(first)
    assert together.members == (second,)
    assert together.step([X[:10], Y[:10]]).keys() == {second}
    with pytest.raises(PackError, match="is not in this pack"):
        together.free(first)
    third = together.load(seeded(mlp, 3), optimizer=of(SGD), loss=loss, batch_size=5)
    assert together.end_epoch().keys() == {second, third}
    assert not together.failed


def test_memory_that_members_share_is_refused() -> None:
    first, second = seeded(mlp, 0), seeded(mlp, 1)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        one.data = other.data
    with pytest.raises(PackError, match=r"both hold the memory of '1\.weight'"):
        Pack([load(one, "cpu", optimizer=of(SGD), loss=loss, batch_size=5) for one in (first, second)])


def test_models_that_members_share_are_refused() -> None:
    model = seeded(mlp, 0)
    first = load(model, "cpu", optimizer=of(SGD), loss=loss, batch_size=5)
    together = Pack([first])
    for again in (load, lambda model, _, **given: together.load(model, **given)):
        with pytest.raises(PackError, match=r"is loaded already, as .*; free that, or load a .* \(copy.deepcopy\)"):
            again(model, "cpu", optimizer=of(SGD), loss=loss, batch_size=10)
    assert together.step([X, Y])[first].shape == (len(X) // 5, 1), "what is refused changes nothing"
    with pytest.raises(PackError, match="both hold the same model"):
        Pack([first, first])
    part = nn.Linear(36, 4)
    pair = [nn.Sequential(nn.Flatten(), part), nn.Sequential(nn.Flatten(), nn.Identity(), part)]
    with pytest.raises(PackError, match=r"both hold the tensor '2.weight'"):
        Pack([load(one, "cpu", optimizer=of(SGD), loss=loss, batch_size=5) for one in pair])


def test_members_on_different_devices_are_refused() -> None:
    first, second = loaded(), loaded()
    second.array.to("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loaded, "device", property(lambda self: torch.device("cpu" if self is first else "cuda:1")))
        with pytest.raises(PackError, match="is on cuda:1, others of the pack are on cpu; load all on one device"):
            Pack([first, second])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be a positive integer, got 0"),
        ({"batch_size": -3}, "got -3"),
        ({"batch_size": 2.0}, r"got 2\.0"),
        ({"batch_size": True}, "got True"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, r"lambda model: .*, got SGD"),
        ({"optimizer": [of(SGD), of(SGD)]}, "2 functions for 1 models"),
        ({"optimizer": []}, "0 functions for 1 models"),
        ({"model": mlp}, "`model` must be a torch.nn.Module or what `shoal.fuse` made, got <function"),
        ({"model": nn.ReLU()}, "ReLU has no parameters"),
        ({"model": mlp().requires_grad_(False)}, "no parameters that require gradients"),
        ({"loss": "mse"}, "`loss` must be a function of a model and a batch that returns a scalar, got 'mse'"),
        ({"device": "nope"}, "`device` must be one that torch can use here, got 'nope'"),
        ({"device": "cuda:7"}, "`device` must be one that torch can use here, got 'cuda:7'"),
        ({"optimizer": lambda model: None}, "`optimizer` must return a torch.optim.Optimizer, got None"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:24],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    given = {"model": mlp(), "device": "cpu", "optimizer": of(SGD), "loss": loss, "batch_size": 5, **arguments}
    with pytest.raises(PackError, match=message):
        load(given.pop("model"), given.pop("device"), **given)


def test_what_is_not_a_member_is_named() -> None:
    with pytest.raises(PackError, match="must be what `load` returned, got Sequential among them"):
        Pack([mlp()])
    with pytest.raises(PackError, match="at least one member"):
        Pack([])
    with pytest.raises(PackError, match="takes what `load` returned, got Sequential"):
        free(mlp())
    for nothing in (None, loaded()):
        with pytest.raises(PackError, match="must be a list of what `load` returned"):
            Pack(nothing)  # type: ignore[arg-type]
    with pytest.raises(FusionError):
        load(mlp(), "cpu", optimizer=lambda model: SGD(mlp().parameters()), loss=loss, batch_size=5)


def test_the_room_is_reached_by_its_name() -> None:
    assert shoal.pack.Pack is Pack
    assert copy.copy(shoal.pack.__all__) == ["Loaded", "Pack", "free", "load"]
