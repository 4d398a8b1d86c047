"""A running study: its state machine, and the loop around it."""
