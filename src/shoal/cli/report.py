"""`shoal report`: write the timeline of a study's devices, and an HTML page with it."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import AsJson, StudyDirectory, print_json, say
from shoal.cluster.temporary import TemporaryFolder
from shoal.core.errors import ShoalError
from shoal.journal.view import JournalView
from shoal.reporting.drawing import PICTURES, check_drawing
from shoal.reporting.overview import Overview, overview
from shoal.reporting.page import overview_json, write_page
from shoal.reporting.timeline import draw_timeline

__all__ = ["report"]

_WHAT = "a report"


def report(
    directory: StudyDirectory,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="One file: a page (.html), or the timeline (.png or .svg).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report what each device of a study did and when, the best trials, and failures with reasons.

    Draws a timeline of every device: jobs as bars, with their trials, coloured by structure; above it the best value so
    far. Without --output a page and the timeline are written below DIR/report or, without permission to write there,
    below the working directory. Works on a running study, too. With --json the report is printed, and drawn only with
    --output.
    """
    if output is not None:
        check_drawing(output, _WHAT, "report", (".html", *PICTURES))
    with JournalView.read(directory) as journal:
        found = overview(journal, time.time())
    written: list[Path] = []
    if output is not None:
        written = [_write(found, output)]
    elif not as_json:
        written = _write_all(found, _folder(directory))
    if as_json:
        print_json({"directory": str(directory), **overview_json(found), "files": [str(path) for path in written]})
    for path in written:
        say(f"written: {path}")


def _write(study: Overview, path: Path) -> Path:
    if path.suffix.lower() in PICTURES:
        draw_timeline(study, path)
        return path
    with TemporaryFolder() as temporary:
        picture = temporary.path / "timeline.png"
        draw_timeline(study, picture)
        write_page(study, picture.read_bytes(), path)
    return path


def _folder(directory: Path) -> Path:
    """Return the folder below the study or, without permission to write there, below the working directory."""
    own = directory / "report"
    if os.access(own if own.exists() else directory, os.W_OK):
        return own
    other = Path(f"{directory.resolve().name}-report")
    say(f"{own} cannot be written; the report is written below the working directory")
    return other


def _write_all(study: Overview, folder: Path) -> list[Path]:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ShoalError(f"the report cannot be written: {error}; name another file with --output") from error
    picture, page = folder / "timeline.png", folder / "report.html"
    check_drawing(picture, _WHAT, "report")
    draw_timeline(study, picture)
    write_page(study, picture.read_bytes(), page)
    return [page, picture]
