"""What teaches most on a GPU that is there for minutes: measurements in a fixed order, as many as there is time for.

    python tools/gpu.py --minutes 9       the next ones: those that are missing, or older than the code they measure
    python tools/gpu.py --minutes 0       what is there, and the page anew from it; no GPU is needed
    python tools/gpu.py --dry-run         all of them on a CPU, at toy size, into OUT/dry-run or a temporary folder

`gpu_measurements.py` lists them, `session.py` takes them. Results are in docs/benchmarks/gpu, and the page
docs/benchmarks/gpu.md shows them. Where the environment names a folder OUT, new files go to OUT/gpu and the page of all
to OUT/gpu.md; the files are to be copied to docs/benchmarks/gpu afterwards.

It needs no network and no environment of its own: torch, numpy, pytest and what `src/shoal` imports, in the Python that
runs it. A measurement that lacks a package is not begun, and the package is named. The exit status is 1 if one of those
that were begun has no result, else 0. Without a GPU it says so, and makes the page anew.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_measurements import MEASUREMENTS
from session import Measurement, Result, Session, last_line, write

__all__ = ["environment_of_measurements", "main", "page", "probe"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "benchmarks"
MINUTES = 40.0
PROBE_SECONDS = 60.0
BEGIN, END = "<!-- measured: tools/gpu.py writes from here -->", "<!-- measured: to here -->"

PROBE = """
import json, platform, torch
if not torch.cuda.is_available():
    raise SystemExit(3)
found = torch.cuda.get_device_properties(0)
torch.zeros(1, device="cuda").item()
try:
    import pynvml
    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
except Exception as error:
    driver = f"unknown ({error})"
print(json.dumps({
    "device": found.name, "devices": torch.cuda.device_count(), "gib": round(found.total_memory / 2**30, 1),
    "driver": driver, "cuda": torch.version.cuda, "torch": torch.__version__, "python": platform.python_version(),
}))
"""


def probe() -> Mapping[str, Any] | str:
    """What the GPU is, and the versions; or why there is none that can be used, in words."""
    if find_spec("torch") is None:
        if not list(Path("/dev").glob("nvidia[0-9]*")):
            return "no GPU here: there is no /dev/nvidia0, and torch, which would look for others, is not installed"
        raise SystemExit(
            f"there is a GPU, but torch is not installed for {sys.executable}; tests and benchmarks need it"
        )
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no GPU can be used: torch has not found out in {PROBE_SECONDS:.0f} s"
    if done.returncode == 3:
        return "no GPU here: torch sees no CUDA device"
    if done.returncode:
        return f"no GPU can be used: {last_line(done.stderr)}"
    found: dict[str, Any] = json.loads(last_line(done.stdout))
    return found


def page(text: str, results: Mapping[str, Result], measurements: Sequence[Measurement]) -> str:
    """The page with a table of all results, and what each of them printed, between its two marks.

    Args:
        text: of the page as it is; what is outside of the marks stays.
        results: by name.
        measurements: in the order of the page.
    """
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"the page has no lines {BEGIN!r} and {END!r}, between which the results are written")
    shown = [(each, results[each.name]) for each in measurements if each.name in results]
    left = [each.title for each in measurements if each.name not in results]
    lines = ["| measurement | outcome | seconds | date | commit | device | missed |", "|---|---|---:|---|---|---|---|"]
    for each, result in shown:
        missed = "; ".join(result["figures"].get("missed", [])) or result["reason"]
        lines.append(
            f"| {each.title} | {result['outcome']} | {result['seconds']:.0f} | {result['date']} | {result['commit']} | "
            f"{result['machine']['device']} | {missed.replace('|', '/')} |"
        )
    if not shown:
        lines = []
    if left:
        lines += ["", f"Not measured yet: {'; '.join(left)}."]
    for each, result in shown:
        command = " ".join(f'"{word}"' if " " in word else word for word in result["command"])
        lines += ["", f"### {each.title}", "", f"{_machine(result['machine'])}", "", f"`python {command}`", ""]
        lines += ["```text", *(line.replace("```", "'''") for line in result["output"]), "```"]
    return f"{before}{BEGIN}\n\n{chr(10).join(lines).strip()}\n\n{END}{after}"


def _machine(found: Mapping[str, Any]) -> str:
    return (
        f"{found['devices']} x {found['device']}, {found['gib']} GiB; driver {found['driver']}, CUDA {found['cuda']}, "
        f"torch {found['torch']}, Python {found['python']}, {found['cores']} cores{found['note']}."
    )


def write_pictures(folder: Path) -> Path:
    """Random pictures in the place of CIFAR-10, of its shape, for benchmarks that measure time."""
    import numpy as np

    rng, path = np.random.default_rng(0), folder / "cifar10_5k_1k.npz"
    data = {}
    for name, count in (("train", 5000), ("test", 1000)):
        data[f"x_{name}"] = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        data[f"y_{name}"] = rng.integers(0, 10, count, dtype=np.uint8)
    np.savez(path, **data)
    return path


def environment_of_measurements(folder: Path) -> tuple[dict[str, str], str]:
    """The variables of the measurements, and what the page should say of them.

    Args:
        folder: a temporary one, for files of the measurements.
    """
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    real = ROOT.parent / "shared" / "data" / "cifar10_5k_1k.npz"
    if real.exists() or "CIFAR10" in os.environ or find_spec("numpy") is None:
        return variables, ""
    variables["CIFAR10"] = str(write_pictures(folder))
    return variables, "; CIFAR-10 is not on this machine: pictures are random ones of its shape"


def main(
    arguments: Sequence[str] | None = None,
    measurements: Sequence[Measurement] = MEASUREMENTS,
    look: Callable[[], Mapping[str, Any] | str] = probe,
) -> int:
    """Take measurements; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all measurements together")
    parser.add_argument("--dry-run", action="store_true", help="all of them on a CPU, at toy size")
    options = parser.parse_args(arguments)
    out = os.environ.get("OUT")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(out or (temporary if options.dry_run else DOCS))
        place, known = (place / "dry-run", []) if options.dry_run else (place, [DOCS / "gpu"])

        def write_page(results: Mapping[str, Result]) -> None:
            write(place / "gpu.md", page((DOCS / "gpu.md").read_text("utf-8"), results, measurements))

        session = Session(measurements, known, place / "gpu", write_page, look)
        variables, note = environment_of_measurements(Path(temporary))
        here = {"cores": os.cpu_count(), "note": note}
        if options.dry_run:
            session.look = dict
            toy = {"device": "CPU", "devices": 1, "gib": 0, "driver": "none", "cuda": "none", "torch": "any"}
            machine = {**toy, "python": platform.python_version(), **here}
            return session.run(options.minutes, machine, variables | {"CUDA_VISIBLE_DEVICES": ""}, toy=True)
        found = look() if options.minutes > 0 else "0 minutes"
        if isinstance(found, str):
            print(f"{found}; nothing is measured")
            session.tell(0)
            write_page(session.results())
            return 0
        return session.run(options.minutes, {**found, **here}, variables, toy=False)


if __name__ == "__main__":
    sys.exit(main())
