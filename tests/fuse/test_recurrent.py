"""Recurrent layers and cells: outputs and gradients equal those of each member alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from looped_functions import in_loops
from shared_or_stacked import check_mixes
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from twins import Of, build, check, check_table, close, skip_if_torch_cannot_run

from shoal.fuse import autotune
from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.rules.recurrent import RULES
from shoal.fuse.step import TrainingStep

torch.manual_seed(7)
SEQUENCE = torch.randn(3, 3, 4, dtype=torch.float64)
TOKENS = torch.randint(0, 11, (3, 5))

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 3),
    "lstm, two layers in both directions, batch first": lambda: nn.LSTM(
        4, 3, num_layers=2, bidirectional=True, batch_first=True
    ),
    "lstm without bias": lambda: nn.LSTM(4, 3, num_layers=2, bias=False),
    "lstm with projection": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, proj_size=2),
    "lstm with projection, without bias": lambda: nn.LSTM(4, 3, proj_size=2, bias=False),
    "gru": lambda: nn.GRU(4, 3),
    "gru, three layers in both directions, batch first": lambda: nn.GRU(
        4, 3, num_layers=3, bidirectional=True, batch_first=True
    ),
    "gru without bias": lambda: nn.GRU(4, 3, bias=False, bidirectional=True),
    "tanh": lambda: nn.RNN(4, 3, num_layers=2, bidirectional=True),
    "tanh, without bias, batch first": lambda: nn.RNN(4, 3, bias=False, batch_first=True),
    "relu": lambda: nn.RNN(4, 3, num_layers=2, nonlinearity="relu"),
}
NAMES = [func.__name__ for rule in RULES for func in rule.functions]
LOWERINGS = ["batched", "loop"]


def using(lowering: str) -> Any:
    return autotune.forced_lowerings(dict.fromkeys(NAMES, lowering))


@pytest.mark.parametrize(("lowering", "members"), [("batched", [1, 3]), ("loop", [2])])
def test_layers_equal_their_members(lowering: str, members: list[int]) -> None:
    with using(lowering):
        check_table({name: (layer, SEQUENCE) for name, layer in LAYERS.items()}, members=members, loops=())


def _states(model: nn.Module, batch: int) -> Any:
    directions = model.num_layers * (2 if model.bidirectional else 1)
    generator = torch.Generator().manual_seed(3)

    def state(size: int) -> Tensor:
        return torch.randn(directions, batch, size, generator=generator, dtype=torch.float64)

    h = state(model.proj_size or model.hidden_size)
    return (h, state(model.hidden_size)) if isinstance(model, nn.LSTM) else h


def _scaled(state: Any, scale: Tensor) -> Any:
    return tuple(part * scale for part in state) if isinstance(state, tuple) else state * scale


INPUTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "own input": lambda m, x: m.rnn(m.first(x)),
    "own input and state": lambda m, x: m.rnn(m.first(x), _scaled(_states(m.rnn, 3), m.first.bias.sum())),
    "shared state": lambda m, x: m.rnn(m.first(x), _states(m.rnn, 3)),
    "own state, shared input": lambda m, x: m.rnn(x, _scaled(_states(m.rnn, 3), m.first.bias.sum())),
    "one sample": lambda m, x: m.rnn(m.first(x[:, 0])),
    "one sample, own state": lambda m, x: m.rnn(x[:, 0], _squeezed(_scaled(_states(m.rnn, 1), m.first.bias.sum()))),
    "twice": lambda m, x: m.rnn(m.first(x), m.rnn(x)[1]),
    "flattened": lambda m, x: (m.rnn.flatten_parameters(), m.rnn(x))[1],
}


def _squeezed(state: Any) -> Any:
    return tuple(part[:, 0] for part in state) if isinstance(state, tuple) else state[:, 0]


KINDS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, proj_size=2),
    "gru": lambda: nn.GRU(4, 3, num_layers=2, bidirectional=True),
    "rnn": lambda: nn.RNN(4, 3),
}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_inputs_and_states_of_all_kinds(lowering: str) -> None:
    def make(name: str, kind: str) -> nn.Module:
        return Of(INPUTS[name], first=nn.Linear(4, 4), rnn=KINDS[kind]())

    kinds = KINDS if lowering == "batched" else ["rnn"]
    cases = {f"{name}, {kind}": (partial(make, name, kind), SEQUENCE) for name in INPUTS for kind in kinds}
    with using(lowering):
        check_table(cases, members=[2], loops=(), steps=1)


class SharedWeights(nn.Module):
    """Own inputs go through a layer whose weights are constants, given to torch's function."""

    def __init__(self, kind: type[nn.RNNBase], own: bool, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.randn(4, 4)) if own else None
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.options = {"bidirectional": False, "batch_first": False, **options}
            self.constants = {"rnn": kind(4, 4, **options).double().requires_grad_(False)}

    def forward(self, x: Tensor) -> Any:
        rnn = self.constants["rnn"]
        weights = list(rnn._flat_weights)
        if self.own is not None:
            weights[1] = torch.cat([self.own] * (len(weights[1]) // 4))
        zeros = torch.zeros(2 if rnn.bidirectional else 1, 3, 4, dtype=x.dtype)
        hx = (zeros, zeros) if isinstance(rnn, nn.LSTM) else zeros
        func = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh}[rnn.mode]
        x = self.first(x.transpose(0, 1) if rnn.batch_first else x)
        return func(x, hx, weights, True, 1, 0.0, True, rnn.bidirectional, rnn.batch_first)


def test_weights_that_all_members_share() -> None:
    settings: list[dict[str, Any]] = [{}, {"batch_first": True, "bidirectional": True}]
    cases = {
        f"{kind.__name__}, {options}, one weight own: {own}": (partial(SharedWeights, kind, own, **options), SEQUENCE)
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for options in settings
        for own in (False, True)
    }
    check_table(cases, members=[3], loops=())


CELLS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTMCell(4, 4),
    "lstm without bias": lambda: nn.LSTMCell(4, 4, bias=False),
    "gru": lambda: nn.GRUCell(4, 4),
    "gru without bias": lambda: nn.GRUCell(4, 4, bias=False),
    "tanh": lambda: nn.RNNCell(4, 4),
    "relu without bias": lambda: nn.RNNCell(4, 4, bias=False, nonlinearity="relu"),
}


