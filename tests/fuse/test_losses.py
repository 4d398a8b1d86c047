"""Losses are reduced within each member, with shared or own targets and weights."""

import warnings
from collections.abc import Callable
from functools import partial
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import Of, build, check, check_table, compare

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.stacked import Stacked

REDUCTIONS = ("mean", "sum", "none")


class Targets(nn.Module):
    """All that losses are measured against, for six samples of three classes or numbers."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.rand(6, 3, dtype=torch.float64) / 2
        tensors = {
            "labels": torch.randint(0, 3, (6,)),
            "values": values,
            "others": torch.randn(6, 3, dtype=torch.float64),
            "signs": torch.randint(0, 2, (6, 3)) * 2 - 1,
            "bits": torch.randint(0, 2, (6, 3)),
            "shares": values.softmax(1),
            "weight": torch.rand(3, dtype=torch.float64) + 0.5,
            "row_weight": torch.rand(6, 1, dtype=torch.float64),
            "pixels": torch.randint(0, 3, (3, 3, 2)),
            "map_shares": torch.rand(3, 3, 3, 2, dtype=torch.float64).softmax(1),
            "sets": torch.tensor([[0, -1, 1], [2, 1, -1], [-1, 0, 1], [0, 1, 2], [1, -1, 0], [2, -1, 0]]).roll(
                int(torch.randint(6, ())), 0
            ),
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


Loss = Callable[..., Tensor]
CLASSES: dict[str, Loss] = {
    "cross entropy": lambda x, t, r: F.cross_entropy(x, t.labels, reduction=r),
    "cross entropy, weights": lambda x, t, r: F.cross_entropy(x, t.labels, t.weight, reduction=r),
    "cross entropy, one ignored": lambda x, t, r: F.cross_entropy(x, t.labels, ignore_index=1, reduction=r),
    "cross entropy, weights, one ignored": lambda x, t, r: F.cross_entropy(
        x, t.labels, t.weight, ignore_index=1, reduction=r
    ),
    "cross entropy, all ignored": lambda x, t, r: F.cross_entropy(x, t.labels * 0 - 100, t.weight, reduction=r),
    "cross entropy, smooth": lambda x, t, r: F.cross_entropy(
        x, t.labels, label_smoothing=0.1, ignore_index=2, reduction=r
    ),
    "cross entropy, smooth, weights": lambda x, t, r: F.cross_entropy(
        x, t.labels, t.weight, label_smoothing=0.1, ignore_index=2, reduction=r
    ),
    "cross entropy, all ignored, smooth": lambda x, t, r: F.cross_entropy(
        x, t.labels * 0 + 5, t.weight, ignore_index=5, label_smoothing=0.3, reduction=r
    ),
    "cross entropy, shares": lambda x, t, r: F.cross_entropy(x, t.shares, reduction=r),
    "cross entropy, shares, weights": lambda x, t, r: F.cross_entropy(x, t.shares, t.weight, reduction=r),
    "cross entropy, shares, smooth": lambda x, t, r: F.cross_entropy(
        x, t.shares, t.weight, label_smoothing=0.2, reduction=r
    ),
    "cross entropy, best label": lambda x, t, r: F.cross_entropy(x, x.argmax(1), t.weight, reduction=r),
    "cross entropy, bytes": lambda x, t, r: F.cross_entropy(x, t.labels.byte(), t.weight, reduction=r),
    "cross entropy, one sample": lambda x, t, r: F.cross_entropy(x[0], t.labels[0], t.weight, reduction=r),
    "cross entropy, one sample's shares": lambda x, t, r: F.cross_entropy(x[0], t.shares[0], t.weight, reduction=r),
    "cross entropy, of shared logits": lambda x, t, r: F.cross_entropy(t.others, x.softmax(1), reduction=r),
    "cross entropy, half of it masked": lambda x, t, r: F.cross_entropy(
        x.index_fill(1, torch.tensor([2]), -torch.inf), t.labels % 2, t.weight, reduction=r
    ),
    "nll": lambda x, t, r: F.nll_loss(x.log_softmax(1), t.labels, reduction=r),
    "nll, weights, one ignored": lambda x, t, r: F.nll_loss(
        x.log_softmax(1), t.labels, t.weight, ignore_index=0, reduction=r
    ),
    "nll, one sample": lambda x, t, r: F.nll_loss(x[1], t.labels[1], t.weight, reduction=r),
    "multi margin": lambda x, t, r: F.multi_margin_loss(x, t.labels, p=2, margin=0.7, weight=t.weight, reduction=r),
    "multilabel margin": lambda x, t, r: F.multilabel_margin_loss(x, t.sets, reduction=r),
    "multilabel soft margin": lambda x, t, r: F.multilabel_soft_margin_loss(x, t.bits, t.weight, reduction=r),
}
PAIRS: dict[str, Loss] = {
    "mse": lambda x, t, r: F.mse_loss(x, t.values, reduction=r),
    "mse, target first": lambda x, t, r: F.mse_loss(t.values, x, reduction=r),
    "mse, of a number": lambda x, t, r: F.mse_loss(x[0, 0], t.values[0, 0], reduction=r),
    "mse, integers": lambda x, t, r: F.mse_loss(x, t.bits, reduction=r),
    "mse, single precision": lambda x, t, r: F.mse_loss(x.float(), t.values, reduction=r),
    "mse, weights": lambda x, t, r: F.mse_loss(x, t.others, weight=t.values, reduction=r),
    "mse, own target": lambda x, t, r: F.mse_loss(x, x.detach().flip(0), reduction=r),
    "l1": lambda x, t, r: F.l1_loss(x, t.values, reduction=r),
    "smooth l1": lambda x, t, r: F.smooth_l1_loss(x, t.values, beta=0.5, reduction=r),
    "smooth l1 with a corner": lambda x, t, r: F.smooth_l1_loss(x, t.values, beta=0.0, reduction=r),
    "huber": lambda x, t, r: F.huber_loss(x, t.values, delta=0.3, reduction=r),
    "huber, weights": lambda x, t, r: F.huber_loss(x, t.others, delta=0.3, weight=t.values, reduction=r),
    "bce": lambda x, t, r: F.binary_cross_entropy(x.sigmoid(), t.values, reduction=r),
    "bce, weights": lambda x, t, r: F.binary_cross_entropy(x.sigmoid(), t.values, t.weight, reduction=r),
    "bce, weights of rows": lambda x, t, r: F.binary_cross_entropy(x.sigmoid(), t.values, t.row_weight, reduction=r),
    "bce of logits": lambda x, t, r: F.binary_cross_entropy_with_logits(x, t.values, reduction=r),
    "bce of logits, weights": lambda x, t, r: F.binary_cross_entropy_with_logits(
        x, t.values, t.row_weight, pos_weight=t.weight, reduction=r
    ),
    "kl": lambda x, t, r: F.kl_div(x.log_softmax(1), t.shares, reduction=r),
    "kl of logarithms": lambda x, t, r: F.kl_div(x.log_softmax(1), t.shares.log(), reduction=r, log_target=True),
    "kl by batch": lambda x, t, r: F.kl_div(
        x.log_softmax(1), t.shares, reduction="batchmean" if r == "mean" else r, log_target=r == "sum"
    ),
    "kl of one sample by batch": lambda x, t, r: F.kl_div(x[0], t.shares[0], reduction="batchmean"),
    "soft margin": lambda x, t, r: F.soft_margin_loss(x, t.signs, reduction=r),
    "poisson nll": lambda x, t, r: F.poisson_nll_loss(x, t.values, reduction=r),
    "poisson nll, full": lambda x, t, r: F.poisson_nll_loss(
        x.exp(), t.values * 3, log_input=False, full=True, reduction=r
    ),
    "gaussian nll": lambda x, t, r: F.gaussian_nll_loss(x, t.others, t.values + 1, full=True, reduction=r),
    "gaussian nll, variance of rows": lambda x, t, r: F.gaussian_nll_loss(x, t.others, t.row_weight, reduction=r),
    "gaussian nll, own variance": lambda x, t, r: F.gaussian_nll_loss(t.others, t.values, x.exp(), reduction=r),
    "gaussian nll, one variance": lambda x, t, r: F.gaussian_nll_loss(x, t.others, 0.5, reduction=r),
    "hinge embedding": lambda x, t, r: F.hinge_embedding_loss(x, t.signs, margin=0.4, reduction=r),
}
DISTANCES: dict[str, Loss] = {
    "cosine embedding": lambda x, t, r: F.cosine_embedding_loss(x, t.others, t.signs[:, 0], 0.1, reduction=r),
    "margin ranking": lambda x, t, r: F.margin_ranking_loss(x[:, 0], t.others[:, 0], t.signs[:, 0], 0.2, reduction=r),
    "margin ranking of rows": lambda x, t, r: F.margin_ranking_loss(x, t.others, t.signs, 0.2, reduction=r),
    "triplet": lambda x, t, r: F.triplet_margin_loss(x, t.values, t.others, swap=True, reduction=r),
    "triplet of norm 1": lambda x, t, r: F.triplet_margin_loss(t.values, x, t.others, p=1, reduction=r),
    "triplet, cosine": lambda x, t, r: F.triplet_margin_with_distance_loss(
        x, t.values, t.others, distance_function=lambda a, b: 1 - F.cosine_similarity(a, b), reduction=r
    ),
    "triplet, own distance": lambda x, t, r: F.triplet_margin_with_distance_loss(
        x, t.values, t.others, distance_function=lambda a, b: ((a - b).abs() * t.weight).sum(1), reduction=r
    ),
}
MAPS: dict[str, Loss] = {
    "cross entropy": lambda x, t, r: F.cross_entropy(x, t.pixels, reduction=r),
    "cross entropy, weights": lambda x, t, r: F.cross_entropy(x, t.pixels, t.weight, ignore_index=1, reduction=r),
    "cross entropy, smooth": lambda x, t, r: F.cross_entropy(
        x, t.pixels, t.weight, label_smoothing=0.1, ignore_index=0, reduction=r
    ),
    "cross entropy, shares": lambda x, t, r: F.cross_entropy(
        x, t.map_shares, t.weight, label_smoothing=0.1, reduction=r
    ),
    "cross entropy of a sequence": lambda x, t, r: F.cross_entropy(
        x.flatten(2), t.pixels.flatten(1), t.weight, reduction=r
    ),
    "nll": lambda x, t, r: F.nll_loss(x.log_softmax(1), t.pixels, t.weight, ignore_index=2, reduction=r),
    "nll of a volume": lambda x, t, r: F.nll_loss(x[..., None], t.pixels[..., None], t.weight, reduction=r),
    "mse": lambda x, t, r: F.mse_loss(x, t.map_shares, reduction=r),
    "bce of logits": lambda x, t, r: F.binary_cross_entropy_with_logits(
        x, t.map_shares, pos_weight=t.weight[:, None, None], reduction=r
    ),
}

torch.manual_seed(3)
SHARED = Targets()
X = torch.randn(6, 4, dtype=torch.float64)
IMAGE = torch.randn(3, 4, 3, 2, dtype=torch.float64)


ROWS = {**CLASSES, **PAIRS, **DISTANCES}


def by_all_reductions(loss: Loss, model: nn.Module, x: Tensor) -> list[Tensor]:
    """With shared targets by every reduction, and with the member's own by the mean."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "reduction: 'mean' divides the total loss", UserWarning)
        out = model.net(x)
        return [loss(out, model.targets, "mean"), *(loss(out, SHARED, r) for r in REDUCTIONS)]


