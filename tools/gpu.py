"""All that needs an NVIDIA GPU: the tests marked `gpu`, then fusion, placement and packs, each with a budget of time.

    python tools/gpu.py                       everything, in at most 40 minutes
    python tools/gpu.py --minutes 9 --parts steps graphs mps
    python tools/gpu.py --list                the parts

It needs no network and no environment of its own: torch, numpy, pytest and what `src/shoal` imports, in the Python that
runs it. A part that lacks a package is not run, and the package is named. Each part is a process, killed when its
budget is over; what a part leaves of its budget goes to those after it. A part that fails does not keep the next from
running.

The results are `gpu.md`, written after each part, and `gpu.log`, all output, in the folder that OUT in the environment
names, else in docs/benchmarks. The exit status is 1 if a part failed, else 0. Without a GPU there is nothing to do: it
says so, and the status is 0.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

__all__ = ["PARTS", "Part", "Result", "main", "markdown", "probe", "run"]

ROOT = Path(__file__).parents[1]
MINUTES = 40.0
LINES = 160
"""Lines of a benchmark's output that the page shows."""
SUMMARY_LINES = 25
KILL_SECONDS = 10.0
SHARE = 0.75
"""Of its budget, after which a benchmark begins nothing new."""
PACKAGES = {"pynvml": "nvidia-ml-py", "PIL": "pillow"}
"""Module -> package, where their names differ."""
CORE = ("torch", "numpy", "cloudpickle", "msgspec", "psutil", "pynvml", "rich")
TESTS = (*CORE, "pytest", "hypothesis", "typer")
PYTEST = (
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-W",
    "default",
    "--tb",
    "short",
    "--durations",
    "5",
    "-m",
    "gpu",
)
GRAPHS = "captured or graph or record or compiled"


@dataclass(frozen=True)
class Part:
    """Something to run.

    Args:
        name: as `--parts` takes it.
        title: on the page.
        seconds: of `MINUTES`.
        command: arguments of Python; "{seconds}" stands for `SHARE` of the budget.
        needs: modules.
        processes: of tests side by side, where pytest-xdist is installed.
    """

    name: str
    title: str
    seconds: int
    command: tuple[str, ...]
    needs: tuple[str, ...] = CORE
    processes: int = 1

    @property
    def is_test(self) -> bool:
        """Whether it is a run of pytest."""
        return "pytest" in self.command


@dataclass(frozen=True)
class Result:
    """What came of a part.

    Args:
        part: that was run.
        outcome: "passed", "skipped", "failed", "cut off" at its budget, or "not run".
        seconds: that it took.
        budget: in seconds.
        output: of both streams.
        reason: for "failed", "cut off" and "not run", in words.
    """

    part: Part
    outcome: str
    seconds: float = 0.0
    budget: float = 0.0
    output: str = ""
    reason: str = ""

    @property
    def bad(self) -> bool:
        """Whether the exit status is to tell of it."""
        return self.outcome not in ("passed", "skipped")


def _tests(name: str, title: str, seconds: int, *arguments: str, processes: int = 4) -> Part:
    return Part(name, title, seconds, (*PYTEST, *arguments), TESTS, processes)


def _benchmark(name: str, title: str, seconds: int, *arguments: str, needs: tuple[str, ...] = CORE) -> Part:
    return Part(name, title, seconds, ("-u", *arguments), needs)


