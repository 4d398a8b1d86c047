"""The command line: `shoal run`, `resume`, `status`, `report`, `trials`, `best`, `devices`, `history`, `simulate`."""

from shoal.cli.main import main

__all__ = ["main"]
