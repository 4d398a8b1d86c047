"""Takes measurements one after another while minutes last, and loses no result: `gpu.py` and `experiments.py` use it.

Each measurement is a process with a time limit of its own, killed with all that it started when that is over. Its
result is a file NAME.json, written as soon as it is there: what was measured, by which command, of which commit, on
which machine, with which versions, and when; "before" is the result of the last other day.

A measurement is older than its code if the files that it depends on are not those of its result, by a hash of their
contents; so a copy of the tree without git will do. One that failed, or took longer than its limit, is not tried again
before its code changes. One that was cut off since the minutes were over is. One that fails since the machine has lost
its device leaves no result, and none is begun after it.
"""

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from papers.measurement import Measurement  # noqa: E402

__all__ = ["Measurement", "Result", "Session", "code_of", "figures_of", "last_line", "read", "take", "why", "write"]

LINES, LINE_LENGTH = 120, 240
"""Of the output, those that a result keeps: its last ones."""
KILL_SECONDS = 10.0
SHARE = 0.9
"""Of its limit, after which a benchmark that takes a budget begins nothing new."""
Result = Mapping[str, Any]
"""What a file says; see `take`."""


def code_of(paths: Iterable[str]) -> str:
    """A hash of the files below some paths of a tree: of their names and contents.

    Raises:
        FileNotFoundError: There is no such path.
    """
    found: set[Path] = set()
    for each in paths:
        path = ROOT / each
        if not path.exists():
            raise FileNotFoundError(f"there is no {each} in {ROOT}, on which a measurement depends")
        files = [path] if path.is_file() else path.rglob("*")
        found |= {file for file in files if file.is_file() and file.suffix != ".pyc"}
    digest = hashlib.sha256()
    for path in sorted(found):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(ROOT)} {content}\n".encode())
    return digest.hexdigest()


def commit() -> str:
    """The commit of the tree, with "+" if it has changes but those of documents; "" without git."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)

    try:
        named = git("rev-parse", "--short=12", "HEAD")
    except FileNotFoundError:
        return ""
    if named.returncode:
        return ""
    return named.stdout.strip() + "+" * bool(git("status", "--porcelain", "--", ".", ":!docs").stdout)


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
    with tempfile.NamedTemporaryFile() as output:
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
            seconds = time.monotonic() - began
            lines = Path(output.name).read_text("utf-8", "replace").strip().splitlines()
            _end_group(process)  # what it has left running may print more, which is no part of the result
    figures = figures_of("\n".join(lines))
    outcome, reason = "done", ""
    if status is None:
        outcome, reason, figures = "cut off", f"not done in {limit:.0f} s", None
    elif figures is not None and "skipped" in figures:
        outcome, reason, figures = "failed", f"skipped: {figures['skipped']}", None
    elif figures is None or status not in (0, 1):
        outcome, reason, figures = (
            "failed",
            f"exit status {status}: {last_line(chr(10).join(lines))[:LINE_LENGTH]}",
            None,
        )
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
        found = json.loads(last_line(output))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def last_line(text: str) -> str:
    """The last line of a text that is not empty."""
    return (text.strip().splitlines() or [""])[-1]


def read(folders: Iterable[Path]) -> dict[str, Result]:
    """The results in some folders by name; those of later folders count."""
    return {file.stem: _read(file) for folder in folders for file in sorted(folder.glob("*.json"))}


def _read(file: Path) -> Result:
    try:
        found: Result = json.loads(file.read_text("utf-8"))
        _ = found["outcome"], found["date"], found["code"], found["machine"], found["figures"]
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{file} is not the result of a measurement ({error!r}); delete it") from error
    return found


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


@dataclass
class Session:
    """One run of a tool.

    Args:
        measurements: in their order.
        known: folders of earlier results.
        folder: of new results.
        write_page: shows all results, by name.
        look: finds the device; words where there is none.
        clock: seconds that only grow.
        again: whether to take one again that has this result.
    """

    measurements: Sequence[Measurement]
    known: Sequence[Path]
    folder: Path
    write_page: Callable[[Mapping[str, Result]], None]
    look: Callable[[], Mapping[str, Any] | str]
    clock: Callable[[], float] = time.monotonic
    again: Callable[[Result], bool] = lambda result: False

    def results(self) -> dict[str, Result]:
        """All results that there are, by name."""
        return read((*self.known, self.folder))

    def tell(self, minutes: float) -> list[Measurement]:
        """Say what is there and what is to be taken; return the latter."""
        found, todo = self.results(), []
        for each in self.measurements:
            result = found.get(each.name)
            reason = why(each, result)
            if result is not None and self.again(result):
                reason = reason or "again"
            lacks = each.missing() if reason else []
            if reason and not lacks:
                todo.append(each)
            state = reason or f"{found[each.name]['outcome']} on {found[each.name]['date']}"
            needs = f", but needs {', '.join(lacks)}, not installed here" if lacks else ""
            print(f"{each.name:15} {each.least:4} to {each.most:4} s  {state}{needs}")
        print(f"to take in {minutes:g} minutes: {', '.join(each.name for each in todo) or 'nothing'}", flush=True)
        return todo

    def run(self, minutes: float, machine: Mapping[str, Any], environment: Mapping[str, str], toy: bool) -> int:
        """Take the measurements that fit into the minutes; returns the exit status."""
        end, tree = self.clock() + 60 * minutes, commit()
        todo, bad, left = self.tell(minutes), [], []
        while todo:
            known = self.results()
            expected = sum(known.get(each.name, {}).get("seconds", each.least) for each in todo)
            each = todo.pop(0)
            limit = min(float(each.most), end - self.clock())
            if limit < each.least:
                left.append(f"{each.name} (needs {each.least} s)")
                continue
            print(
                f"{each.name}: at most {limit:.0f} s; all that is left, about {expected / 60:.0f} minutes", flush=True
            )
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
            older = known.get(each.name)
            if why(each, result) and older is not None and older["outcome"] == "done":
                continue  # the older result has figures, and this one is taken again
            result = {"date": time.strftime("%Y-%m-%d"), "commit": tree, "machine": machine, **result}
            if before := _of_another_day(older, result["date"]):
                result["before"] = {name: before[name] for name in ("date", "commit", "machine", "figures")}
            write(self.folder / f"{each.name}.json", json.dumps(result, indent=1) + "\n")
            self.write_page(self.results())
        print(f"left: {', '.join(left) or 'nothing'}; without a result: {', '.join(bad) or 'none'}")
        return 1 if bad else 0


def _of_another_day(older: Result | None, today: str) -> Result | None:
    """The last result with figures of another day, among an older one and the one before it."""
    while older is not None and (older["date"] == today or not older["figures"]):
        older = older.get("before")
    return older
