"""Dry run of the planner: a few real steps of some configurations, and the jobs that a search would start for them."""
