"""What tests and benchmarks share: made-up studies and their faults, what has to hold of a study, nodes over pipes."""
