"""Costs of trials on devices: measurements merged in one place and asked in one place, and the job history on disk."""