def works_in_torch(loss: Loss) -> bool:
    """Whether torch itself computes gradients: before 2.12 not of `mse_loss` with targets of another dtype."""
    model = Of(None, net=nn.Linear(4, 3).double(), targets=Targets())
    try:
        sum(found.sum() for found in by_all_reductions(loss, model, X)).backward()
    except RuntimeError as error:
        if "Found dtype" in str(error):
            return False
        raise
    return True


APART = "triplet, own distance"  # a function of torch's calls one that closes over the members' own


def test_losses_of_rows() -> None:
    def make(name: str) -> nn.Module:
        return Of(lambda m, x: by_all_reductions(ROWS[name], m, x), net=nn.Linear(4, 3), targets=Targets())

    names = [name for name in ROWS if works_in_torch(ROWS[name])]
    check_table({name: (partial(make, name), X) for name in names if name != APART}, members=[3], steps=1)
    check(partial(make, APART), X, members=3, steps=1, refused=True)


def test_losses_of_maps() -> None:
    def make(name: str) -> nn.Module:
        return Of(lambda m, x: by_all_reductions(MAPS[name], m, x), net=nn.Conv2d(4, 3, 1), targets=Targets())

    check_table({name: (partial(make, name), IMAGE) for name in MAPS}, steps=1)


SPEECH: dict[str, Callable[[Tensor, str], Tensor]] = {
    "padded targets": lambda x, r: F.ctc_loss(x, SPOKEN, torch.tensor([6, 4]), torch.tensor([2, 1]), reduction=r),
    "targets in a row": lambda x, r: F.ctc_loss(x, SPOKEN.flatten()[:3], (6, 5), (2, 1), reduction=r),
    "impossible": lambda x, r: F.ctc_loss(x, SPOKEN, (1, 6), (2, 2), reduction=r, zero_infinity=True),
    "nothing said": lambda x, r: F.ctc_loss(x, SPOKEN, (6, 6), (0, 2), blank=0, reduction=r),
    "one sample": lambda x, r: F.ctc_loss(x[:, 0], SPOKEN[0], torch.tensor(6), torch.tensor(2), reduction=r),
    "own targets": lambda x, r: F.ctc_loss(x, x[:2, :, 1:].argmax(-1).T + 1, (6, 6), (2, 2), reduction=r),
}
SPOKEN = torch.tensor([[1, 2], [2, 2]])


