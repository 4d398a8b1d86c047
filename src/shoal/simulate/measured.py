"""The measured tables that simulations read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.core.errors import ScenarioError

__all__ = ["reading"]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within, a table is read, and what is wrong with it is told as that.

    Raises:
        ScenarioError: it is not there, or is not what it should be.
    """
    if not path.is_file():
        raise ScenarioError(
            f"{path} is not there, and this scenario needs it; name the folder of the tables with --data DIR"
        )
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ScenarioError(f"{path} is not the table that it should be: {type(error).__name__}: {error}") from error
