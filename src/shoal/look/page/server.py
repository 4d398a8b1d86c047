"""The server of the page, and its address.

As a program it serves beside a study: its arguments are the study's directory and the id of the study's process.
"""

import asyncio
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import ShoalError
from shoal.journal.view import JournalView
from shoal.look.page.beside import check_page
from shoal.look.page.feed import find_studies

if TYPE_CHECKING:
    import uvicorn

    from shoal.look.page.app import PageServer

__all__ = ["serve"]

HOST = "127.0.0.1"
NICE = 10
"""Looking at a study must not slow it."""
_CHECK_SECONDS = 0.1
"""Time between two checks whether the server is to end, and whether the process of the study is still there."""


def serve(
    root: Path,
    *,
    port: int = 0,
    announce: Callable[[str], None],
    parent: int | None = None,
) -> None:
    """Serve the page until Ctrl-C.

    Args:
        port: Port on 127.0.0.1; 0: a free one.
        announce: Function that is given the address with its token, once the server answers.
        parent: Process with whose end the server ends, or with a line on standard input.

    Raises:
        ShoalError: a package is missing, the port is in use, there is no study, or the page ended by a logged error.
    """
    check_page()
    _check_studies(root)
    bound = _bound(port)
    port = bound.getsockname()[1]
    token = secrets.token_urlsafe(32)
    from shoal.look.page.app import PageServer  # needs the packages that were checked above

    os.nice(NICE)
    page = PageServer(root, token=token, port=port)
    address = f"http://{HOST}:{port}/#token={token}"
    with bound, suppress(KeyboardInterrupt):  # the usual end
        asyncio.run(_serve(page, bound, lambda: announce(address), parent))
    if page.failed:
        raise ShoalError(f"the page of {root} has ended by the error above; studies continue without it")


async def _serve(page: "PageServer", bound: socket.socket, begun: Callable[[], None], parent: int | None) -> None:
    server = _uvicorn_server(page)
    if parent is not None:
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    task = asyncio.create_task(server.serve(sockets=[bound]))
    while not (server.started or task.done()):
        await asyncio.sleep(0.01)
    if server.started:
        begun()
    while not task.done():
        await asyncio.wait([task], timeout=_CHECK_SECONDS)
        server.should_exit |= page.failed or (parent is not None and os.getppid() != parent)
        if server.should_exit:
            await page.end_streams()
    task.result()


def _end_with_input(server: "uvicorn.Server") -> None:
    sys.stdin.readline()
    server.should_exit = True


def _uvicorn_server(page: "PageServer") -> "uvicorn.Server":
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            page.app,
            http="h11",
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            limit_concurrency=256,
        )
    )


def _check_studies(root: Path) -> None:
    """Refuse a folder without studies, and a single study whose journal cannot be read."""
    found = find_studies(root)
    if not found:
        raise ShoalError(
            f"there is no study in {root} and below it; name the directory of one, or begin it with shoal run"
        )
    if len(found) == 1:
        with JournalView.read(next(iter(found.values()))):
            pass


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((HOST, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ShoalError(
            f"port {port} of {HOST} cannot be used ({error}); name another one (--port), or none for a free one"
        ) from error
    return bound


if __name__ == "__main__":
    try:
        serve(Path(sys.argv[1]), announce=lambda address: print(address, flush=True), parent=int(sys.argv[2]))
    except ShoalError as error:
        sys.exit(str(error))