def test_ctc_losses() -> None:
    def losses(model: nn.Module, x: Tensor) -> dict[str, list[Tensor]]:
        rows = model(x).unflatten(1, (2, 3)).log_softmax(-1)
        return {name: [loss(rows, r) for r in REDUCTIONS] for name, loss in SPEECH.items()}

    for members in (1, 3):
        check(lambda: nn.Linear(4, 6), X, fn=losses, members=members, steps=1)


LINEAR: dict[str, Callable[[nn.Module, Tensor, str], Tensor]] = {
    "plain": lambda m, x, r: F.linear_cross_entropy(m.a(x), m.b.weight, SHARED.labels, reduction=r),
    "bias, weights, smooth": lambda m, x, r: F.linear_cross_entropy(
        m.a(x), m.b.weight, SHARED.labels, linear_bias=m.b.bias, weight=SHARED.weight, label_smoothing=0.1, reduction=r
    ),
    "shared input": lambda m, x, r: F.linear_cross_entropy(x, m.b.weight, SHARED.labels, ignore_index=1, reduction=r),
    "shared classes": lambda m, x, r: F.linear_cross_entropy(m.a(x), SHARED.others[:3].repeat(1, 2)[:, :4],
                                                             SHARED.labels, reduction=r),
}  # fmt: skip


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch does not have it yet")
def test_linear_cross_entropy() -> None:
    def losses(m: nn.Module, x: Tensor) -> dict[str, list[Tensor]]:
        return {name: [loss(m, x, r) for r in REDUCTIONS] for name, loss in LINEAR.items()}

    for members in (1, 3):
        check(lambda: Of(losses, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), X, members=members, steps=1)


