"""A worker does not import torch's compiler, and the compiler still works if it is imported later."""

import re
import subprocess
import sys

import pytest
import torch

CODE = """
import sys, torch
from shoal.train.postponed_compiler import postpone_compiler
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


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_an_optimizer_does_not_import_the_compiler_which_works_later(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(name=name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch._dynamo was imported"


MODELS = """
import sys, torch
from torch import nn
from shoal.train.postponed_compiler import postpone_compiler
from shoal.train.signature_builder import WithoutValues
postpone_compiler()
with torch.device("meta"), WithoutValues():
    found = [
        nn.Embedding(7, 4).weight, nn.init.orthogonal_(nn.LSTM(3, 4).weight_hh_l0), nn.Conv2d(3, 4, 3).bias,
        torch.randn(1, 5, 4), torch.rand((2, 3), dtype=torch.float64), torch.arange(6).expand(1, -1),
        torch.empty(2, 2).normal_(std=2.0),
        nn.TransformerEncoderLayer(8, 2, 16).norm1.weight,
    ]
assert all(each.is_meta for each in found)
assert [tuple(each.shape) for each in found] == [(7, 4), (16, 4), (4,), (1, 5, 4), (2, 3), (1, 6), (2, 2), (8,)]
assert found[4].dtype == torch.float64 and found[5].dtype == torch.int64
model = nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters())
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
sys.exit("sympy" in sys.modules or "torch._dynamo" in sys.modules)
"""


QR_IMPORTS_SYMPY = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
"""Whether checks of torch's own, in `orthogonal_` on the meta device, import sympy."""


def test_models_on_the_meta_device_and_optimizers_import_neither_references_nor_the_compiler() -> None:
    code = re.sub(r"nn\.init\.orthogonal_\((.*?weight_hh_l0)\)", r"\1", MODELS) if QR_IMPORTS_SYMPY else MODELS
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch._refs or torch._dynamo was imported"
