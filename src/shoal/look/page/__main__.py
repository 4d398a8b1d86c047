"""The page beside a study that another process runs: arguments are the study's directory and that process's id."""

import sys
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.look.page.server import serve

if __name__ == "__main__":
    try:
        serve(Path(sys.argv[1]), announce=lambda address: print(address, flush=True), parent=int(sys.argv[2]))
    except ShoalError as error:
        sys.exit(str(error))