def _steps(model: nn.Module, x: Tensor) -> Any:
    state, states = None, []
    for step in x:
        state = model(step, state)
        states.append(state)
    return states


def stepping(cell: Callable[[], nn.Module]) -> nn.Module:
    return Of(lambda m, x: _steps(m.cell, x), cell=cell())


@pytest.mark.parametrize(("lowering", "members"), [("batched", [1, 3]), ("loop", [3])])
def test_cells_equal_their_members(lowering: str, members: list[int]) -> None:
    """Also of one sample."""
    cases = {name: (partial(stepping, cell), SEQUENCE) for name, cell in CELLS.items()}
    one = {f"{name} of one sample": (partial(stepping, CELLS[name]), SEQUENCE[:, 0]) for name in ("lstm", "gru")}
    with using(lowering):
        check_table({**cases, **one}, members=members, loops=())


def test_cells_whose_weights_all_members_share() -> None:
    torch.manual_seed(0)
    shared = {name: cell().double().requires_grad_(False) for name, cell in CELLS.items()}  # no parts of the model

    def run(model: nn.Module, x: Tensor) -> Any:
        x = model.first(x)
        return {name: _steps(cell, x) for name, cell in shared.items()}

    with in_loops() as found:
        check(lambda: Of(run, first=nn.Linear(4, 4)), SEQUENCE, members=3)
    assert not found


def _joined(result: Any) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in tree_leaves(result)])


MIXES: dict[str, Callable[..., Tensor]] = {
    "lstm": lambda x, h, w, b: _joined(torch.lstm(x, (h, h), [w, w[:, :3], b, b], True, 1, 0.0, True, False, False)),
    "gru, batch first": lambda x, h, w, b: _joined(
        torch.gru(x, h.expand(1, 5, 3), [w[:9], w[:9, :3], b[:9], b[:9]], True, 1, 0.0, True, False, True)
    ),
    "lstm cell": lambda x, h, w, b: _joined(torch.lstm_cell(x[0], (h[0], h[0]), w, w[:, :3], b, b)),
    "gru cell": lambda x, h, w, b: _joined(torch.gru_cell(x[0], h[0], w[:9], w[:9, :3], b[:9], b[:9])),
}


