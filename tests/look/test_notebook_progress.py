"""Progress of a study in a real kernel: one output, updated in place."""

from pathlib import Path
from typing import Any

import pytest
from report_samples import snapshot

from shoal.look.progress import LineProgress, NotebookProgress, progress

CELL = """
import shoal

def train(config):
    for step in range(1, 21):
        shoal.report({"loss": config["x"] / step}, step=step)

study = shoal.tune(train, {"x": shoal.uniform(1.0, 2.0)}, metric="loss", mode="min", devices="cpu:1",
                   algorithm=shoal.Random(2, epochs=20), directory=r"%s")
"""


def outputs(cell: str) -> list[dict[str, Any]]:
    """All messages that a kernel sends while it runs a cell."""
    manager = pytest.importorskip("jupyter_client").manager
    found: list[dict[str, Any]] = []
    with manager.run_kernel(kernel_name="python3") as client:
        answer = client.execute_interactive(cell, timeout=120, output_hook=found.append, allow_stdin=False)
    assert answer["content"]["status"] == "ok", found
    return found


def test_a_notebook_gets_one_output_that_is_updated(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel")
    found = outputs(CELL % (tmp_path / "study"))
    kinds = [each["msg_type"] for each in found]
    assert (kinds.count("display_data"), kinds.count("stream")) == (1, 0)
    shown = [each["content"] for each in found if each["msg_type"] in ("display_data", "update_display_data")]
    assert len({each["transient"]["display_id"] for each in shown}) == 1
    assert len(shown) > 1
    first, last = (each["data"] for each in (shown[0], shown[-1]))
    assert "40 of 40" not in first["text/plain"]
    for said in ("minimises loss", "40 of 40", "2 complete", "best", "loss"):
        assert said in last["text/plain"]
    assert last["text/html"].startswith("<pre")
    assert "\x1b" not in last["text/html"]


def test_text_of_a_study_is_no_markup_in_a_notebook() -> None:
    shown: list[dict[str, str]] = []
    found = snapshot(note="<script>alert(1)</script>", waiting={"<b>bold</b>": [3]})
    with NotebookProgress(lambda: found, lambda bundle, **_: shown.append(bundle)) as display:
        display.print_lines(["<i>a task</i>"])
    assert "&lt;script&gt;alert" in shown[0]["text/html"]
    assert "&lt;b&gt;bold" in shown[0]["text/html"]
    assert "<script" not in shown[0]["text/html"]


def test_nothing_is_sent_while_nothing_changes() -> None:
    sent: list[str] = []
    now, done = 0.0, 25

    class Handle:
        def update(self, bundle: dict[str, str], raw: bool) -> None:
            sent.append(bundle["text/plain"])

    display = NotebookProgress(lambda: snapshot(epochs_done=done), lambda bundle, **_: Handle(), lambda: now)
    with display:
        for _ in range(20):
            now += 1.0
            display.update()
        assert sent == []
        now, done = 30.0, 26
        display.update()
        display.update()
        assert len(sent) == 1


def test_outside_of_a_notebook_lines_are_printed() -> None:
    pytest.importorskip("IPython")
    assert isinstance(progress(snapshot), LineProgress)
