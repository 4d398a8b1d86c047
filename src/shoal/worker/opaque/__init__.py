"""Runs jobs of functions and commands, each in its own process. Import from its modules; they need no torch."""
