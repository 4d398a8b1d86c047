"""Runs jobs whose training is a program of its own. Import from its modules; they need no torch."""
