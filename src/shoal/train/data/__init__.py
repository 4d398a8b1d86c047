"""Data loading: batches of a task's data sets, shared by all arrays of a process. Its modules need torch."""
