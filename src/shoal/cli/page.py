"""`shoal page`: show a study, or a folder of studies, in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import print_message
from shoal.page.server import serve

__all__ = ["page"]


def page(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="A study, or a folder of studies.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of 127.0.0.1; by default a free one.")] = 0,
) -> None:
    """Show studies in a browser, while they run and afterwards; Ctrl-C ends it.

    The page has the state and the best trials, learning curves, the search space, all trials, the timeline of devices
    and failures, and buttons for all that shoal trial, study, policy and devices can ask of a study. Whoever has the
    printed address with its token can press them. Only this machine can reach the page; from another one, forward the
    port with the same number: ssh -L PORT:127.0.0.1:PORT. Journals are only read, and no code of a study runs. shoal
    report DIR --html FILE writes the same views to a file.
    """
    serve(directory, port=port, announce=lambda address: print_message(f"the page is at {address}"))
