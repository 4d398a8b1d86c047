"""Conformance suites: what an algorithm, a policy or a back end must pass to be used by Shoal."""

from shoal.testing.algorithms import check_algorithm

__all__ = ["check_algorithm"]