FUSION = (
    "benchmarks/fusion.py", "--budget", "{seconds}", "--models", "mlp", "transformer", "resnet18",
    "--sizes", "1", "8", "64", "512", "--seconds", "0.6", "--rounds", "3",
)  # fmt: skip
PARTS = (
    _tests("steps", "Fused steps", 60, "tests/gpu/test_gpu_steps.py", "-k", f"not ({GRAPHS})"),
    _tests("graphs", "CUDA graphs and compiled steps", 60, "tests/gpu/test_gpu_steps.py", "-k", GRAPHS),
    _tests("mps", "Worker processes and MPS", 90, "tests/gpu/test_gpu_jobs.py", processes=1),
    _tests(
        "suspension", "Memory and suspension", 60, "tests/gpu/test_gpu_memory.py",
        "tests/worker/test_suspend_resume.py", processes=1,
    ),
    _tests("packs", "Packs and streams", 60, "tests/gpu/test_gpu_packs.py", processes=1),
    _tests("devices", "Listing, MIG, conditions, use", 60, "tests/gpu/test_gpu_devices.py", processes=1),
    _tests("rules", "Optimizers and rules of fusion", 60, "tests/fuse/test_optim.py", "tests/fuse/test_rules.py"),
    _tests("studies", "Whole studies", 120, "tests/gpu/test_gpu_studies.py"),
    _benchmark("fusion", "Fusion, float32", 480, *FUSION),
    _benchmark("fusion-bf16", "Fusion, bfloat16", 240, *FUSION, "--dtype", "bfloat16"),
    _benchmark(
        "placement", "Placement: jobs of HyperSack's first search space", 420, "benchmarks/placement.py",
        "--devices", "cuda:0", "--batch-sizes", "64", "--jobs", "24", "--samples", "2500", "--epochs", "1",
        "--rows", "plain processes", "one job per device", "concurrent", "mps + ffd", "fusion", "fusion + packing",
        needs=(*CORE, "PIL"),
    ),
    _benchmark(
        "packing", "Packs", 180, "benchmarks/packing.py", "--device", "cuda:0", "--parts", "ablation", "--pipelines",
        "tensors", "--cases", "none", "model", "all", "--sizes", "2", "8", "--rounds", "4", "--seconds", "4",
        needs=(*CORE, "PIL"),
    ),
)  # fmt: skip

PROBE = """
import json, platform, torch
if not torch.cuda.is_available():
    raise SystemExit(3)
found = torch.cuda.get_device_properties(0)
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
    """What the GPU is, and the versions; or why there is none, in words."""
    if find_spec("torch") is None:
        if not list(Path("/dev").glob("nvidia[0-9]*")):
            return "no GPU here: there is no /dev/nvidia0, and torch, which would look for others, is not installed"
        raise SystemExit(
            f"there is a GPU, but torch is not installed for {sys.executable}; tests and benchmarks need it"
        )
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        return "no GPU here: torch sees no CUDA device"
    if done.returncode:
        raise SystemExit(f"torch cannot say whether there is a GPU:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(part: Part, budget: float, log: IO[str], environment: Mapping[str, str]) -> Result:
    """Run a part in a process of its own; kill it, and what it has started, when its budget is over.

    Args:
        part: to run.
        budget: in seconds.
        log: for its output.
        environment: variables beside those of this process.
    """
    missing = [PACKAGES.get(module, module) for module in part.needs if find_spec(module) is None]
    if missing:
        return Result(part, "not run", budget=budget, reason=f"needs {', '.join(missing)}, not installed here")
    command = [sys.executable, *(word.replace("{seconds}", str(int(SHARE * budget))) for word in part.command)]
    if part.processes > 1 and find_spec("xdist") is not None:
        command += ["-n", str(part.processes)]
    log.write(f"\n=== {part.name}: {' '.join(command)}\n")
    log.flush()
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(budget)
        except subprocess.TimeoutExpired:
            status = None
        _end_group(process)
        seconds = time.monotonic() - began
        output.seek(0)
        text = output.read()
    log.write(text)
    log.flush()
    if status is None:
        return Result(part, "cut off", seconds, budget, text, f"not done in {budget:.0f} s")
    if status:
        return Result(part, "failed", seconds, budget, text, f"exit status {status}")
    last = text.strip().splitlines()[-1:] or [""]
    skipped = part.is_test and "skipped" in last[0] and "passed" not in last[0]
    return Result(part, "skipped" if skipped else "passed", seconds, budget, text)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the processes of a part's session, which lets them end what they started, then kill what is left."""
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


