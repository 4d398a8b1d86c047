"""Tests that need a GPU, as a measurement of `tools/gpu.py`: pytest, and as the last line one JSON object.

    python tools/gpu_tests.py tests/gpu/test_gpu_steps.py [-n 4]

The object has the numbers of tests that passed, failed and were skipped; "missed" names those that failed. Arguments
are those of pytest. The exit status is 1 if a test failed or pytest could not run.
"""

import json
import sys
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest

__all__ = ["Count", "main"]

OPTIONS = ("-q", "-p", "no:cacheprovider", "-W", "default", "--tb", "short", "-m", "gpu")


class Count:
    """A plugin of pytest that counts what comes of the tests."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test once: as failed if any phase of it fails, else by its call, or by the phase that skips it."""
        if report.failed:
            if report.nodeid not in self.failed:
                self.outcomes["failed"] += 1
                self.failed.append(report.nodeid)
        elif report.when == "call" or report.skipped:
            self.outcomes[report.outcome] += 1

    def figures(self) -> dict[str, Any]:
        """Counts, and the tests that failed."""
        return {**{name: self.outcomes[name] for name in ("passed", "failed", "skipped")}, "missed": self.failed}


def main(arguments: list[str]) -> int:
    """Run pytest; `-n` is left out where pytest-xdist is not installed."""
    if "-n" in arguments and find_spec("xdist") is None:
        place = arguments.index("-n")
        arguments = arguments[:place] + arguments[place + 2 :]
    count = Count()
    status = pytest.main([*OPTIONS, *arguments], plugins=[count])
    print(json.dumps(count.figures()))
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
