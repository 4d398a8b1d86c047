"""Where the command line begins: a first word to the user, then the imports."""

import os
import sys
from collections.abc import Sequence

from shoal.core.errors import ShoalError

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process; an error of Shoal is one line, and exit status 1."""
    if _says_so(sys.argv[1:]):
        print("shoal: starting", file=sys.stderr, flush=True)
    from shoal.cli.app import app  # half a second, of which the user should know what it is
    from shoal.reporting.text import shown

    try:
        app()
    except ShoalError as error:
        if os.environ.get("SHOAL_DEBUG"):
            raise
        print(f"error: {shown(str(error), lines=True)}", file=sys.stderr)
        sys.exit(1)


def _says_so(arguments: Sequence[str]) -> bool:
    """Whether a study is begun whose progress is shown."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return own[:1] == ["run"] and len(own) > 1 and not {"--json", "-h", "--help"} & set(own)
