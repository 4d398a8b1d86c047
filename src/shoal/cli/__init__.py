"""The command line, `shoal COMMAND`.

Commands: `run`, `profile`, `devices`, `report`, `rerun`, `history`, `trial`, `resume`, `status`, `trials`, `best`,
`mirror`, `simulate`.
"""

from shoal.cli.start import main

__all__ = ["main"]
