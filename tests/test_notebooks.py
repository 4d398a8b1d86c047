"""Notebooks: Jupyter's own client executes their cells, all in one kernel, each notebook in a fresh namespace."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from own_classes import CLASSES, SEARCH


class Notebook(Protocol):
    def __call__(self, *cells: str) -> str:
        """Execute cells in order; returns all that they printed. An error of a cell is one of the test."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookClient]:
    directory = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(directory / "cache"))
        patch.setenv("IPYTHONDIR", str(directory / "ipython"))
        client = NotebookClient(
            new_notebook(), kernel_name="python3", timeout=120, resources={"metadata": {"path": str(directory)}}
        )
        with client.setup_kernel():
            yield client


@pytest.fixture
def notebook(kernel: NotebookClient, tmp_path: Path) -> Notebook:
    """Runs cells; what they keep goes to the directory `folder`, a name that they find."""

    def run(*cells: str) -> str:
        printed = []
        for source in ("%reset -f", f"folder = {str(tmp_path)!r}", *cells):
            kernel.nb.cells.append(new_code_cell(source))
            done = kernel.execute_cell(kernel.nb.cells[-1], len(kernel.nb.cells) - 1)
            printed += [output.text for output in done.outputs if output.output_type == "stream"]
        return "".join(printed)

    return run


def test_a_study_leaves_the_classes_of_a_notebook_as_they_are(notebook: Notebook) -> None:
    """Each search trains with what the globals hold when it is called; each study keeps what they held."""
    assert notebook(CLASSES, SEARCH, 'check("inline")', 'check("local")', "print('through')").endswith("through\n")


TASK = """
import torch
import shoal

torch.set_num_threads(1)
rows = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 64).unsqueeze(1))


class Warm(shoal.Task):
    def data(self, config):
        return rows, rows

    def model(self, config):
        return torch.nn.Linear(1, 1)

    def optimizer(self, model, config):
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        self.warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=config["warm"])
        return optimizer

    def loss(self, model, batch):
        return (model(batch[0]) - batch[0].square()).square().mean()

    def step(self, model, batch, optimizer):
        loss = super().step(model, batch, optimizer)
        self.warm.step()
        return loss


class Mended(Warm):
    scheduler_interval = "step"
    step = shoal.Task.step

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def scheduler(self, optimizer, config):
        return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=config["warm"])


def search(task, backend):
    return shoal.tune(
        task, {"lr": 0.1, "warm": [1, 50]}, metric="valid_loss", mode="min", algorithm=shoal.Grid(epochs=1),
        backend=backend, devices="cpu:1", directory=f"{folder}/{type(task).__name__}-{backend}", show_progress=False,
    )
"""

REFUSED = """
for backend in ("inline", "local"):
    try:
        search(Warm(), backend)
    except shoal.ShoalError as error:
        print("raised", type(error).__name__, str(error).splitlines()[0])
"""

TRAINED = """
values = [row.metrics["valid_loss"] for row in search(Mended(), "inline").trials]
print("trained", len(values), values[0] != values[1])
"""


def test_a_task_that_keeps_a_trial_on_itself_is_refused_with_the_remedy(notebook: Notebook) -> None:
    lines = notebook(TASK, REFUSED, TRAINED).splitlines()
    refused, again, trained = [line for line in lines if line.startswith(("raised", "trained"))]  # and warnings
    assert refused == again
    assert refused.startswith(
        "raised TaskError the task's `optimizer` sets its attribute 'warm', which all trials share;"
    )
    assert 'with scheduler_interval = "step"' in refused
    assert trained == "trained 2 True"
