"""Trains functions and commands of the user, each trial in its own process. Import from its modules; they import no
torch."""