class Smoothed(nn.Module):
    """Members differ in a number of their loss."""

    def __init__(self, loss: Callable[[float, Tensor], Tensor], number: float) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.loss = loss
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.number, self.net(x))


NUMBERS: dict[str, Callable[..., Tensor]] = {
    "smoothing": lambda e, x: F.cross_entropy(x, SHARED.labels, label_smoothing=e, ignore_index=1),
    "smoothing, weights": lambda e, x: F.cross_entropy(x, SHARED.labels, SHARED.weight, label_smoothing=e),
    "smoothing, shares": lambda e, x: F.cross_entropy(x, SHARED.shares, SHARED.weight, label_smoothing=e),
    "smoothing, one sample": lambda e, x: F.cross_entropy(x[0], SHARED.labels[0], label_smoothing=e),
    "smoothing, none reduced": lambda e, x: F.cross_entropy(
        x.unflatten(0, (2, 3)), SHARED.labels.view(2, 3), label_smoothing=e, reduction="none"
    ),
    "corner of smooth l1": lambda e, x: F.smooth_l1_loss(x, SHARED.others, beta=e),
    "corner of huber": lambda e, x: F.huber_loss(x, SHARED.others, delta=e + 0.1),
    "margin": lambda e, x: F.multi_margin_loss(x, SHARED.labels, margin=e),
    "margin of triplets": lambda e, x: F.triplet_margin_loss(x, SHARED.values, SHARED.others, margin=e + 1),
    "variance": lambda e, x: F.gaussian_nll_loss(x, SHARED.others, e + 0.5),
    "factor": lambda e, x: e * F.mse_loss(x, SHARED.values) + (1 - e) * F.l1_loss(x, SHARED.values),
}


