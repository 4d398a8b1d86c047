"""A process beside the one that trains compiles a step; the one that trains then only reads the code."""

import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.core.errors import FusionError
from shoal.fuse import inductor
from shoal.fuse.compile_cache import CompileRecord

STEP = """
import sys
import torch
from torch import nn
from shoal.fuse import inductor
from shoal.fuse.api import fuse
from shoal.fuse.capture import CapturedStep, CompiledAheadError
from shoal.fuse.capture_decision import CaptureDecision
from shoal.fuse.compile_cache import CompileRecord
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.train.postponed_compiler import postpone_compiler
postpone_compiler()

def loss(model, batch):
    return (model(batch) - torch.tensor([0.5, 1.0, 2.0])).square().mean()

def members():
    torch.manual_seed(0)
    models = [nn.Linear(4, 3) for _ in range(2)]
    array = fuse(models, [0, 1])
    optimizer = fuse_optimizers([torch.optim.Adam(model.parameters()) for model in models], array)
    return array, optimizer

def eager(array, optimizer):
    optimizer.zero_grad()
    losses = array.map(loss, batch)
    losses.sum().backward()
    optimizer.step()
    return losses.detach()

batch = torch.linspace(-1, 1, 20, dtype=torch.float32).view(5, 4)
(array, optimizer), twin = members(), members()
eager(array, optimizer), eager(*twin)
assert "torch._dynamo" not in sys.modules
if sys.argv[1:] == ["float64"]:
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("highest")
else:
    torch.set_float32_matmul_precision("high")
decision = CaptureDecision(None, 2, 10, record=CompileRecord("step"), ahead=True)
decision._record.begin()
try:
    CapturedStep(array, optimizer, loss, batch, ahead=decision.compile_ahead)
    raise SystemExit("it was captured here")
except CompiledAheadError:
    decision.end(compiled=False)
assert decision.waits
other = CompileRecord("step")
assert not other.begin() and not other.exists
assert not CaptureDecision(None, 2, 10**9, record=CompileRecord("other"), ahead=True)(1.0), "one after another"
assert inductor._compiler.wait() == 0
assert other.exists and other.begin()
step = CapturedStep(array, optimizer, loss, batch, ahead=decision.compile_ahead)
for _ in range(3):
    torch.testing.assert_close(step(batch), eager(*twin))
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_step_is_compiled_beside_the_process_that_then_reads_the_code(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    done = subprocess.run([sys.executable, "-c", STEP, dtype], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == (["1", "0"], 0), done.stderr
    directories = [path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert directories == ["inductor"]


def held(record: CompileRecord) -> int:
    assert record.begin()
    assert record.lock is not None
    return record.lock


def test_a_compiler_that_is_killed_leaves_the_right_to_others() -> None:
    record = CompileRecord("killed")
    inductor.compile_ahead(traced(), INPUTS, held(record))
    record.end(compiled=False)
    compiler = inductor._compiler
    assert compiler is not None
    assert not record.begin(), "the compiler has the right"
    compiler.kill()
    assert compiler.wait() == -signal.SIGKILL
    assert record.begin()
    assert not record.exists
    record.end(compiled=False)


@pytest.mark.thorough  # fast, one that is killed does
def test_a_compiler_that_fails_leaves_the_right_to_others() -> None:
    record = CompileRecord("fails")
    graph = traced()
    next(node for node in graph.graph.nodes if node.op == "output").prepend(
        graph.graph.call_function(torch.ops.aten.mm.default, (next(iter(graph.graph.nodes)),) * 2)
    )
    inductor.compile_ahead(graph, INPUTS, held(record))
    record.end(compiled=False)
    assert inductor._compiler is not None
    assert inductor._compiler.wait() == 1
    assert record.begin()
    assert not record.exists
    record.end(compiled=False)


PARENT = """
import os, signal, subprocess, sys
serve = f"from shoal.fuse import inductor; inductor._end_with({os.getpid()})"
child = f"import os, time; time.sleep = lambda _: print('looked', flush=True); {serve}"
subprocess.Popen([sys.executable, "-c", child])
signal.pause()
"""


def test_a_compiler_ends_with_the_process_that_has_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "looked\n"
        parent.kill()
        assert set(parent.stdout.read().split()) <= {"looked"}, "the compiler closes it when it ends"


INPUTS = [torch.ones(2, 3, dtype=torch.float64), torch.arange(6, dtype=torch.float64).view(3, 2).T]
CONSTANT = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def function(x: Tensor, y: Tensor) -> Tensor:
    count = torch.zeros(3, dtype=torch.float64)
    count += x[0]
    first, second = torch.split(y * CONSTANT - CONSTANT, [1, 2], dim=1)
    y.mul_(2)
    return torch.cat([first, second], 1).sum(0, keepdim=True) * count + torch.arange(3)


def traced() -> GraphModule:
    return make_fx(function, tracing_mode="real")(*(tensor.clone() for tensor in INPUTS))


def test_a_graph_survives_being_given_to_another_process() -> None:
    graph = traced()
    plain, constants = inductor._without_constants(graph)
    assert len(constants) == 1
    assert constants[0] is CONSTANT
    given = inductor._graph(pickle.loads(pickle.dumps(inductor._nodes(plain))))
    assert given.code == plain.code
    expected: Any = [tensor.clone() for tensor in INPUTS]
    inputs = [tensor.clone() for tensor in INPUTS]
    for _ in range(2):  # a constant in place of `count` would add up
        assert torch.equal(given(*inputs, *constants)[0], function(*expected))
        assert torch.equal(inputs[1], expected[1])


def test_a_constant_that_gets_another_dtype_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = torch.arange(3, dtype=torch.float64)
    graph = make_fx(lambda x: x * factors, tracing_mode="real")(torch.ones(3, dtype=torch.float64))
    monkeypatch.setattr(inductor, "_compiled", lambda plain, shapes: lambda *given: pytest.fail(str(given)))
    run = inductor.compile_graph(graph, [torch.ones(3, dtype=torch.float64)])
    factors.data = factors.data.float()
    torch.testing.assert_close(run(torch.ones(3, dtype=torch.float64)), torch.arange(3, dtype=torch.float64))


def test_what_cannot_be_pickled_is_not_given_to_another_process() -> None:
    graph, record = traced(), CompileRecord("not pickled")
    next(node for node in graph.graph.nodes if node.op == "call_function").target = lambda *given, **options: None
    lock, before = held(record), inductor._compiler
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        inductor.compile_ahead(graph, INPUTS, lock)
    assert inductor._compiler is before
    record.end(compiled=False)


def test_without_inductors_cache_no_process_is_started() -> None:
    off = torch._inductor.config.patch(fx_graph_cache=False)  # what pytest would set, it would later delete
    with off, pytest.raises(FusionError, match="caches are disabled"):
        inductor.compile_ahead(traced(), INPUTS, 0)
