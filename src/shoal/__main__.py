"""The command `shoal`, also `python -m shoal`: it prints a first line before the slow imports."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import TextIOWrapper

from shoal.core.errors import ShoalError
from shoal.host.plain_characters import PRINTED, SHOWN


def main() -> None:
    """Run the command line of this process; print an error of Shoal as one line, with exit status 1.

    Where the encoding lacks characters, as in the C locale, there is a plain one for each of Shoal's own; any other
    becomes "?" on standard output.
    """
    for stream, errors in ((sys.stdout, PRINTED), (sys.stderr, SHOWN)):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    if _shows_progress(sys.argv[1:]):
        with suppress(OSError):  # nobody reads it
            print("shoal: starting", file=sys.stderr, flush=True)
    try:
        _app(sys.argv[1:])()  # the imports take half a second, so the line above is printed first
    except ShoalError as error:
        if os.environ.get("SHOAL_DEBUG"):
            raise
        from shoal.look.text import printable

        print(f"error: {printable(str(error), lines=True)}", file=sys.stderr)
        sys.exit(1)


def _app(arguments: Sequence[str]) -> Callable[[], object]:
    """Return the command line; for `shoal run` with this command alone, as others import much that it does not need."""
    if arguments[:1] == ["run"]:
        from shoal.cli.run import new_app, run

        app = new_app()
        app.command()(run)
        return app
    from shoal.cli.app import app

    return app


def _shows_progress(arguments: Sequence[str]) -> bool:
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return options[:1] == ["run"] and len(options) > 1 and not {"--json", "-h", "--help"} & set(options)


if __name__ == "__main__":
    main()
