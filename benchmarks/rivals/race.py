"""All rivals of one cell against each other, interleaved, and whether they train the same."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rivals.rival import Cell, Rival
from shoal.core.errors import ShoalError

__all__ = ["Finding", "difference", "race"]

WARM_UP = 3
"""Steps whose losses are compared, before the clock starts."""

REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, ShoalError)
"""What a rival raises where it cannot train a model."""

OUT_OF_MEMORY = "out of memory"
"""As CUDA says it, and as a finding does."""

Maker = Callable[[Cell], Rival]


@dataclass
class Finding:
    """What was measured of a rival; `fails` says in words why it was not.

    Args:
        seconds: of a step of all members, median of the rounds.
        samples_per_second: of all members together.
        peak_bytes: see `Rival.peak_bytes`.
        note: of the rival.
        off: the largest relative difference of its losses from the serial ones, of models that draw no numbers.
        fails: one line.
    """

    seconds: float | None = None
    samples_per_second: float | None = None
    of_serial: float | None = None
    peak_bytes: int | None = None
    note: str = ""
    off: float | None = None
    fails: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


def race(
    cell: Cell, makers: Mapping[str, Maker], seconds: float, rounds: int, together: bool = True
) -> dict[str, Finding]:
    """Measure every rival; one after another if the device's memory does not hold all at once.

    Args:
        cell: what to train.
        makers: of the rivals, by name; "serial" is what the others are held against.
        seconds: for each rival, warm-up not counted.
        rounds: into which its seconds are divided.
        together: whether to try with all at once, in turns.
    """
    findings = _together(cell, makers, seconds, rounds) if together else {}
    if not together or (len(makers) > 1 and any(finding.fails == OUT_OF_MEMORY for finding in findings.values())):
        findings = {name: _together(cell, {name: make}, seconds, rounds)[name] for name, make in makers.items()}
    serial = findings.get("serial", Finding()).samples_per_second
    for finding in findings.values():
        if finding.samples_per_second and serial:
            finding.of_serial = finding.samples_per_second / serial
    return findings


def _together(cell: Cell, makers: Mapping[str, Maker], seconds: float, rounds: int) -> dict[str, Finding]:
    findings = {name: Finding() for name in makers}
    rivals: dict[str, Rival] = {}
    steps: dict[str, int] = {}
    losses: dict[str, list[Tensor]] = {}
    times: dict[str, list[float]] = {name: [] for name in makers}

    @contextmanager
    def one(name: str) -> Iterator[None]:
        """A rival's turn; it leaves the race if it fails."""
        try:
            yield
        except REFUSALS as reason:
            findings[name] = Finding(fails=_in_words(reason))
            if name in rivals:
                rivals.pop(name).close()
            _free(cell)

    try:
        for name, make in makers.items():
            with one(name):
                rivals[name] = make(cell)
                losses[name] = rivals[name].warm_up(WARM_UP)
                steps[name] = _steps_of(rivals[name], seconds / rounds)
        for _ in range(rounds):
            for name in list(rivals):
                with one(name):
                    times[name].append(rivals[name].run(steps[name]) / steps[name])
        for name in list(rivals):
            with one(name):
                taken = median(times[name])
                findings[name] = Finding(
                    seconds=taken,
                    samples_per_second=cell.workload.samples * cell.members / taken,
                    peak_bytes=rivals[name].peak_bytes(),
                    note=rivals[name].note(),
                )
                if not cell.workload.draws and name != "serial":
                    findings[name].off = difference(losses[name], losses.get("serial", []))
    finally:
        for rival in rivals.values():
            rival.close()
        rivals.clear()
        _free(cell)
    return findings


def _steps_of(rival: Rival, seconds: float) -> int:
    """How many steps fit into so much time."""
    count, taken = 1, rival.run(1)
    while taken < seconds / 10 and count < 1000:
        count *= 4
        taken = rival.run(count)
    return max(1, round(seconds * count / taken))


def difference(losses: list[Tensor], serial: list[Tensor]) -> float | None:
    """Largest relative difference of losses, those of one step in each tensor; None if there are none."""
    pairs = list(zip(losses, serial, strict=False))
    return max(float(((a - b).abs() / b.abs().clamp(min=1e-2)).max()) for a, b in pairs) if pairs else None


def _in_words(reason: Exception) -> str:
    if OUT_OF_MEMORY in str(reason):
        return OUT_OF_MEMORY
    first = next((line for line in str(reason).splitlines() if line.strip()), "")
    return f"{type(reason).__name__}: {first}"[:300]


def _free(cell: Cell) -> None:
    gc.collect()
    if cell.device.type == "cuda":
        torch.cuda.empty_cache()
