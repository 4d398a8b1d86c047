"""What teaches most on a GPU that is there for minutes: measurements in a fixed order, as many as there is time for.

    python tools/gpu.py --minutes 9       the next ones: those that are missing, or older than the code they measure
    python tools/gpu.py --minutes 0       what is there, and the page anew from it; no GPU is needed
    python tools/gpu.py --dry-run         all of them on a CPU, at toy size, into OUT/dry-run or a temporary folder

`gpu_measurements.py` lists them. Each is a process with a time limit of its own, killed with all that it started when
that is over. Its result is a file NAME.json, written as soon as it is there: what was measured, by which command, of
which commit, on which device, with which versions, and when. Files are in docs/benchmarks/gpu, and the page
docs/benchmarks/gpu.md shows them. Where the environment names a folder OUT, new files go to OUT/gpu and the page of all
to OUT/gpu.md; the files are to be copied to docs/benchmarks/gpu afterwards.

A measurement is older than its code if the files that it depends on are not those of its result, by a hash of their
contents; so a copy of the tree without git will do. One that failed, or took longer than its limit, is not tried again
before its code changes. One that was cut off since the minutes were over is. One that fails since the GPU has gone
leaves no result, and none is begun after it.

It needs no network and no environment of its own: torch, numpy, pytest and what `src/shoal` imports, in the Python that
runs it. A measurement that lacks a package is not begun, and the package is named. The exit status is 1 if one of those
that were begun has no result, else 0. Without a GPU it says so, and makes the page anew.
"""

import argparse
import ctypes
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_measurements import MEASUREMENTS, Measurement

__all__ = ["code_of", "environment_of_measurements", "figures_of", "main", "page", "probe", "take"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "benchmarks"
MINUTES = 40.0
LINES, LINE_LENGTH = 120, 240
"""Of the output, those that a result keeps: its last ones."""
KILL_SECONDS, PROBE_SECONDS = 10.0, 60.0
SHARE = 0.9
"""Of its limit, after which a benchmark that takes a budget begins nothing new."""
BEGIN, END = "<!-- measured: tools/gpu.py writes from here -->", "<!-- measured: to here -->"
Result = Mapping[str, Any]
"""What a file says; see `take`."""

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
        return f"no GPU can be used: {_last(done.stderr)}"
    found: dict[str, Any] = json.loads(_last(done.stdout))
    return found


def code_of(paths: Iterable[str]) -> str:
    """A hash of the Python files below some paths of a tree: of their names and contents.

    Raises:
        FileNotFoundError: There is no such path.
    """
    found: set[Path] = set()
    for each in paths:
        path = ROOT / each
        if not path.exists():
            raise FileNotFoundError(f"there is no {each} in {ROOT}, on which a measurement depends")
        found |= {path} if path.is_file() else set(path.rglob("*.py"))
    digest = hashlib.sha256()
    for path in sorted(found):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(ROOT)} {content}\n".encode())
    return digest.hexdigest()


def commit() -> str:
    """The commit of the tree, with "+" if it has changes; "" without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def take(
    measurement: Measurement, command: Sequence[str], limit: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Measure in a process of its own; kill it, and what it has started, when its time is over.

    Args:
        measurement: to take.
        command: of it, its own or the quick one.
        limit: in seconds.
        environment: variables beside those of this process.

    Returns:
        "outcome" ("done", "failed", "cut off"), "reason" in words unless it is done, "figures" (its JSON object, with
        "missed"), "output" (lines), "seconds", "limit", "command" and "code".
    """
    code = code_of(measurement.code)
    words = [word.replace("{seconds}", str(int(SHARE * limit))) for word in command]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", *words], cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
        status: int | None = None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_group(process)
        seconds = time.monotonic() - began
        output.seek(0)
        lines = output.read().strip().splitlines()
    figures = figures_of("\n".join(lines))
    outcome, reason = "done", ""
    if status is None:
        outcome, reason, figures = "cut off", f"not done in {limit:.0f} s", None
    elif figures is None or status not in (0, 1):
        outcome, reason, figures = "failed", f"exit status {status}: {_last(chr(10).join(lines))[:LINE_LENGTH]}", None
    kept = lines[:-1] if figures is not None else lines
    return {
        "outcome": outcome,
        "reason": reason,
        "seconds": round(seconds, 1),
        "limit": round(limit),
        "command": words,
        "code": code,
        "figures": figures or {},
        "output": [line[:LINE_LENGTH] for line in kept[-LINES:]],
    }


