"""The function of `growth.py` that trains for no time; its process imports nothing but this module."""

from collections.abc import Mapping
from typing import Any

import shoal


def report_at_once(config: Mapping[str, Any]) -> None:
    """Report a value."""
    shoal.report({"loss": config["lr"]}, step=1)
