"""Conformance suites: what algorithms, policies, packings, back ends and fusion rules must pass to be used by Shoal."""

from shoal.testing.algorithms import check_algorithm
from shoal.testing.backends import check_backend
from shoal.testing.packings import check_packing
from shoal.testing.policies import check_policy
from shoal.testing.rules import check_rule

__all__ = ["check_algorithm", "check_backend", "check_packing", "check_policy", "check_rule"]
