"""Where the command line begins: a first word to the user, then the imports."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process."""
    if _says_so(sys.argv[1:]):
        print("shoal: starting", file=sys.stderr, flush=True)
    from shoal.cli.app import main as run  # half a second, of which the user should know what it is

    run()


def _says_so(arguments: Sequence[str]) -> bool:
    """Whether a study is begun whose progress is shown."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return own[:1] == ["run"] and len(own) > 1 and not {"--json", "-h", "--help"} & set(own)
