"""The data types that all packages share: trials, arrays, jobs, devices, events, commands."""
