"""A member's random numbers depend on the member only: they are equal alone and in an array."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, LowRankMultivariateNormal, MultivariateNormal, Normal
from twins import Of, Table, build, close

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.generators import seeded
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.randomness import RandomSource, keep_mask, member_keys
from shoal.fuse.stacked import Stacked
from shoal.fuse.step import TrainingStep
from shoal.fuse.torch_functions import draws_random

SEEDS = [11, 12, 13]
X = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = torch.arange(15).view(3, 5) % 11
CPU = torch.device("cpu")


def _embedded(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), layer)


def _sampled(m: Any, x: Tensor) -> Tensor:
    mean = m.w(x)
    return mean + torch.randn_like(mean) * torch.rand(6) + torch.bernoulli(torch.full((6,), 0.5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 8), nn.Dropout(0.2)), X),
    "dropout of shared input": (lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 2)), X),
    "dropout in place": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(inplace=True)), X),
    "channels": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.Dropout2d()), X),
    "channels of shared input": (lambda: nn.Sequential(nn.Dropout2d(), nn.Conv2d(4, 8, 3)), X),
    "channels 1d": (lambda: nn.Sequential(nn.Conv1d(6, 8, 1), nn.Dropout1d()), X[:, 0]),
    "alpha": (lambda: nn.Sequential(nn.Linear(6, 8), nn.AlphaDropout(), nn.FeatureAlphaDropout()), X),
    "rrelu": (lambda: nn.Sequential(nn.Linear(6, 8), nn.RReLU()), X),
    "samples": (lambda: Of(_sampled, w=nn.Linear(6, 6)), X),
    "gumbel": (lambda: Of(lambda m, x: F.gumbel_softmax(m.w(x)), w=nn.Linear(6, 3)), X),
    "fresh own noise": (lambda: Of(lambda m, x: m.w(x) + torch.empty_like(m.w(x)).uniform_(), w=nn.Linear(6, 2)), X),
    "lstm": (lambda: Of(lambda m, x: m.r(m.e(x))[0], e=nn.Embedding(11, 4), r=nn.LSTM(4, 4, 2, dropout=0.5)), TOKENS),
    "transformer": (lambda: _embedded(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)), TOKENS),
    "attention": (
        lambda: Of(lambda m, x: m.a(*[m.e(x)] * 3)[0], e=nn.Embedding(11, 8), a=nn.MultiheadAttention(8, 2, 0.3)),
        TOKENS,
    ),
    "attention without weights": (
        lambda: Of(
            lambda m, x: m.a(*[m.e(x)] * 3, need_weights=False)[0],
            e=nn.Embedding(11, 8),
            a=nn.MultiheadAttention(8, 2, 0.3),
        ),
        TOKENS,
    ),
}


INPUTS = {name: (x,) for name, (_, x) in MODELS.items()}


def of_all() -> nn.Module:
    return Table({name: make() for name, (make, _) in MODELS.items()}, {})


def run(array: ModelArray, fn: Callable[..., Any]) -> list[dict[str, Tensor]]:
    return [array.map(fn, INPUTS) for _ in range(2)]


def all_results(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    results: dict[str, Tensor] = model(inputs, {})
    return results


def test_numbers_written_to_a_tensor_that_all_share_are_refused() -> None:
    array = fuse(build(lambda: Of(lambda m, x: m.w(x) + torch.empty(6).normal_(), w=nn.Linear(6, 6)), 2))
    with pytest.raises(
        FusionError, match=r"normal_ writes random numbers to a tensor that all members share; .*unfuse"
    ):
        array(X)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: Normal(x, 1.0).rsample(),
        lambda x: Independent(Normal(x, x.exp()), 1).rsample(),
        lambda x: MultivariateNormal(x, torch.eye(6, dtype=x.dtype)).rsample(),
        lambda x: LowRankMultivariateNormal(x, torch.ones(6, 2, dtype=x.dtype), torch.ones(6, dtype=x.dtype)).rsample(),
    ],
    ids=["normal", "independent", "multivariate", "of low rank"],
)
def test_samples_of_gaussian_distributions_are_each_members_own(draw: Callable[[Tensor], Tensor]) -> None:
    model = build(lambda: Of(lambda m, x: draw(m.w(x)), w=nn.Linear(6, 6)), 3)
    rows = fuse(copy.deepcopy(model), SEEDS[:3])(X)
    assert not torch.equal(rows[0] - model[0].w(X), rows[1] - model[1].w(X))
    for b, one in enumerate(model):
        (alone,) = fuse([one], SEEDS[b : b + 1])(X)
        torch.testing.assert_close(rows[b], alone)


def test_a_member_draws_the_same_alone_and_in_company() -> None:
    together = run(fuse(build(of_all, 3), SEEDS[:3]), all_results)
    for b, model in enumerate(build(of_all, 3)):
        for step, own in enumerate(run(fuse([model], [SEEDS[b]]), all_results)):
            for name, result in own.items():
                close(together[step][name][b], result[0], f"{name} of {b}")
    for name in MODELS:
        assert not torch.allclose(together[0][name], together[1][name]), f"steps draw alike: {name}"
        assert not torch.allclose(together[0][name][0], together[0][name][1]), f"members draw alike: {name}"


def test_equal_weights_and_seeds_give_equal_results_and_other_seeds_others() -> None:
    make = MODELS["dropout"][0]
    model = build(make, 1)[0]
    array = fuse([_copy(model) for _ in range(3)], [1, 1, 2])
    first, second, other = array(X)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def _copy(model: nn.Module) -> nn.Module:
    copied = MODELS["dropout"][0]().double()
    copied.load_state_dict(model.state_dict())
    return copied


def test_the_global_generator_is_left_alone() -> None:
    array = fuse(build(MODELS["samples"][0], 2), [1, 2])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = array(X)
    assert torch.equal(state, torch.get_rng_state())
    array.tick = 0
    torch.manual_seed(1)
    assert torch.equal(first, array(X))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_kept(rate: float) -> None:
    keys = RandomSource(torch.tensor(member_keys([1, 2, 3], [0] * 3))).next()
    keep = keep_mask(keys, (500, 800), (rate,), CPU)
    deviation = (rate * (1 - rate) / 400_000) ** 0.5
    assert (keep.double().mean((1, 2)) - (1 - rate)).abs().max() < 5 * deviation
    rows = keep.double().mean(2)  # of 800 each, also spread as independent draws are
    assert rows.std() == pytest.approx((rate * (1 - rate) / 800) ** 0.5, rel=0.15)
    assert keep.double().mean(1).std() == pytest.approx((rate * (1 - rate) / 500) ** 0.5, rel=0.15)


def test_masks_of_members_calls_and_steps_are_independent() -> None:
    masks = []
    for tick in range(3):
        source = RandomSource(torch.tensor(member_keys([1, 2, 3], [tick] * 3)))
        masks += [mask.double() for _ in range(3) for mask in keep_mask(source.next(), (20_000,), (0.5,), CPU)]
    correlation = torch.corrcoef(torch.stack(masks)) - torch.eye(len(masks))
    assert correlation.abs().max() < 5 / 20_000**0.5
    shifted = torch.corrcoef(torch.stack([masks[0][:-1], masks[0][1:]]))[0, 1]
    assert abs(shifted) < 5 / 20_000**0.5


def test_masks_do_not_depend_on_the_number_type() -> None:
    results = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        source = RandomSource(torch.tensor(member_keys([1, 2], [0, 0])))
        results.append(keep_mask(source.next(), (50,), (0.3,), CPU))
        model = fuse([nn.Dropout(0.3), nn.Dropout(0.3)], [1, 2])
        assert model(torch.ones(50, dtype=dtype)).dtype == dtype
        assert torch.equal(model.map(lambda m, x: m(x), torch.ones(50)).gt(0), fuse_once(torch.float32))
    assert torch.equal(results[0], results[1])


def fuse_once(dtype: torch.dtype) -> Tensor:
    array = fuse([nn.Dropout(0.3), nn.Dropout(0.3)], [1, 2])
    array.tick = 1
    return array(torch.ones(50, dtype=dtype)).gt(0)


def test_members_have_rates_of_their_own() -> None:
    rates = [0.0, 0.25, 1.0]
    array = fuse([nn.Sequential(nn.Identity(), nn.Dropout(rate)) for rate in rates], [1, 2, 3])
    x = torch.ones(20_000, dtype=torch.float64)
    whole = array(x)
    assert torch.equal(whole[0], x)
    assert sorted(whole[1].unique().tolist()) == pytest.approx([0.0, 1 / 0.75])
    assert whole[1].gt(0).double().mean().item() == pytest.approx(0.75, abs=0.02)
    assert torch.equal(whole[2], torch.zeros_like(x))
    alone = fuse([nn.Sequential(nn.Identity(), nn.Dropout(0.25))], [2])
    assert torch.equal(alone(x)[0], whole[1])


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 1.0), (1.0, 0.0)])
def test_rates_at_the_ends(rate: float, expected: float) -> None:
    array = fuse([nn.Dropout(rate), nn.Dropout(rate)], [1, 2])
    assert torch.equal(array(torch.ones(7)), torch.full((2, 7), expected))


def test_an_impossible_rate_is_named() -> None:
    array = fuse([nn.Linear(2, 2), nn.Linear(2, 2)], [1, 2])
    with pytest.raises(ValueError, match=r"between 0 and 1, but got 1\.5"):
        array.map(lambda m, x: F.dropout(m(x), 1.5), torch.ones(3, 2))


def test_dropout_is_idle_in_evaluation() -> None:
    array = fuse([nn.Dropout(0.5), nn.Dropout(0.7)], [1, 2]).eval()
    assert torch.equal(array(torch.ones(9)), torch.ones(2, 9))


def test_channels_are_dropped_whole() -> None:
    array = fuse([nn.Dropout2d(0.5), nn.Dropout2d(0.5)], [1, 2])
    whole = array(torch.ones(16, 32, 3, 3)).flatten(3)
    assert torch.equal(whole.amin(3), whole.amax(3))
    assert 0.3 < whole[..., 0].gt(0).double().mean() < 0.7


def test_a_generator_of_the_users_own_is_left_to_the_user() -> None:
    def noise(model: nn.Module, x: Tensor) -> Tensor:
        return model(x) + torch.randn(2, generator=torch.Generator().manual_seed(4))

    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    whole = fuse(models, [1, 2]).map(noise, torch.zeros(2))
    expected = torch.randn(2, generator=torch.Generator().manual_seed(4))
    for b, model in enumerate(models):
        torch.testing.assert_close(whole[b], model.bias + expected)


def test_checkpointing_that_would_run_the_model_without_the_array_is_refused() -> None:
    def reentrant(model: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)

    for members in (1, 2):
        array = fuse([nn.Linear(6, 2) for _ in range(members)])
        with pytest.raises(FusionError, match="pass use_reentrant=False"):
            array.map(reentrant, torch.ones(3, 6, requires_grad=True))


INTERNAL = {
    *("exponential", "cauchy", "geometric", "log_normal", "uniform", "native_dropout", "rrelu_with_noise", "gru"),
    *("lstm", "rnn_relu", "rnn_tanh", "rrelu_with_noise_", "rrelu_with_noise_functional", "miopen_rnn"),
}
"""DrawDetector from by functions above them, or by arguments that a call without them cannot show."""


def test_every_random_function_of_torch_is_known() -> None:
    """Torch itself marks the operators that draw from its default generators."""
    operators = [
        name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")
    ]
    random = set()
    for operator in operators:
        name, _, overload = operator.partition(".")
        tags = getattr(getattr(torch.ops.aten, name), overload or "default").tags
        if torch.Tag.nondeterministic_seeded in tags and not name.startswith("_"):
            random.add(name)
    assert {"rand", "normal_", "multinomial"} < random
    funcs = [getattr(home, name) for name in random - INTERNAL for home in (torch, Tensor) if hasattr(home, name)]
    missing = [
        func for func in funcs if callable(func) and not draws_random(func, (torch.ones(2), 0.5, True, True), {})
    ]
    assert missing == []


@pytest.mark.parametrize("training", [True, False])
def test_recurrent_layers_draw_between_layers_while_training(training: bool) -> None:
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if draws_random(func, args, kwargs or {}):
                seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 4), torch.tensor([5, 4, 2]))
    x = torch.randn(5, 3, 4)
    layers = [nn.LSTM(4, 4, 2, dropout=0.5), nn.GRU(4, 4, 2, dropout=0.5), nn.GRU(4, 4, 2)]
    for layer in layers:
        layer.train(training)
        with Watch():
            layer(x)
            layer(packed)
    assert seen == (["lstm", "lstm", "gru", "gru"] if training else [])


def test_stacked_numbers_outside_of_a_run_draw_from_the_default_generator() -> None:
    torch.manual_seed(0)
    first = F.dropout(Stacked(torch.ones(2, 100))).whole
    torch.manual_seed(0)
    assert torch.equal(first, F.dropout(Stacked(torch.ones(2, 100))).whole)
    assert not torch.equal(first, F.dropout(Stacked(torch.ones(2, 100))).whole)


def test_who_draws_late_in_company_of_one_who_draws_nothing() -> None:
    """The first member draws nothing of torch's, so that the function is tried on the second as if it drew nothing."""
    models = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(rate)) for rate in (0.0, 0.5)]
    array = fuse(models, [1, 2])
    optimizer = fuse_optimizers([torch.optim.SGD(model.parameters(), 0.1) for model in models], array)
    late = False

    def number(model: nn.Module, x: Tensor) -> Tensor:
        drawn = random.random() if late else 0.0
        return model(x).sum() * 0 + drawn

    training = TrainingStep(array, optimizer, number, ("plain",))
    for step in range(4):
        late = step > 1
        with seeded([step] * 2, torch.device("cpu")):
            values = training(torch.ones(3)).tolist()
        random.seed(step)
        expected = random.random() if late else 0.0
        assert values == [pytest.approx(expected, rel=1e-6)] * 2