def test_members_that_differ_in_a_number() -> None:
    def make(loss: Callable[..., Tensor]) -> nn.Module:
        return Smoothed(loss, torch.initial_seed() / 20)  # `build` gives each member its own; one has no smoothing

    check_table({name: (partial(make, loss), X) for name, loss in NUMBERS.items()}, steps=1)


def test_smoothing_of_none_is_not_spoilt_by_an_impossible_class() -> None:
    """For the other member the loss is infinite, as it is for it alone."""

    def loss(rate: float, x: Tensor) -> Tensor:
        return F.cross_entropy(x.index_fill(1, torch.tensor([2]), -torch.inf), SHARED.labels % 2, label_smoothing=rate)

    array = fuse([Smoothed(loss, rate).double() for rate in (0.0, 0.1)])
    losses = array(X)
    assert losses.isfinite().tolist() == [True, False]
    losses[0].backward()
    assert all(p.grad[0].isfinite().all() for p in array.parameters())


def test_smoothing_beyond_one_is_refused_in_torchs_words() -> None:
    array = fuse([Smoothed(NUMBERS["smoothing"], rate).double() for rate in (0.5, 1.5)])
    with pytest.raises(FusionError, match=r"label_smoothing must be between 0\.0 and 1\.0\. Got: 1\.5"):
        array(X)


