"""Functions that train nothing, for studies of programs; each is called in a process of its own."""

import atexit
import ctypes
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil

import shoal

_pool: ProcessPoolExecutor | None = None


def search(function: Any, directory: Path, space: Any = None, **arguments: Any) -> Any:
    """A study of one of these, by default of three configurations, with a budget of four reports each."""
    settings: dict[str, Any] = {"metric": "loss", "mode": "min", "algorithm": shoal.Grid(4), "devices": "cpu:2"}
    settings |= {"directory": directory / "study", "show_progress": False} | arguments
    return shoal.tune(function, {"slope": shoal.grid([1, 2, 3])} if space is None else space, **settings)


def curve(study: Any, trial: int) -> list[Any]:
    """All reports of a trial."""
    from shoal.journal.view import JournalView  # which the functions do not need in their processes

    with JournalView.read(study.directory) as journal:
        return journal.curve(trial)


def counted(config: Any) -> None:
    """Continues from what it kept; `slope` times the step is its loss."""
    state = shoal.checkpoint() / "step.txt"
    done = int(state.read_text()) if state.exists() else 0
    assert done == shoal.step()
    for step in range(done + 1, 1000):
        before(config, step)
        state.write_text(str(step))
        shoal.report({"loss": config["slope"] * step, "began": done}, step=step)


def before(config: Any, step: int) -> None:
    """Fail once, at a step; a file then records that the failure has happened."""
    if step != config.get("at"):
        return
    marker = Path(config["marker"])
    if marker.exists():
        return
    (shoal.checkpoint() / "step.txt").write_text("half of a")
    marker.write_text(str(os.getpid()))
    if config["fault"] == "kill the worker":
        os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait()
    elif config["fault"] == "kill the server":
        os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
        threading.Event().wait()
    elif config["fault"] == "kill itself":
        os.kill(os.getpid(), signal.SIGKILL)
    elif config["fault"] == "kill the engine":
        os.kill(int(Path(config["engine"]).read_text()), signal.SIGKILL)
        threading.Event().wait()


def asks_too_much(config: Any) -> None:
    shoal.report({"loss": config["width"]})


def keeps_nothing(config: Any) -> None:
    for step in range(1, 1000):
        shoal.report({"loss": config["slope"] * step, "own": step})


def keeps_now_and_then(config: Any) -> None:
    """Every third step."""
    state = shoal.checkpoint() / "step.txt"
    for step in range(shoal.step() + 1, 1000):
        if step % 3 == 0:
            state.write_text(str(step))
        kept = int(state.read_text()) if state.exists() else 0
        shoal.report({"loss": 1.0, "kept": kept}, step=step)


def ends_early(config: Any) -> None:
    for step in range(shoal.step(), 2):
        (shoal.checkpoint() / "step.txt").write_text(str(step))
        shoal.report({"loss": config["slope"] + step})


def raises(config: Any) -> None:
    if config["slope"] > 1:
        raise KeyError("no such thing")
    shoal.report({"loss": 1.0})


def silent(config: Any) -> None:
    if config["slope"] > 1:
        threading.Event().wait()
    shoal.report({"loss": 1.0})


def says_nothing(config: Any) -> None:
    pass


def says_words(config: Any) -> None:
    shoal.report({"loss": "low"})


def misnames(config: Any) -> None:
    shoal.report({"loss": 1.0} if config["slope"] > 1 else {3: 1.0})


def skips_steps(config: Any) -> None:
    for step in (1, 5):
        shoal.report({"loss": 1.0}, step=step)


def crashes(config: Any) -> None:
    ctypes.string_at(0)


def leaves_a_pool(config: Any) -> None:
    """Leaves worker processes and a thread, which sees whether exit handlers have been called before it ends."""
    global _pool
    _pool = ProcessPoolExecutor(1)
    called: list[Any] = []
    atexit.register(called.append, True)

    def look() -> None:
        time.sleep(0.3)
        Path(config["marker"]).write_text("exited" if called else "in order")

    threading.Thread(target=look).start()
    shoal.report({"loss": _pool.submit(abs, -1).result()})


def tidies_up(config: Any) -> None:
    """Says in a file how it was ended."""
    try:
        for _ in range(1000):
            shoal.report({"loss": 1.0})
    finally:
        Path(config["marker"]).write_text("tidy")


def surroundings(config: Any) -> None:
    config["slope"] = "a change of its own copy"
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SHOAL_TRIAL", "SHOAL_SEED")
    (shoal.checkpoint() / "environment.txt").write_text("\n".join(os.environ[name] for name in names))
    shoal.report({"loss": 1.0})


def falls(config: Any) -> None:
    """Its loss falls towards a floor; it continues where it was."""
    state = shoal.checkpoint() / "step.txt"
    for step in range(int(state.read_text()) if state.exists() else 0, 1000):
        state.write_text(str(step + 1))
        loss = config["start"] * config["rate"] ** step
        shoal.report({"score": -loss, "loss": loss}, step=step + 1)


FALLS = """
import json, sys
from pathlib import Path
start, rate, state = float(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]) / "step.txt"
done = int(state.read_text()) if state.exists() else 0
if done:
    print(json.dumps({"loss": start * rate ** (done - 1), "step": done}), flush=True)
for step in range(done, 1000):
    state.write_text(str(step + 1))
    print(json.dumps({"loss": start * rate**step, "step": step + 1}), flush=True)
"""
"""The same as a command that knows nothing of Shoal."""
