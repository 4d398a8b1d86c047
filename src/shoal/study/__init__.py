"""The state machine of a running study, and the engine loop around it."""
