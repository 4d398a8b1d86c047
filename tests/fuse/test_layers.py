"""Layers with rules: outputs, gradients and statistics equal those of the members run alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from twins import Of, check

torch.manual_seed(7)
X = torch.randn(6, 4, dtype=torch.float64)
SEQUENCE = torch.randn(3, 4, 9, dtype=torch.float64)
IMAGE = torch.randn(3, 4, 7, 8, dtype=torch.float64)
VOLUME = torch.randn(2, 4, 4, 5, 4, dtype=torch.float64)
TOKENS = torch.randint(0, 11, (3, 5))


def chain(*makes: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for make in makes))


Case = tuple[Callable[[], nn.Module], Sequence[Any]]


def conv(kind: type[nn.Module], **options: Any) -> Callable[[], nn.Module]:
    """As the first layer, whose input is shared, and as the second."""
    return lambda: nn.Sequential(kind(4, 8, 3, **options), nn.Tanh(), kind(8, 4, 3, **{**options, "stride": 1}))


CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(4, 3), [X]),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), [X]),
    "linear of one sample": (lambda: nn.Linear(4, 3), [X[0]]),
    "linear 3d": (chain(lambda: nn.Linear(4, 3), lambda: nn.Linear(3, 2)), [torch.stack([X, -X])]),
    "linear 5d": (chain(lambda: nn.Linear(4, 3), lambda: nn.Linear(3, 2)), [X.view(1, 3, 1, 2, 4)]),
    "perceptron": (chain(lambda: nn.Linear(4, 8), nn.ReLU, lambda: nn.Linear(8, 3)), [X]),
    "conv1d": (conv(nn.Conv1d), [SEQUENCE]),
    "conv1d of one sample": (lambda: nn.Conv1d(4, 8, 3), [SEQUENCE[0]]),
    "conv2d": (conv(nn.Conv2d), [IMAGE]),
    "conv2d of one sample": (conv(nn.Conv2d), [IMAGE[0]]),
    "conv2d stride": (conv(nn.Conv2d, stride=(2, 1), padding=1), [IMAGE]),
    "conv2d same": (conv(nn.Conv2d, padding="same"), [IMAGE]),
    "conv2d tuple": (conv(nn.Conv2d, padding=(2, 1)), [IMAGE]),
    "conv2d dilation": (conv(nn.Conv2d, dilation=2, padding=2), [IMAGE]),
    "conv2d groups": (conv(nn.Conv2d, groups=2), [IMAGE]),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), [IMAGE]),
    "conv2d without bias": (conv(nn.Conv2d, bias=False), [IMAGE]),
    "conv2d circular": (conv(nn.Conv2d, padding=1, padding_mode="circular"), [IMAGE]),
    "conv2d reflect": (conv(nn.Conv2d, padding=1, padding_mode="reflect"), [IMAGE]),
    "conv2d replicate": (conv(nn.Conv2d, padding=1, padding_mode="replicate"), [IMAGE]),
    "conv3d": (conv(nn.Conv3d, padding=1), [VOLUME]),
    "conv transposed": (chain(lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), lambda: nn.Conv2d(3, 2, 3)), [IMAGE]),
    "batch norm": (chain(lambda: nn.Linear(4, 3), lambda: nn.BatchNorm1d(3)), [X]),
    "batch norm of shared input": (lambda: nn.BatchNorm1d(4), [X]),
    "batch norm 1d": (chain(lambda: nn.Conv1d(4, 3, 3), lambda: nn.BatchNorm1d(3)), [SEQUENCE]),
    "batch norm 2d": (chain(lambda: nn.Conv2d(4, 3, 3), lambda: nn.BatchNorm2d(3)), [IMAGE]),
    "batch norm 3d": (chain(lambda: nn.Conv3d(4, 3, 3), lambda: nn.BatchNorm3d(3)), [VOLUME]),
    "batch norm cumulative": (chain(lambda: nn.Linear(4, 3), lambda: nn.BatchNorm1d(3, momentum=None)), [X]),
    "batch norm plain": (
        chain(lambda: nn.Linear(4, 3), lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False)),
        [X],
    ),
    "batch norm without affine": (chain(lambda: nn.Linear(4, 3), lambda: nn.BatchNorm1d(3, affine=False)), [X]),
    "layer norm": (chain(lambda: nn.Linear(4, 3), lambda: nn.LayerNorm(3)), [X]),
    "layer norm of shared input": (lambda: nn.LayerNorm(4), [X]),
    "layer norm over axes": (chain(lambda: nn.Conv2d(4, 3, 3), lambda: nn.LayerNorm((3, 5, 6))), [IMAGE]),
    "layer norm without bias": (chain(lambda: nn.Linear(4, 3), lambda: nn.LayerNorm(3, bias=False)), [X]),
    "layer norm plain": (chain(lambda: nn.Linear(4, 3), lambda: nn.LayerNorm(3, elementwise_affine=False)), [X]),
    "embedding": (lambda: nn.Embedding(11, 4), [TOKENS]),
    "embedding padding": (lambda: nn.Embedding(11, 4, padding_idx=3), [TOKENS]),
    "embedding padding from the end": (lambda: nn.Embedding(11, 4, padding_idx=-1), [TOKENS]),
    "embedding max norm": (lambda: nn.Embedding(11, 4, max_norm=0.5), [TOKENS]),
    "embedding scaled by frequency": (lambda: nn.Embedding(11, 4, scale_grad_by_freq=True), [TOKENS]),
    "embedding of own tokens": (
        lambda: Of(lambda m, x: m.b(m.a(x).argmax(-1)), a=nn.Embedding(11, 5), b=nn.Embedding(5, 4)),
        [TOKENS],
    ),
    "embedding bag": (lambda: nn.EmbeddingBag(11, 4), [TOKENS]),
    "instance norm": (
        chain(lambda: nn.Conv2d(4, 3, 3), lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
        [IMAGE],
    ),
    "group norm": (chain(lambda: nn.Conv2d(4, 6, 3), lambda: nn.GroupNorm(3, 6)), [IMAGE]),
    "bilinear": (lambda: Of(lambda m, x: m.a(x, m.b(x)), a=nn.Bilinear(4, 3, 2), b=nn.Linear(4, 3)), [X]),
    "prelu": (chain(lambda: nn.Conv2d(4, 3, 3), lambda: nn.PReLU(3)), [IMAGE]),
    "rms norm": (chain(lambda: nn.Linear(4, 3), lambda: nn.RMSNorm(3)), [X]),
    "upsample": (chain(lambda: nn.Conv2d(4, 3, 3), lambda: nn.Upsample(scale_factor=2, mode="bilinear")), [IMAGE]),
    "pixel shuffle": (chain(lambda: nn.Conv2d(4, 8, 3), lambda: nn.PixelShuffle(2)), [IMAGE]),
    "unfold": (chain(lambda: nn.Conv2d(4, 2, 3), lambda: nn.Unfold(2)), [IMAGE]),
}


@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
def test_layer_equals_its_members(name: str, members: int) -> None:
    make, batch = CASES[name]
    check(make, *batch, members=members)


@pytest.mark.parametrize("name", ["batch norm", "batch norm 2d", "batch norm cumulative", "batch norm plain"])
def test_evaluation_uses_the_running_statistics(name: str) -> None:
    make, batch = CASES[name]
    check(lambda: make().eval(), *batch, members=3)


def test_batch_norm_in_training_and_evaluation_by_turns() -> None:
    def turns(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.train()
        first = model(x)
        model.eval()
        return first + model(x)

    check(CASES["batch norm"][0], X, fn=turns, members=3)


ACTIVATIONS = [
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Softplus, nn.Softsign, nn.Tanhshrink),
    *(nn.LogSigmoid, nn.GLU, nn.PReLU, nn.Identity),
]


@pytest.mark.parametrize("kind", ACTIVATIONS, ids=lambda kind: kind.__name__)
def test_activation(kind: type[nn.Module]) -> None:
    check(lambda: nn.Sequential(nn.Linear(4, 6), kind(), nn.Linear(3 if kind is nn.GLU else 6, 2)), X, members=3)


OPTIONS: dict[str, Callable[[], nn.Module]] = {
    "threshold": lambda: nn.Threshold(0.1, -2.0),
    "softmax": lambda: nn.Softmax(-1),
    "log softmax": lambda: nn.LogSoftmax(1),
    "softmin": lambda: nn.Softmin(-1),
    "gelu by tanh": lambda: nn.GELU("tanh"),
    "rrelu": lambda: nn.RReLU().eval(),
    "relu in place": lambda: nn.ReLU(inplace=True),
    "leaky relu in place": lambda: nn.LeakyReLU(0.3, inplace=True),
    "elu in place": lambda: nn.ELU(0.7, inplace=True),
    "silu in place": lambda: nn.SiLU(inplace=True),
    "flatten": nn.Flatten,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_activation_with_options(name: str) -> None:
    check(lambda: nn.Sequential(nn.Linear(4, 6), OPTIONS[name](), nn.Linear(6, 2)), X, members=3)


POOLS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "max 1d": (lambda: nn.MaxPool1d(2), SEQUENCE),
    "average 1d": (lambda: nn.AvgPool1d(3, 2, 1), SEQUENCE),
    "max 2d": (lambda: nn.MaxPool2d(2, stride=1, padding=1, ceil_mode=True), IMAGE),
    "max 2d with indices": (lambda: nn.MaxPool2d(2, return_indices=True), IMAGE),
    "max 1d with indices": (lambda: nn.MaxPool1d(2, return_indices=True), SEQUENCE),
    "average 2d": (lambda: nn.AvgPool2d(2, count_include_pad=False, padding=1), IMAGE),
    "lp 2d": (lambda: nn.LPPool2d(2, 2), IMAGE),
    "adaptive average 1d": (lambda: nn.AdaptiveAvgPool1d(3), SEQUENCE),
    "adaptive average 2d": (lambda: nn.AdaptiveAvgPool2d((None, 2)), IMAGE),
    "adaptive max 1d": (lambda: nn.AdaptiveMaxPool1d(3), SEQUENCE),
    "adaptive max 2d": (lambda: nn.AdaptiveMaxPool2d(2), IMAGE),
    "adaptive max 2d with indices": (lambda: nn.AdaptiveMaxPool2d(2, return_indices=True), IMAGE),
    "max 3d": (lambda: nn.MaxPool3d(2), VOLUME),
    "zeros": (lambda: nn.ZeroPad2d(1), IMAGE),
    "reflection": (lambda: nn.ReflectionPad1d(2), SEQUENCE),
}


@pytest.mark.parametrize("name", POOLS)
def test_pool_and_pad(name: str) -> None:
    pool, x = POOLS[name]
    first = nn.Conv1d if x is SEQUENCE else nn.Conv2d if x is IMAGE else nn.Conv3d
    check(lambda: nn.Sequential(first(4, 3, 1), pool()), x, members=3)


def test_pool_of_one_sample() -> None:
    check(lambda: nn.Sequential(nn.Conv2d(4, 3, 1), nn.MaxPool2d(2)), IMAGE[0], members=3)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True),
    "lstm with projection": lambda: nn.LSTM(4, 3, proj_size=2),
    "gru": lambda: nn.GRU(4, 3),
    "rnn": lambda: nn.RNN(4, 3, nonlinearity="relu"),
}


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layer(name: str, members: int) -> None:
    check(RECURRENT[name], SEQUENCE.transpose(1, 2), members=members)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda kind: kind.__name__)
def test_recurrent_cell(kind: type[nn.Module]) -> None:
    def unroll(model: nn.Module, x: torch.Tensor) -> Any:
        state = None
        for step in x.unbind(1):
            state = model(step, state)
        return state

    check(lambda: kind(4, 3), SEQUENCE.transpose(1, 2), fn=unroll, members=3)


def test_packed_sequence() -> None:
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(model.embed(x), torch.tensor([5, 3, 2]), batch_first=True)
        _, hidden = model.rnn(packed)
        return hidden

    check(lambda: Of(run, embed=nn.Embedding(11, 4), rnn=nn.GRU(4, 3, batch_first=True)), TOKENS, members=3)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_transformer_layer(members: int, norm_first: bool, mode: str) -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(11, 8), encoder).train(mode == "train")

    check(make, TOKENS, members=members)


ATTENTION: dict[str, Callable[..., Any]] = {
    "self": lambda m, x: m.attention(x, x, x),
    "without weights": lambda m, x: m.attention(x, x, x, need_weights=False)[0],
    "padding": lambda m, x: m.attention(x, x, x, key_padding_mask=torch.arange(5).ge(3).expand(3, 5)),
    "causal": lambda m, x: m.attention(
        x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype), is_causal=True
    )[0],
    "one sample": lambda m, x: m.attention(x[0], x[1], x[1]),
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_multi_head_attention(name: str, mode: str) -> None:
    def make() -> nn.Module:
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        model = Of(lambda m, x: ATTENTION[name](m, m.embed(x)), embed=nn.Embedding(11, 8), attention=attention)
        return model.train(mode == "train")

    check(make, TOKENS, members=3)
