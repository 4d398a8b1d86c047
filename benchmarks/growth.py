"""How time and memory grow with a study: its trials (10 to 100,000), devices (1 to 10,000), reports (10 to 1,000,000).

Each point of a curve is measured in a process of its own. Seconds are CPU seconds of that process, those of the page of
its server, as other programs on the machine have little part in them. Memory is how far the peak of the resident set is
above that at the start. The exponent of a curve is the slope of a straight line through the
logarithms of its points, each less the curve's first point, as that is what does not grow; points that are less than a
noise floor above it are left out, and a curve without two others is flat.

    python benchmarks/growth.py [--curves functions resume ...] [--gavel] [--quick]

With --gavel the scenario gavel_10k is simulated to its end as well. The last line is JSON; "missed" names the exponents
and figures that are over what is asked, and points that took longer than a point may.
"""

import argparse
import json
import math
import os
import platform
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import growth_points as points
from growth_study import make_study

from shoal.simulate.scenario import load

EXPONENT = 1.1
"""Asked at most of each curve."""
FLOORS = {"seconds": 0.02, "mib": 4.0}
"""Least difference to the first point of a curve that counts for its exponent."""
GAVEL_SECONDS = 1200.0

Figures = dict[str, float]


@dataclass(frozen=True)
class Curve:
    """One measurement at several sizes.

    Args:
        unit: What the sizes count.
        measure: Function from a size and an empty folder to seconds by name, and "mib" where the process is another.
        study: Function from a size to the trials and devices of the journal that is made in the folder before; None
            if there is none.
        asked: (Name of a figure, size) -> most seconds at this size.
        limit: Seconds of wall time after which a point is ended; larger sizes are then left out.
    """

    name: str
    unit: str
    sizes: tuple[int, ...]
    measure: Callable[[int, Path], Figures]
    quick: tuple[int, ...] = (10, 40)
    study: Callable[[int], tuple[int, int]] | None = None
    asked: Mapping[tuple[str, int], float] = field(default_factory=dict)
    limit: float = 240.0


TRIALS = (10, 100, 1_000, 10_000, 100_000)
DEVICES = (1, 10, 100, 1_000, 10_000)
TABLE = 10_000
"""Trials of the curves by devices."""


def of_trials(size: int) -> tuple[int, int]:
    return size, 8


def of_devices(size: int) -> tuple[int, int]:
    return TABLE, size


def read_by(*line: str) -> Callable[[int, Path], Figures]:
    """A command of the command line, for a study in the folder."""

    def measure(size: int, folder: Path) -> Figures:
        options = ("--html", str(folder / "report.html")) if line == ("report",) else ()
        return points.command(line[0], str(folder / "study"), *line[1:], *options)

    return measure


CURVES = (
    Curve("decisions by trials", "waiting trials", (10, 100, 1_000, 10_000, 50_000),
          lambda size, folder: points.decisions(size, 10_000, folder), (10, 100),
          asked={("first", 50_000): 1.0, ("event", 50_000): 0.010}),
    Curve("decisions by devices", "devices", DEVICES,
          lambda size, folder: points.decisions(50_000, size, folder), (),
          asked={("first", 10_000): 1.0, ("event", 10_000): 0.010}),
    Curve("reports", "reports", (10, 100, 1_000, 10_000, 100_000, 1_000_000), points.reports, (10, 1_000)),
    Curve("algorithm", "trials", TRIALS, lambda size, folder: points.asha(size)),
    Curve("resume", "trials", TRIALS, lambda size, folder: points.resume(folder / "study", folder),
          study=of_trials, asked={("first jobs", 100_000): 20.0}),
    Curve("trials", "trials", TRIALS, read_by("trials"), study=of_trials, asked={("trials", 10_000): 2.0}),
    Curve("status", "trials", TRIALS, read_by("status"), study=of_trials),
    Curve("best", "trials", TRIALS, read_by("best"), study=of_trials),
    Curve("report", "trials", TRIALS, read_by("report"), study=of_trials),
    Curve("status by devices", "devices", DEVICES, read_by("status"), (2,), study=of_devices),
    Curve("report by devices", "devices", DEVICES, read_by("report"), (2,), study=of_devices),
    Curve("page", "trials", TRIALS, lambda size, folder: points.page(folder / "study"), (10,), study=of_trials,
          asked={("view", 10_000): 1.5}),
    Curve("functions", "functions", (10, 100, 1_000, 10_000), points.functions, (4, 8),
          asked={("functions", size): 0.015 * size for size in (1_000, 10_000)}, limit=600.0),
)  # fmt: skip


