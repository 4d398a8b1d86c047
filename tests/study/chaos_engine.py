"""The engine of a study that is disturbed: `python chaos_engine.py DIRECTORY PLACE TRIALS`, also after each kill."""

import os
import sys
from pathlib import Path
from typing import Any

import shoal
from shoal.core.errors import JournalError
from shoal.programs.opaque import Command

PROGRAM = Path(__file__).with_name("chaos_command.py")
UNDISTURBED = "undisturbed"
"""Name of the directory of the study that is left alone."""
CHECKPOINT_SECONDS = 0.2
NUMBERS = {"lr": shoal.loguniform(1e-3, 1.0), "momentum": shoal.uniform(0.0, 0.9)}


def descent(config: Any) -> None:
    """In a process of its own, so it imports what it needs."""
    import json
    import time

    import shoal

    kept = shoal.checkpoint() / "state.json"
    x, speed = json.loads(kept.read_text()) if kept.exists() else (10.0, 0.0)
    for step in range(shoal.step() + 1, 10):
        time.sleep(0.15)
        speed = config["momentum"] * speed - config["lr"] * 2 * x
        x += speed
        kept.write_text(json.dumps((x, speed)))
        shoal.report({"loss": x * x}, step=step)


def searched(place: str, directory: Path, trials: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """What is searched, in which space, and more arguments of `tune`; only an engine of tasks imports torch."""
    halving = {"metric": "loss", "devices": "cpu:2", "algorithm": shoal.SuccessiveHalving(trials, 9, eta=3)}
    if place == "function":
        return descent, NUMBERS, halving
    if place == "command":
        line = (sys.executable, str(PROGRAM), "{lr}", "{momentum}", "{directory}")
        return Command(line, ("loss",), PROGRAM.parent), NUMBERS, halving
    from chaos_task import SPACE, Spirals

    wanted = halving | {"metric": "valid_loss", "algorithm": shoal.SuccessiveHalving(trials, 27, eta=3)}
    if place == "task":
        wanted["algorithm"] = shoal.Hyperband(9, eta=3)
    elif place == "GPUs":
        from invented_machine import install

        install()
        wanted |= {"devices": "auto", "hang_seconds": 3.0}
    elif directory.name != UNDISTURBED:
        wanted |= {"hang_seconds": 3.0, "devices": "cpu:1", "backend": "ray", "ray_address": os.environ["RAY_ADDRESS"]}
    return Spirals(), SPACE, wanted


def main(directory: Path, place: str, trials: int) -> None:
    """Begin the study or continue it, whatever was done before the last kill."""
    trained, space, wanted = searched(place, directory, trials)
    kept = {"directory": directory, "retries": 50, "checkpoint_seconds": CHECKPOINT_SECONDS, "show_progress": False}
    try:
        shoal.resume(directory, show_progress=False)
    except JournalError:
        shoal.tune(trained, space, mode="min", **wanted, **kept)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
