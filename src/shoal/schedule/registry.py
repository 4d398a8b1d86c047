"""The policies by name."""

from collections.abc import Mapping
from difflib import get_close_matches

from shoal.errors import PolicyError
from shoal.schedule.base import Policy
from shoal.schedule.fifo import Fifo
from shoal.schedule.knapsack import WFD

__all__ = ["POLICIES", "make_policy"]

POLICIES: Mapping[str, type[Policy]] = {
    "auto": WFD,
    "fifo": Fifo,
    "wfd": WFD,
}


def make_policy(policy: str | Policy) -> Policy:
    """The policy of that name; a policy is returned as it is.

    Raises:
        PolicyError: there is no such policy.
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        close = get_close_matches(str(policy), POLICIES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise PolicyError(f"there is no policy {policy!r}{hint}; `policy` is a Policy or one of {', '.join(POLICIES)}")
    return POLICIES[policy]()
