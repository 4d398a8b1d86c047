"""Functions and commands of users, each trial in a process of its own. Its modules import no torch."""
