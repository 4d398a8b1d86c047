"""This machine: its devices, processes, locks, files and settings, and what of a user lies in its files."""
