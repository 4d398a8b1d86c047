"""Trains, measures and checkpoints the trials of a job in one process. Its modules need torch."""
