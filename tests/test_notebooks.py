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


@pytest.mark.thorough  # fast, test_pickling.py has the same classes in a script
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


NOISY = """
import torch
import torch.nn.functional as F
import shoal
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
x = torch.linspace(-1, 1, 60, dtype=torch.float64).view(-1, 1)


class Noisy(shoal.Task):
    def data(self, config):
        return TensorDataset(x, x.square()), TensorDataset(x, x.square())

    def model(self, config):
        return torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)).double()

    def optimizer(self, model, config):
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])


def search(backend):
    return shoal.tune(
        Noisy(), {"lr": [0.001, 0.002, 0.004]}, metric="valid_loss", mode="min", algorithm=shoal.Grid(epochs=2),
        backend=backend, devices="cpu:1", directory=f"{folder}/{backend}", show_progress=False,
    )
"""

LOOP = """
def loop(trial):
    torch.manual_seed(trial.seed)
    model = Noisy().model(trial.config)
    optimizer = Noisy().optimizer(model, trial.config)
    for epoch in range(trial.epoch):
        for number, rows in enumerate(shoal.sample_order(trial, epoch, len(x)).split(32)):
            with shoal.randomness(trial, 2 * epoch + number):
                loss = F.mse_loss(model(x[rows]), x[rows].square())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return F.mse_loss(model.eval()(x), x.square()).item()
"""

COMPARED = """
study = search("local")
apart = [abs(loop(trial) / trial.metrics["valid_loss"] - 1) for trial in study.trials]
print("compared", len(apart), max(apart) < 1e-9, study.rerun(study.best_trial.number).largest < 1e-9)
"""


def test_a_plain_loop_of_a_notebook_equals_the_trials_of_a_study(notebook: Notebook) -> None:
    lines = notebook(NOISY, LOOP, COMPARED).splitlines()
    assert [line for line in lines if line.startswith("compared")] == ["compared 3 True True"]
