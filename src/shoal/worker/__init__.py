"""Worker: trains, measures and checkpoints the trials of a job in one process. Import from its modules; they need
torch."""
