"""The nouns that every room speaks: trials, arrays, jobs, devices, events."""
