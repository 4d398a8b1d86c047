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
