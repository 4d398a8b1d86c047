"""The journal of a study, in SQLite: every change of state is recorded before it takes effect."""
