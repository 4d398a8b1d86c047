"""The command line: `shoal run`, `resume`, `status`, `trials`, `best`."""

from shoal.cli.app import main

__all__ = ["main"]