@pytest.mark.parametrize("name", MIXES)
def test_whatever_is_shared(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3, 4), (1, 3, 3) if "batch" not in name else (1, 1, 3), (12, 4), (12,)]
    columns = [torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    with in_loops() as found:
        check_mixes(MIXES[name], *map(nn.Parameter, columns))
    assert not found


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM], ids=lambda kind: kind.__name__)
def test_packed_sequence(kind: type[nn.RNNBase]) -> None:
    def run(model: nn.Module, x: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(model.embed(x), torch.tensor([5, 3, 2]), batch_first=True)
        output, hidden = model.rnn(packed)
        return nn.utils.rnn.pad_packed_sequence(output)[0], hidden

    check(lambda: Of(run, embed=nn.Embedding(11, 4), rnn=kind(4, 3, batch_first=True)), TOKENS, members=3)


DROPPED: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 4, 3, dropout=0.5),
    "gru": lambda: nn.GRU(4, 4, 2, dropout=0.3, bidirectional=True, batch_first=True),
    "rnn": lambda: nn.RNN(4, 4, 2, dropout=0.3),
}


@pytest.mark.parametrize("lowerings", [("batched", "batched"), ("loop", "batched")], ids="/".join)
@pytest.mark.parametrize("name", DROPPED)
def test_dropout_between_layers_is_the_members_own(name: str, lowerings: tuple[str, str]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), DROPPED[name]())

    with using(lowerings[0]):
        array = fuse(build(make, 3), range(3))
        together = [array(SEQUENCE)[0] for _ in range(2)]
    for b, model in enumerate(build(make, 3)):
        with using(lowerings[1]):
            alone = fuse([model], [b])
            for own in together:
                close(own[b], alone(SEQUENCE)[0][0], f"member {b}")
    assert not torch.allclose(together[0], together[1]), "steps draw alike"
    assert not torch.allclose(together[0][0], together[0][1]), "members draw alike"


def test_members_that_differ_in_their_rate() -> None:
    def make(rate: float) -> nn.Module:
        torch.manual_seed(0)
        return nn.GRU(4, 4, 2, dropout=rate).double()

    without, some, all_dropped = fuse([make(0.0), make(0.5), make(1.0)], [1, 1, 1])(SEQUENCE)[0]
    close(without, make(0.0)(SEQUENCE)[0], "rate 0")
    close(some, fuse([make(0.5)], [1])(SEQUENCE)[0][0], "rate 0.5")
    weights = make(1.0)
    close(all_dropped, fuse([weights], [1])(SEQUENCE)[0][0], "rate 1")
    assert not torch.allclose(without, some)


def test_evaluation_drops_nothing() -> None:
    cases = {name: (lambda layer=layer: layer().eval(), SEQUENCE) for name, layer in DROPPED.items()}
    check_table(cases, members=[3], loops=())


def test_measuring_draws_nothing(tmp_path: Any) -> None:
    def run() -> Tensor:
        output: Tensor = fuse(build(DROPPED["lstm"], 3), range(3))(SEQUENCE)[0]
        return output

    with autotune.autotuning(tmp_path / "findings"):
        measured, known = run(), run()
    with using("batched"):
        close(measured, run(), "while measuring")
    close(known, measured, "afterwards")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
def test_a_trace_holds_the_steps_of_all_members_at_once(kind: type[nn.RNNBase]) -> None:
    array = fuse(build(lambda: kind(4, 3), 5, torch.float32))
    x = torch.randn(3, 3, 4)
    with using("loop"):
        graph = make_fx(lambda x: array(x)[0])(x)
        products = [node for node in graph.graph.nodes if "bmm" in str(node.target)]
        assert len(products) == 1 + len(x)
        close(graph(x), array(x)[0], "trace", tolerance=1e-5)


