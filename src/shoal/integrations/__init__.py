"""Other libraries' training loops, trackers and searchers; each module imports its library when it is used."""
