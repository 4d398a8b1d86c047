"""All rivals of one cell against each other, interleaved, and whether they train the same."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor

from rivals.rival import Cell, Rival
from shoal.core.errors import ShoalError
from shoal.train.memory import MemoryMeter, release_cached_memory

__all__ = ["OUT_OF_MEMORY", "Finding", "difference", "race"]

WARM_UP = 3
"""Steps whose losses are compared, before the clock starts."""

REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, ShoalError)
"""What a rival raises where it cannot train a model."""

OUT_OF_MEMORY = "out of memory"
"""As CUDA says it, and as a finding does."""

Finding = dict[str, Any]
"""What was measured of a rival.

"fails" says in one line why nothing was. Else there are "samples_per_second" of all members together, median of the
rounds, and its ratio "of_serial"; on a GPU "peak_bytes", the most that it has taken since it was made; the rival's
"note"; and "off", the largest relative difference of its losses from the serial ones, of models that draw no numbers.
"""


def race(
    cell: Cell, makers: Mapping[str, Callable[[Cell], Rival]], seconds: float, rounds: int, together: bool = True
) -> dict[str, Finding]:
    """Measure every rival; one after another if the device's memory does not hold all at once.

    Args:
        cell: What to train.
        makers: Of the rivals, by name; "serial" is what the others are held against.
        seconds: For each rival, warm-up not counted.
        rounds: Into which its seconds are divided.
        together: Whether to try with all at once, in turns.
    """
    findings = _together(cell, makers, seconds, rounds) if together else {}
    if not together or (len(makers) > 1 and any(each.get("fails") == OUT_OF_MEMORY for each in findings.values())):
        findings = {name: _together(cell, {name: make}, seconds, rounds)[name] for name, make in makers.items()}
    serial = findings.get("serial", {}).get("samples_per_second")
    for finding in findings.values():
        if "samples_per_second" in finding and serial:
            finding["of_serial"] = finding["samples_per_second"] / serial
    return findings


def _together(
    cell: Cell, makers: Mapping[str, Callable[[Cell], Rival]], seconds: float, rounds: int
) -> dict[str, Finding]:
    findings: dict[str, Finding] = {name: {} for name in makers}
    rivals: dict[str, Rival] = {}
    steps: dict[str, int] = {}
    losses: dict[str, list[Tensor]] = {}
    peaks: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in makers}

    @contextmanager
    def turn(name: str) -> Iterator[None]:
        """A rival leaves the race if it fails."""
        try:
            yield
        except REFUSALS as reason:
            findings[name] = {"fails": _in_words(reason)}
            if name in rivals:
                rivals.pop(name).close()
            release_cached_memory(cell.device)

    def prepare(name: str) -> None:
        rivals[name] = makers[name](cell)
        losses[name] = rivals[name].warm_up(WARM_UP)
        steps[name] = _steps_of(rivals[name], seconds / rounds)

    try:
        for name in makers:
            with turn(name):
                _, peaks[name] = MemoryMeter(cell.device).during(partial(prepare, name))
        for _ in range(rounds):
            for name in list(rivals):
                with turn(name):
                    times[name].append(rivals[name].run(steps[name]) / steps[name])
        for name, rival in rivals.items():
            finding = findings[name] = {
                "samples_per_second": cell.workload.samples * cell.members / median(times[name]),
                "note": rival.note(),
            }
            if cell.device.type == "cuda":
                finding["peak_bytes"] = peaks[name] + rival.elsewhere
            if losses[name] and "serial" in losses and not cell.workload.draws and name != "serial":
                finding["off"] = difference(losses[name], losses["serial"])
    finally:
        for rival in rivals.values():
            rival.close()
        rivals.clear()
        gc.collect()
        release_cached_memory(cell.device)
    return findings


def _steps_of(rival: Rival, seconds: float) -> int:
    """How many steps fit into so much time."""
    count, taken = 1, rival.run(1)
    while taken < seconds / 10 and count < 1000:
        count *= 4
        taken = rival.run(count)
    return max(1, round(seconds * count / taken))


def difference(losses: Iterable[Tensor], serial: Iterable[Tensor]) -> float:
    """Largest relative difference of losses, those of one step in each tensor."""
    return max(float(((a - b).abs() / b.abs().clamp(min=1e-2)).max()) for a, b in zip(losses, serial, strict=True))


def _in_words(reason: Exception) -> str:
    if OUT_OF_MEMORY in str(reason):
        return OUT_OF_MEMORY
    first = next((line for line in str(reason).splitlines() if line.strip()), "")
    return f"{type(reason).__name__}: {first}"[:300]