def test_members_stay_ordinary_modules() -> None:
    """A layer keeps a list of its weights: what is put there while the array runs is gone afterwards."""
    array = fuse(build(LAYERS["lstm"], 3), range(3))
    array(SEQUENCE)[0].sum().backward()
    for b, member in enumerate(array.unfuse()):
        twin = LAYERS["lstm"]().double()
        twin.load_state_dict(member.state_dict())
        close(member(SEQUENCE)[0], twin(SEQUENCE)[0], f"member {b}")
        close(array(SEQUENCE)[0][b], twin(SEQUENCE)[0], f"row {b}")
    selected = array.select([2, 0])
    close(selected(SEQUENCE)[0][1], array.members[0](SEQUENCE)[0], "selected")


def test_weights_are_not_moved_while_the_array_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a layer would move them to one piece of memory; they are the array's."""

    def refuse(module: nn.RNNBase) -> None:
        raise AssertionError("moved")

    array = fuse(build(LAYERS["lstm"], 3))
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", refuse)
    array(SEQUENCE)
    assert nn.RNNBase.flatten_parameters is refuse


def test_gradient_of_a_gradient() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone() + model.first.bias
        (slope,) = torch.autograd.grad(model.rnn(x)[0].square().sum(), x, create_graph=True)
        return slope.square().sum()

    names = ("lstm", "lstm, two layers in both directions, batch first", "gru")
    cases = {
        name: (lambda name=name: Of(penalty, first=nn.Linear(4, 4), rnn=LAYERS[name]()), SEQUENCE) for name in names
    }
    with using("batched"):
        check_table(cases, members=[3], loops=())


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_mixed_precision_gives_the_types_of_the_members(kind: type[nn.Module], lowering: str) -> None:
    x = SEQUENCE[0] if "Cell" in kind.__name__ else SEQUENCE
    models, twins = (build(lambda: kind(4, 3), 3, torch.float32) for _ in range(2))
    with using(lowering), torch.autocast("cpu", torch.bfloat16):
        skip_if_torch_cannot_run(kind(4, 3), x.float())
        together = tree_leaves(fuse(models, range(3))(x.float()))
        alone = [tree_leaves(twin(x.float())) for twin in twins]
    for b, results in enumerate(alone):
        for mine, own in zip(together, results, strict=True):
            close(mine[b], own, f"member {b}", tolerance=2e-2)


def test_a_wrong_size_is_told_in_the_words_of_one_member() -> None:
    array = fuse(build(lambda: nn.LSTM(4, 3), 2), range(2))
    with pytest.raises(RuntimeError, match=r"Expected 4, got 5"):
        array(torch.zeros(2, 3, 5, dtype=torch.float64))
    cells = fuse(build(lambda: nn.LSTMCell(4, 3), 2), range(2))
    with pytest.raises(RuntimeError, match=r"input has inconsistent input_size: got 5 expected 4"):
        cells(torch.zeros(3, 5, dtype=torch.float64))


class WithDropout(nn.Module):
    """Two layers with dropout between them, which run member by member where one member trains alone."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = layer(4, 3, 2, dropout=0.3)  # type: ignore[arg-type, call-arg]

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.layer(x)
        return out[-1].square().sum()


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_clipped_step_with_dropout_is_the_same_for_a_member_alone(layer: type[nn.RNNBase]) -> None:
    """The gradients of the two biases are one sum; memory that they shared would be scaled twice."""

    def trained(members: list[int]) -> list[list[Tensor]]:
        models = []
        for member in members:
            torch.manual_seed(member)
            models.append(WithDropout(layer).double())
        array = fuse(models, [10 + member for member in members])
        optimizer = fuse_optimizers([torch.optim.SGD(model.parameters(), 0.1) for model in models], array)
        step = TrainingStep(array, optimizer, lambda model, x: model(x), ("eager", "plain"), max_norm=0.01)
        for tick in range(3):
            array.ticks = (tick,) * len(members)
            step(SEQUENCE)
        return [list(model.parameters()) for model in array.unfuse()]

    together = trained([0, 1, 2])
    for member in range(3):
        for own, one in zip(trained([member])[0], together[member], strict=True):
            assert torch.allclose(own, one, rtol=1e-9, atol=1e-12)