MODULES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "L1Loss": (nn.L1Loss, ["values"]),
    "MSELoss": (nn.MSELoss, ["values"]),
    "SmoothL1Loss": (lambda: nn.SmoothL1Loss(beta=0.4), ["values"]),
    "HuberLoss": (lambda: nn.HuberLoss("sum"), ["values"]),
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(torch.rand(3), label_smoothing=0.1), ["labels"]),
    "NLLLoss": (lambda: nn.NLLLoss(torch.rand(3)), ["labels"]),
    "BCEWithLogitsLoss": (lambda: nn.BCEWithLogitsLoss(torch.rand(3), pos_weight=torch.rand(3)), ["values"]),
    "KLDivLoss": (lambda: nn.KLDivLoss(reduction="batchmean"), ["shares"]),
    "PoissonNLLLoss": (nn.PoissonNLLLoss, ["values"]),
    "GaussianNLLLoss": (nn.GaussianNLLLoss, ["others", "values"]),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss, ["signs"]),
    "MarginRankingLoss": (nn.MarginRankingLoss, ["others", "signs"]),
    "MultiMarginLoss": (lambda: nn.MultiMarginLoss(weight=torch.rand(3)), ["labels"]),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss, ["sets"]),
    "MultiLabelSoftMarginLoss": (lambda: nn.MultiLabelSoftMarginLoss(torch.rand(3)), ["bits"]),
    "SoftMarginLoss": (nn.SoftMarginLoss, ["signs"]),
    "TripletMarginLoss": (nn.TripletMarginLoss, ["values", "others"]),
    "TripletMarginWithDistanceLoss": (nn.TripletMarginWithDistanceLoss, ["values", "others"]),
}


def test_loss_modules_within_the_model_and_outside() -> None:
    torch.manual_seed(0)
    outside = {name: kind().double() for name, (kind, _) in MODULES.items()}

    def losses(model: nn.Module, x: Tensor) -> dict[str, list[Tensor]]:
        rows = model.net(x)
        targets = {name: [getattr(SHARED, each) for each in names] for name, (_, names) in MODULES.items()}
        return {
            name: [model.losses[name](rows, *targets[name]), loss(rows, *targets[name])]
            for name, loss in outside.items()
        }

    def make() -> nn.Module:
        return Of(
            None, net=nn.Linear(4, 3), losses=nn.ModuleDict({name: kind() for name, (kind, _) in MODULES.items()})
        )

    check(make, X, fn=losses, members=3)


