"""The command line: `shoal run`, `resume`, `status`, `trials`, `best`, `simulate`."""

from shoal.cli.app import main

__all__ = ["main"]
