"""What a user gives, as bytes for other processes."""

import pickle

import cloudpickle

from shoal.errors import ShoalError

__all__ = ["dumped"]


def dumped(value: object, what: str, fault: type[ShoalError], remedy: str) -> bytes:
    """Pickle what a user gave.

    Args:
        value: that.
        what: what it is and for whom, as in "the task cannot be pickled for its workers".
        fault: raised where that cannot be done.
        remedy: what its user is to do then.

    Raises:
        ShoalError: a `fault`; it cannot be pickled.
    """
    try:
        content: bytes = cloudpickle.dumps(value)
    except (TypeError, pickle.PicklingError) as error:
        raise fault(f"{what} ({error}); {remedy}") from error
    return content