LEGACY: dict[str, Loss] = {
    "mean": lambda x: F.cross_entropy(x, SHARED.labels, size_average=True),
    "sum": lambda x: F.mse_loss(x, SHARED.values, size_average=False),
    "none": lambda x: F.nll_loss(x, SHARED.labels, reduce=False),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning")
def test_reduction_in_torchs_old_words() -> None:
    check(lambda: nn.Linear(4, 3), X, fn=lambda m, x: {name: fn(m(x)) for name, fn in LEGACY.items()}, members=3)


WRONG: dict[str, Loss] = {
    "reduction": lambda x: F.mse_loss(x, SHARED.values, reduction="average"),
    "batchmean": lambda x: F.l1_loss(x, SHARED.values, reduction="batchmean"),
    "reduction of classes": lambda x: F.cross_entropy(x, SHARED.labels, reduction="average"),
    "label": lambda x: F.cross_entropy(x, SHARED.labels + 1),
    "negative label": lambda x: F.nll_loss(x, SHARED.labels - 1),
    "own label": lambda x: F.cross_entropy(x, x.argmax(1) + 3, label_smoothing=0.1),
    "weights": lambda x: F.cross_entropy(x, SHARED.labels, SHARED.weight[:2]),
    "own weights": lambda x: F.cross_entropy(x, SHARED.labels, x.detach()[0, :1]),
    "ignored shares": lambda x: F.cross_entropy(x, SHARED.shares, x.detach()[0], ignore_index=1),
    "samples": lambda x: F.cross_entropy(x, SHARED.labels[:5], x.detach()[0]),
    "variance": lambda x: F.gaussian_nll_loss(x, SHARED.values, -SHARED.values),
    "bce": lambda x: F.binary_cross_entropy(x, SHARED.values[:, :2]),
    "bce of no probability": lambda x: F.binary_cross_entropy(x + 9, SHARED.values),
    "lengths": lambda x: F.ctc_loss(x.view(6, 1, 3), SPOKEN, (6, 6), (2, 2)),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_error_of_a_wrong_call_is_that_of_one_member(name: str) -> None:
    models = build(lambda: nn.Linear(4, 3), 3)
    with pytest.raises(Exception) as own:  # noqa: PT011
        WRONG[name](models[0](X))
    with pytest.raises(type(own.value)) as caught:
        fuse(models).map(lambda m, x: WRONG[name](m(x)), X)
    assert str(caught.value).split("\n")[0] == str(own.value).split("\n")[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["single logits", "half logits"])
def test_losses_under_autocast(dtype: torch.dtype) -> None:
    """The logits being equal, so are the losses, in the precision that autocast chooses for one member."""
    torch.manual_seed(0)
    logits = torch.randn(3, 6, 3)
    shared = Targets().float()

    def losses(x: Tensor) -> dict[str, list[Tensor]]:
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "reduction: 'mean' divides the total loss", UserWarning)
            x = x.to(dtype)
            return {name: [loss(x, shared, r) for r in REDUCTIONS] for name, loss in ROWS.items()}

    result = fuse([nn.Identity() for _ in logits]).map(lambda m, x: losses(x), Stacked(logits))
    compare(result, [losses(x) for x in logits], 1e-5 if dtype == torch.float32 else 2e-2)


HALF: dict[str, Loss] = {
    "cross entropy": lambda x, t: F.cross_entropy(x, t.labels),
    "cross entropy, one ignored": lambda x, t: F.cross_entropy(x, t.labels, ignore_index=1),
    "cross entropy, weights": lambda x, t: F.cross_entropy(x, t.labels, t.weight),
    "nll": lambda x, t: F.nll_loss(x, t.labels),
    "l1": lambda x, t: F.l1_loss(x, t.values),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HALF)
def test_a_mean_of_half_numbers_whose_sum_none_can_hold(name: str, dtype: torch.dtype) -> None:
    """Half precision tells numbers apart by 2^-11 or 2^-8 of them; so exact is the mean of the losses' exact values."""
    torch.manual_seed(0)
    rows, eps = 2000, torch.finfo(dtype).eps
    logits = (100 * torch.randn(2, rows, 3)).to(dtype)
    targets = Targets()
    targets.labels = torch.randint(0, 3, (rows,))
    targets.values = torch.zeros(rows, 3, dtype=torch.float64)
    targets.weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    exact = torch.stack([HALF[name](x.double(), targets) for x in logits])
    means = fuse([nn.Identity() for _ in logits]).map(lambda m, x: HALF[name](m(x), targets.to(dtype)), Stacked(logits))
    torch.testing.assert_close(means.double(), exact, rtol=2 * eps, atol=0.1 * 2 * eps)


L1: dict[str, Loss] = {
    "own input": lambda m, x, r: F.l1_loss(m(x), X, reduction=r, weight=WEIGHTS),
    "own weight": lambda m, x, r: F.l1_loss(x, X + 1, reduction=r, weight=m(x).square()),
    "no weight": lambda m, x, r: F.l1_loss(m(x), X, reduction=r),
    "nothing of the members' own": lambda m, x, r: m(x) + F.l1_loss(x, X + WEIGHTS, reduction=r, weight=WEIGHTS),
}
WEIGHTS = torch.arange(1.0, X.numel() + 1, dtype=torch.float64).view(X.shape)


@pytest.mark.skipif("weight" not in signature(F.l1_loss).parameters, reason="this torch knows no weights here")
@pytest.mark.parametrize("members", [1, 2])
def test_weights_that_torch_does_not_hand_on(members: int) -> None:
    def losses(m: nn.Module, x: Tensor) -> dict[str, list[Tensor]]:
        return {name: [loss(m.map, x, r) for r in REDUCTIONS] for name, loss in L1.items()}

    check(lambda: Of(losses, map=nn.Linear(4, 4)), X, members=members)