def markdown(machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The page: what it ran on, a table of the parts, and what each of them printed."""
    lines = [
        "# On a GPU",
        "",
        f"{machine['date']}: {machine['devices']} x {machine['device']}, {machine['gib']} GiB; "
        f"driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}, "
        f"Python {machine['python']}, {machine['cores']} cores of {machine['processor']}. `make gpu`"
        + machine.get("note", ""),
        "",
        "| part | outcome | seconds | budget | |",
        "|---|---|---:|---:|---|",
    ]
    for each in results:
        said = each.reason or (_last(each.output) if each.part.is_test else "")
        lines.append(f"| {each.part.title} | {each.outcome} | {each.seconds:.0f} | {each.budget:.0f} | {said} |")
    for each in results:
        shown = _shown(each)
        if shown:
            lines += [
                "",
                f"## {each.part.title}",
                "",
                f"`python {' '.join(each.part.command)}`",
                "",
                "```",
                *shown,
                "```",
            ]
    return "\n".join(lines) + "\n"


def _last(output: str) -> str:
    return (output.strip().splitlines() or [""])[-1].strip("= ")


def _shown(result: Result) -> list[str]:
    """The tables of a benchmark, or the summary of tests that did not all pass."""
    lines = result.output.strip().splitlines()
    if not result.part.is_test:
        return lines[-LINES:]
    if not result.bad:
        return [line for line in lines if line.startswith("SKIPPED")]
    begins = max((number for number, line in enumerate(lines) if "short test summary" in line), default=0)
    return lines[max(begins, len(lines) - SUMMARY_LINES) :]


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


def environment_of_parts(folder: Path) -> tuple[dict[str, str], str]:
    """The variables of the parts, and what the page should say of them.

    Args:
        folder: a temporary one, for files of the parts.
    """
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    real = ROOT.parent / "shared" / "data" / "cifar10_5k_1k.npz"
    if real.exists() or "CIFAR10" in os.environ or find_spec("numpy") is None:
        return variables, ""
    variables["CIFAR10"] = str(write_pictures(folder))
    return variables, "; CIFAR-10 is not on this machine: placement and packs train on random pictures of its shape"


def main(
    arguments: Sequence[str] | None = None,
    parts: Sequence[Part] = PARTS,
    look: Callable[[], Mapping[str, Any] | str] = probe,
) -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--parts", nargs="*", choices=[part.name for part in parts], help="some of them; by default all"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--list", action="store_true", help="name the parts, and run none")
    options = parser.parse_args(arguments)
    chosen = [part for part in parts if not options.parts or part.name in options.parts]
    if options.list:
        for part in chosen:
            print(f"{part.name:12} {part.seconds:4} s  {part.title}")
        return 0
    machine = look()
    if isinstance(machine, str):
        print(f"{machine}; nothing to do")
        return 0
    here = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    folder = options.output or Path(os.environ.get("OUT") or ROOT / "docs" / "benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        variables, note = environment_of_parts(Path(temporary))
        results = run_all(chosen, 60 * options.minutes, {**machine, **here, "note": note}, folder, variables)
    bad = [f"{each.part.name}: {each.outcome}, {each.reason}" for each in results if each.bad]
    print(f"{folder / 'gpu.md'}: {len(results) - len(bad)} of {len(results)} parts passed")
    for line in bad:
        print(line)
    return 1 if bad else 0


def run_all(
    parts: Sequence[Part], seconds: float, machine: Mapping[str, Any], folder: Path, environment: Mapping[str, str]
) -> list[Result]:
    """Run one part after another, and write the page after each.

    Args:
        parts: to run.
        seconds: for all of them.
        machine: for the head of the page.
        folder: of page and log.
        environment: variables of the parts.
    """
    results: list[Result] = []
    end = time.monotonic() + seconds
    with (folder / "gpu.log").open("w", encoding="utf-8") as log:
        for number, part in enumerate(parts):
            budget = (end - time.monotonic()) * part.seconds / sum(each.seconds for each in parts[number:])
            print(f"{part.name}: at most {budget:.0f} s ...", flush=True)
            result = run(part, max(0.0, budget), log, environment)
            results.append(result)
            print("\n".join(_shown(result)[-SUMMARY_LINES:]), flush=True)
            print(f"{part.name}: {result.outcome} {result.reason} ({result.seconds:.0f} s)", flush=True)
            (folder / "gpu.md").write_text(markdown(machine, results), encoding="utf-8")
    return results


if __name__ == "__main__":
    sys.exit(main())
