"""Fusion rules: how a torch function runs for all members at once, one module per family."""
