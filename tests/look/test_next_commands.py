"""The commands at the end of a run: whole on a narrow terminal, in a log too, not in a notebook or a silent study."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_samples import snapshot
from rich.console import Console

from shoal.host.remedy import next_commands
from shoal.look.progress import NotebookProgress, Progress, progress
from shoal.look.snapshot import Snapshot

FOLDER = Path("runs/a search with a long name")
QUOTED = "'runs/a search with a long name'"
COMMANDS = [
    "shoal: next:",
    f"shoal:   shoal status {QUOTED}",
    f"shoal:   shoal best {QUOTED}",
    f"shoal:   shoal page {QUOTED}",
    f"shoal:   shoal export {QUOTED} 12",
]


def take() -> Snapshot:
    return snapshot()


@pytest.mark.parametrize(
    ("settings", "silent", "expected"),
    [
        pytest.param({"force_terminal": True, "width": 40, "color_system": None}, False, COMMANDS, id="narrow"),
        pytest.param({"force_terminal": False, "width": 40}, False, COMMANDS, id="log"),
        pytest.param({"force_terminal": True, "no_color": True}, False, COMMANDS, id="no color"),
        pytest.param({"force_terminal": True}, True, [], id="silent"),
    ],
)
def test_commands_are_printed_whole(
    settings: dict[str, Any], silent: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    display: Progress = progress(take, silent=silent, console=Console(file=file, **settings))
    display.print_lines(next_commands(FOLDER, 12), whole=True)
    assert file.getvalue().splitlines() == expected
    assert file.getvalue().isascii()


def test_a_notebook_is_not_told_after_the_end() -> None:
    shown: list[dict[str, str]] = []
    show: Callable[..., Any] = lambda bundle, **_: shown.append(bundle)  # noqa: E731
    with NotebookProgress(take, show) as display:
        pass
    display.print_lines(next_commands(FOLDER, 12), whole=True)
    assert not any("next:" in each["text/plain"] for each in shown)


def test_without_a_model_there_is_nothing_to_export() -> None:
    assert not any("export" in line for line in next_commands(FOLDER, None))