def _die_with_parent() -> None:
    """Have this process, on Linux, killed when its parent dies, so that none goes on after a kill of the tool."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the processes of a measurement's session, so that they end what they started, and kill what is left."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def figures_of(output: str) -> dict[str, Any] | None:
    """The JSON object in the last line of an output, if it is one."""
    try:
        found = json.loads(_last(output))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def read(folders: Iterable[Path]) -> dict[str, Result]:
    """The results in some folders by name; those of later folders count."""
    return {
        file.stem: json.loads(file.read_text("utf-8")) for folder in folders for file in sorted(folder.glob("*.json"))
    }


def write(path: Path, text: str) -> None:
    """Write a file at once, so that a kill leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def why(measurement: Measurement, result: Result | None) -> str:
    """Why a measurement is to be taken, in words; "" if it is not."""
    if result is None:
        return "missing"
    if result["code"] != code_of(measurement.code):
        return "older than its code"
    if result["outcome"] == "cut off" and result["limit"] < measurement.most:
        return "cut off before its time"
    return ""


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

    rng, path = np.random.default_rng(0), folder / "pictures.npz"
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


@dataclass
class Session:
    """One run of the tool.

    Args:
        measurements: in their order.
        known: folders of earlier results.
        folder: of new results.
        page: of all results, to be written.
        look: finds the GPU.
        clock: seconds that only grow.
    """

    measurements: Sequence[Measurement]
    known: Sequence[Path]
    folder: Path
    page: Path
    look: Callable[[], Mapping[str, Any] | str]
    clock: Callable[[], float] = time.monotonic

    def results(self) -> dict[str, Result]:
        return read((*self.known, self.folder))

    def write_page(self) -> None:
        write(self.page, page((DOCS / "gpu.md").read_text("utf-8"), self.results(), self.measurements))

    def tell(self, minutes: float) -> list[Measurement]:
        """Say what is there and what is to be taken; return the latter."""
        found, todo = self.results(), []
        for each in self.measurements:
            reason = why(each, found.get(each.name))
            lacks = each.missing() if reason else []
            if reason and not lacks:
                todo.append(each)
            state = reason or f"{found[each.name]['outcome']} on {found[each.name]['date']}"
            needs = f", but needs {', '.join(lacks)}, not installed here" if lacks else ""
            print(f"{each.name:15} {each.least:4} to {each.most:3} s  {state}{needs}")
        print(f"to take in {minutes:g} minutes: {', '.join(each.name for each in todo) or 'nothing'}", flush=True)
        return todo

    def run(self, minutes: float, machine: Mapping[str, Any], environment: Mapping[str, str], toy: bool) -> int:
        """Take the measurements that fit into the minutes; returns the exit status."""
        end, tree = self.clock() + 60 * minutes, commit()
        todo, bad, left = self.tell(minutes), [], []
        while todo:
            each = todo.pop(0)
            limit = min(float(each.most), end - self.clock())
            if limit < each.least:
                left.append(f"{each.name} (needs {each.least} s)")
                continue
            print(f"{each.name}: at most {limit:.0f} s ...", flush=True)
            result = take(each, each.quick if toy else each.command, limit, environment)
            if not toy or result["outcome"] != "done":
                print("\n".join(result["output"]), flush=True)
            gone = self.look() if result["outcome"] != "done" else {}
            if isinstance(gone, str):
                print(f"{each.name}: {result['outcome']}, and its result does not count: {gone}")
                bad.append(each.name)
                left += [one.name for one in (each, *todo)]
                break
            bad += [each.name] if result["outcome"] != "done" else []
            print(f"{each.name}: {result['outcome']} {result['reason']} ({result['seconds']:.0f} s)", flush=True)
            if why(each, result) and self.results().get(each.name, result)["outcome"] == "done":
                continue  # the older result has figures, and this one is taken again
            result = {"date": time.strftime("%Y-%m-%d"), "commit": tree, "machine": machine, **result}
            write(self.folder / f"{each.name}.json", json.dumps(result, indent=1) + "\n")
            self.write_page()
        print(f"{self.page}; left: {', '.join(left) or 'nothing'}; without a result: {', '.join(bad) or 'none'}")
        return 1 if bad else 0


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
        session = Session(measurements, known, place / "gpu", place / "gpu.md", look)
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
            session.write_page()
            return 0
        return session.run(options.minutes, {**found, **here}, variables, toy=False)


if __name__ == "__main__":
    sys.exit(main())
