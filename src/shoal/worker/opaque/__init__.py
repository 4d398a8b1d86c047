"""Trains functions and commands of the user, each trial in its own process. Its modules import no torch."""
