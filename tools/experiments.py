"""The experiments of the papers, and of every rival, on this machine: `make benchmarks`.

    python tools/experiments.py               those that are missing, or older than the code they measure
    python tools/experiments.py --again       those of another day as well, to see whether both days agree
    python tools/experiments.py search-lstm   one, by its name in the index, also if there is a result
    python tools/experiments.py --list        what is there, and the index and its pictures anew from it

The lists are in `benchmarks/papers`. Results are files in docs/benchmarks/results, written one by one, so that a run
that was killed continues where it was; the index is docs/benchmarks/index.md.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from index import experiments_of, page, pictures
from session import ROOT, Measurement, Result, Session, write

__all__ = ["main", "measurements_of"]

DOCS = ROOT / "docs"
RESULTS = DOCS / "benchmarks" / "results"
INDEX = DOCS / "benchmarks" / "index.md"


def measurements_of(names: Sequence[str] = ()) -> list[Measurement]:
    """The measurements of all experiments, or those of some names, each once."""
    found = {each.measurement.name: each.measurement for some in experiments_of().values() for each in some}
    if unknown := [name for name in names if name not in found]:
        raise SystemExit(f"there is no measurement {unknown[0]!r}; there are {', '.join(found)}")
    return [each for name, each in found.items() if not names or name in names]


def machine() -> dict[str, Any]:
    """What the measurements run on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "device": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def write_index(results: Mapping[str, Result]) -> None:
    """Write the table and the pictures of all results."""
    write(INDEX, page(INDEX.read_text("utf-8"), results))
    for name, picture in pictures(results).items():
        write(DOCS / "pictures" / name, picture)


def main() -> int:
    """Take measurements; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="of measurements; without names, all")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="for all measurements together")
    parser.add_argument("--again", action="store_true", help="those whose result is of another day as well")
    parser.add_argument("--list", action="store_true", help="measure nothing")
    options = parser.parse_args()
    today = time.strftime("%Y-%m-%d")
    session = Session(
        measurements_of(options.names), [], RESULTS, write_index, dict,
        again=lambda result: bool(options.names) or (options.again and result["date"] != today),
    )  # fmt: skip
    if options.list:
        session.tell(0)
        write_index(session.results())
        return 0
    return session.run(options.minutes, machine(), {"PYTHONPATH": str(ROOT / "src")}, toy=False)


if __name__ == "__main__":
    sys.exit(main())
