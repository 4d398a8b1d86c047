"""Data-parallel training of one array by the processes of several jobs."""