def main() -> int:
    """Measure the curves, print each point as it comes, then the exponents, then all as JSON."""
    options = arguments()
    found: dict[str, dict[int, Figures]] = {}
    missed: list[str] = []
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
    for curve in CURVES:
        if curve.name not in options.curves:
            continue
        found[curve.name] = {}
        for size in curve.quick if options.quick else curve.sizes:
            figures = measured(curve, size, quick=options.quick)
            if figures is None:
                missed.append(f"{curve.name}: {size:,} {curve.unit} took more than {curve.limit:.0f} s, or failed")
                print(f"{missed[-1]}", flush=True)
                break
            found[curve.name][size] = figures
            shown = "".join(f"{name:>13} {value:9.4f}" for name, value in figures.items())
            print(f"{curve.name:20} {size:>9,} {curve.unit:15}{shown}", flush=True)
    exponents = {name: exponents_of(by_size) for name, by_size in found.items()}
    print(f"\n{'curve':20} {'figure':12} {'exponent':>9}")
    for name, slopes in exponents.items():
        for figure, slope in slopes.items():
            print(f"{name:20} {figure:12} {'flat' if slope is None else f'{slope:.2f}':>9}")
    if not options.quick:
        missed += faults(found, exponents)
    if options.gavel:
        missed += gavel()
    print(json.dumps({"curves": found, "exponents": exponents, "missed": missed}))
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [curve.name for curve in CURVES]
    parser.add_argument("--curves", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--gavel", action="store_true", help="simulate gavel_10k, too, which takes minutes")
    parser.add_argument("--quick", action="store_true", help="only that it runs: toy sizes; checks no figure")
    return parser.parse_args()


def measured(curve: Curve, size: int, *, quick: bool) -> Figures | None:
    """The figures of a point, taken in a process of its own; None if it fails or takes too long."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if curve.study is not None:
            trials, devices = curve.study(size)
            in_child(lambda: make_study(folder / "study", min(trials, 100) if quick else trials, devices), curve.limit)
        return in_child(lambda: _with_memory(lambda: curve.measure(size, folder)), curve.limit)


def _with_memory(measure: Callable[[], Figures]) -> Figures:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = measure()
    return {"mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024} | figures


def in_child(measure: Callable[[], Any], limit: float) -> Any:
    """What a function returns in a forked child, which leads a process group; None if it fails or reaches the limit."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        status = 1
        try:
            os.write(writer, json.dumps(measure()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    os.close(writer)
    due = time.monotonic() + limit
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < due:
        time.sleep(0.01)
    if ended[0] == 0:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with open(reader, "rb") as pipe:
        content = pipe.read() if ended[0] and ended[1] == 0 else b""
    return json.loads(content) if content else None


def exponents_of(by_size: Mapping[int, Figures]) -> dict[str, float | None]:
    """The exponent of each figure; None where it does not grow above its noise."""
    (_, least), *others = by_size.items() or [(0, {})]
    return {name: slope([(size, x[name] - least[name]) for size, x in others], FLOORS.get(name, FLOORS["seconds"]))
            for name in least}  # fmt: skip


def slope(given: list[tuple[int, float]], floor: float) -> float | None:
    """Of the least squares line through the logarithms of the points above the floor; None without two."""
    usable = [(math.log(size), math.log(value)) for size, value in given if value > floor]
    if len(usable) < 2:
        return None
    x, y = (fmean(values) for values in zip(*usable, strict=True))
    return sum((a - x) * (b - y) for a, b in usable) / sum((a - x) ** 2 for a, _ in usable)


def faults(
    found: Mapping[str, Mapping[int, Figures]], exponents: Mapping[str, Mapping[str, float | None]]
) -> Iterator[str]:
    """Say which exponents and figures are over what is asked."""
    for name, slopes in exponents.items():
        for figure, exponent in slopes.items():
            if exponent is not None and exponent > EXPONENT:
                yield f"{name}: the exponent of {figure} is {exponent:.2f}, asked at most {EXPONENT}"
    for curve in CURVES:
        for (figure, size), most in curve.asked.items():
            value = found.get(curve.name, {}).get(size, {}).get(figure)
            if value is not None and value > most:
                yield f"{curve.name}: {figure} of {size:,} {curve.unit} took {value:.3f} s, asked at most {most:g}"


def gavel() -> Iterator[str]:
    """Simulate gavel_10k to its end, and say what is wrong."""
    scenario = load(Path(__file__).parents[1] / "scenarios" / "gavel_10k.toml")
    began = time.process_time()
    result = replace(scenario, fuse=True, packing="cost", events=()).simulate("auto")
    seconds = time.process_time() - began
    ended, segments = len(result.completion), len(result.arrivals)
    print(f"gavel_10k: {ended:,} of {segments:,} segments ended, {seconds:.0f} s of CPU time", flush=True)
    if ended < segments or seconds > GAVEL_SECONDS:
        yield f"gavel_10k: {ended} of {segments} ended in {seconds:.0f} s, asked all in {GAVEL_SECONDS:.0f}"


if __name__ == "__main__":
    sys.exit(main())
