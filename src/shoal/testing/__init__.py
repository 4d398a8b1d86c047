"""Conformance suites: what an algorithm, a policy, a packing or a back end must pass to be used by Shoal."""

from shoal.testing.algorithms import check_algorithm
from shoal.testing.backends import check_backend
from shoal.testing.packings import check_packing
from shoal.testing.policies import check_policy

__all__ = ["check_algorithm", "check_backend", "check_packing", "check_policy"]
