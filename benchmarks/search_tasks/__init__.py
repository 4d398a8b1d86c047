"""Searches as users write them, for `searches.py`. A worker imports the module of its task alone."""
