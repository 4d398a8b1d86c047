"""A worker does not import torch's compiler, and the compiler still works if it is imported later."""

import subprocess
import sys

import pytest

CODE = """
import sys, torch
from shoal.worker.run import postpone_compiler
postpone_compiler()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.{name}(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
step()
early = "torch._dynamo" in sys.modules
before = model.weight.detach().clone()
torch.compile(step, backend="eager")()
assert not torch.equal(before, model.weight)
sys.exit(early)
"""


@pytest.mark.parametrize(
    "name", [pytest.param("SGD", marks=pytest.mark.thorough), "Adam", pytest.param("AdamW", marks=pytest.mark.thorough)]
)
def test_an_optimizer_does_not_import_the_compiler(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(name=name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch._dynamo was imported"
