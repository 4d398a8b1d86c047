"""A library that is imported before Shoal may replace functions of torch by its own, which call torch's."""

import subprocess
import sys

import pytest
import torch

from shoal.fuse.rules.base import Rule, functions_named

CODE = """
import torch
import torch.nn.functional as F

def replaced(namespace, name):
    original = getattr(namespace, name)
    def new_function(*args, **kwargs):
        return original(*args, **kwargs)
    new_function.__module__ = "another_library"
    setattr(namespace, name, new_function)
    return original

select, item = replaced(torch, "select"), torch.Tensor.item
bernoulli = replaced(torch, "bernoulli")
for namespace, name in ((torch.Tensor, "add_"), (torch.Tensor, "item"), (F, "softmax"), (F, "linear")):
    replaced(namespace, name)

import copy
import shoal
from shoal.fuse.rules.table import RULES
from shoal.fuse.torch_functions import RANDOM_FUNCTIONS

assert select in RULES and bernoulli in RANDOM_FUNCTIONS

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4).double()
    def forward(self, x):
        y = F.softmax(self.layer(x), -1)
        noise = torch.bernoulli(torch.full((4,), 0.5, dtype=torch.float64))
        return torch.select(y.add_(noise), 1, 0) + x.sum().item()

models = [Net() for _ in range(3)]
alone = [shoal.fuse([copy.deepcopy(model)], [b]) for b, model in enumerate(models)]
array = shoal.fuse(models, range(3))
for _ in range(2):
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(array(x), torch.cat([each(x) for each in alone]), rtol=1e-9, atol=1e-12)
"""


def test_replaced_before_shoal_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0, done.stderr


def test_a_rule_of_a_replaced_function_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.select
    monkeypatch.setattr(torch, "select", lambda *args: original(*args))
    assert original in functions_named("select", torch)
    assert Rule.direct(lambda func, *args: None, torch.select, torch.relu).functions == (torch.relu,)
