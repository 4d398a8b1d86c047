"""Progress of a running study: a live table on a terminal or in a notebook, or lines in a file.

Rich is imported where it is used, as the first worker starts meanwhile, and a silent study needs none of it.
"""

import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TextIO

from shoal.algorithms.base import Totals
from shoal.core.job import Purpose
from shoal.host.plain_characters import encodable
from shoal.look.failures import cause_lines, failing_text, unmeasured_lines
from shoal.look.snapshot import Best, Snapshot
from shoal.look.text import (
    best_text,
    duration_text,
    epochs_text,
    left_text,
    printable,
    progress_texts,
    savings_text,
    speedup_text,
    states_text,
    time_text,
    timeout_text,
    trials_text,
    verdict_text,
)
from shoal.spec import StudySpec

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LineProgress", "LiveProgress", "NotebookProgress", "Progress", "SilentProgress", "progress", "summary"]

_MAX_DEVICES = 4
"""Most devices whose use is shown one by one in a line."""

_PAUSE = 20
"""Least time between two updates, relative to that of an update: that of a large study reads it whole."""

_PHASES = {
    Purpose.SIGNATURE: "comparing the models of",
    Purpose.PROFILE: "measuring",
    Purpose.TRAIN: "training",
    Purpose.ASSIST: "training on several devices:",
}


class Progress(ABC):
    """Base class of the displays of a running study.

    `print_lines` prints lines that stay above the display. The display is entered when the study begins and left at
    the end, also by an exception; the engine calls `update` in every turn of its loop. A snapshot is taken only when it
    is about to be displayed.
    """

    @abstractmethod
    def print_lines(self, lines: Sequence[str], *, whole: bool = False) -> None:
        """Show lines that stay; called before the display is entered, or after it is left.

        Args:
            whole: Whether no line is broken at the width of the terminal, as for commands to be copied.
        """

    @abstractmethod
    def update(self) -> None:
        """Refresh the display if it is due."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *exception: object) -> None: ...


class SilentProgress(Progress):
    """Shows nothing and reads nothing."""

    def print_lines(self, lines: Sequence[str], *, whole: bool = False) -> None:
        """Do nothing."""

    def update(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class _Stream:
    """A stream that ignores text which cannot be written: the reader of a pipe has gone, a disk is full.

    Of characters that its encoding lacks, plain ones are written.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it was closed
            self._stream.write(encodable(text, self._stream))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


class _PacedProgress(Progress):
    """Shows a snapshot at most once in a period, that of a large study less often."""

    _PERIOD: ClassVar[float]
    """Seconds."""

    def __init__(self, take_snapshot: Callable[[], Snapshot], clock: Callable[[], float]) -> None:
        self._take_snapshot = take_snapshot
        self._clock = clock
        self._due = clock()

    def update(self) -> None:
        """Show a snapshot if it is due."""
        if (now := self._clock()) >= self._due:
            self._show(self._take_snapshot(), now)
            self._due = now + max(self._PERIOD, _PAUSE * (self._clock() - now))

    @abstractmethod
    def _show(self, snapshot: Snapshot, now: float) -> None: ...

    def __enter__(self) -> Self:
        self.update()
        return self


class _ConsoleProgress(_PacedProgress):
    _SOFT_WRAP: ClassVar[bool]

    def __init__(
        self, take_snapshot: Callable[[], Snapshot], console: "Console", clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(take_snapshot, clock)
        self._console = console

    def print_lines(self, lines: Sequence[str], *, whole: bool = False) -> None:
        for line in lines:
            self._print(line, whole=whole)

    def _print(self, line: str, *, whole: bool = False) -> None:
        from rich.text import Text

        self._console.print(Text(f"shoal: {printable(line)}"), soft_wrap=whole or self._SOFT_WRAP)


class LiveProgress(_ConsoleProgress):
    """Redraws a table on a terminal in place, at most four times a second, that of a large study less often; for the
    arguments see the base class.
    """

    _PERIOD = 0.25
    _SOFT_WRAP = False

    def __init__(
        self, take_snapshot: Callable[[], Snapshot], console: "Console", clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(take_snapshot, console, clock)
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        try:
            self._show(self._take_snapshot(), self._clock())
        finally:
            self._live.stop()  # restores the cursor of the terminal

    def _show(self, snapshot: Snapshot, now: float) -> None:
        from shoal.look.table import status_table

        self._live.update(status_table(snapshot), refresh=True)


class NotebookProgress(_PacedProgress):
    """Redraws the table of `LiveProgress` in the output of a notebook's cell in place, at most twice a second."""

    _PERIOD = 0.5
    _WIDTH = 100

    def __init__(
        self,
        take_snapshot: Callable[[], Snapshot],
        display: Callable[..., Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(take_snapshot, clock)
        self._display = display
        self._lines: list[str] = []
        self._handle: Any = None
        self._shown: dict[str, str] = {}

    def print_lines(self, lines: Sequence[str], *, whole: bool = False) -> None:
        """Keep the lines; they stand above the table. After the end they are not shown: the cell has the `Study`."""
        self._lines += lines

    def __exit__(self, *exception: object) -> None:
        self._show(self._take_snapshot(), self._clock())

    def _show(self, snapshot: Snapshot, now: float) -> None:
        shown = self._bundle(snapshot)
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        elif shown != self._shown:
            self._handle.update(shown, raw=True)
        self._shown = shown

    def _bundle(self, snapshot: Snapshot) -> dict[str, str]:
        """Return the output as MIME type -> text: HTML for a notebook, plain text where it is printed."""
        from rich.console import Console
        from rich.text import Text

        from shoal.look.table import status_table

        console = Console(file=StringIO(), record=True, width=self._WIDTH, force_terminal=True, force_jupyter=False)
        for line in self._lines:
            console.print(Text(printable(line), "dim"))
        console.print(status_table(snapshot))
        html = console.export_html(
            inline_styles=True, clear=False, code_format="<pre style='line-height: 1.4; margin: 0'>{code}</pre>"
        )
        return {"text/html": html, "text/plain": console.export_text()}


class LineProgress(_ConsoleProgress):
    """Prints plain lines to a file or a pipe, at most once a second, of a large study less often; for the arguments see
    the base class.

    It prints one line at the start, one for each kind of job when it first runs, one for the first steps of a long
    epoch, one for the measured speed-up, one for a new best at most every ten seconds, one each minute for the time
    left, the steps of a long epoch, the use of the devices and the waiting trials, one for each new cause of failures,
    one for each note on the task, one for each structure that cannot be an array, and at the end one for the states and
    one for what fusing saved.
    """

    _PERIOD = 1.0
    _SOFT_WRAP = True
    _BEST_PERIOD = 10.0
    _STATUS_PERIOD = 60.0
    _MAX_CAUSES = 10
    _MAX_PLAIN = 10

    def __init__(
        self, take_snapshot: Callable[[], Snapshot], console: "Console", clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(take_snapshot, console, clock)
        self._best_due = clock()
        self._status_due = clock() + self._STATUS_PERIOD
        self._best: float | None = None
        self._front: tuple[Best, ...] = ()
        self._started = self._has_steps = self._has_speedup = False
        self._devices = ""
        self._causes: set[str] = set()
        self._phases: set[str] = set()
        self._notes = 0
        self._plain: set[str] = set()

    def _show(self, snapshot: Snapshot, now: float) -> None:
        self._print_phases(snapshot)
        if not self._started and snapshot.trials:
            self._started = True
            self._devices = _devices_text(snapshot)
            self._print(f"{snapshot.trials} trials ({states_text(snapshot)}) on {self._devices}")
        if self._started and (devices := _devices_text(snapshot)) != self._devices:
            self._devices = devices
            self._print(f"{duration_text(snapshot.elapsed)} continues on {devices}")
        self._print_notes(snapshot)
        self._print_speedup(snapshot)
        self._print_causes(snapshot)
        if now >= self._best_due and self._improved(snapshot):
            self._best_due = now + self._BEST_PERIOD
            self._print(f"{duration_text(snapshot.elapsed)} best so far: {best_text(snapshot)}")
        if snapshot.progress and not self._has_steps:
            self._has_steps = True
            steps = ", and ".join(progress_texts(snapshot, most=1))
            self._print(f"{duration_text(snapshot.elapsed)} {steps}; {left_text(snapshot)}")
        if now >= self._status_due and self._started:
            self._status_due = now + self._STATUS_PERIOD
            self._print(f"{duration_text(snapshot.elapsed)} {_status_text(snapshot)}")

    def __exit__(self, *exception: object) -> None:
        snapshot = self._take_snapshot()
        self._print_notes(snapshot)
        self._print_causes(snapshot)
        time = time_text(snapshot) if snapshot.runs > 1 else ""
        parts = [time, timeout_text(snapshot), states_text(snapshot), f"best: {best_text(snapshot)}"]
        self._print(f"{duration_text(snapshot.elapsed)} {'; '.join(filter(None, parts))}")
        if snapshot.savings is not None:
            self._print(f"fusing: {savings_text(snapshot.savings, snapshot.unit)}")
        self._print_speedup(snapshot)

    def _print_speedup(self, snapshot: Snapshot) -> None:
        if snapshot.speedup is not None and snapshot.savings is None and not self._has_speedup:
            self._has_speedup = True
            self._print(f"{duration_text(snapshot.elapsed)} {speedup_text(snapshot.speedup)}")

    def _print_phases(self, snapshot: Snapshot) -> None:
        members = Counter[Purpose]()
        for job in (job for use in snapshot.devices for job in use.jobs):
            members[job.purpose] += job.members
        messages = {"starting workers": ""} if snapshot.starting else {}
        if not snapshot.starting:
            messages |= {_PHASES[purpose]: f" {trials_text(count)}" for purpose, count in sorted(members.items())}
        for phase, what in messages.items():
            if phase not in self._phases:
                self._phases.add(phase)
                self._print(f"{duration_text(snapshot.elapsed)} {phase}{what}")

    def _print_notes(self, snapshot: Snapshot) -> None:
        for line in snapshot.note.splitlines()[self._notes :]:
            self._notes += 1
            self._print(f"{duration_text(snapshot.elapsed)} note: {line}")
        for each in snapshot.arrays:
            if each.refusal and each.key not in self._plain and len(self._plain) < self._MAX_PLAIN:
                self._plain.add(each.key)
                self._print(f"{duration_text(snapshot.elapsed)} {verdict_text(each)}")

    def _print_causes(self, snapshot: Snapshot) -> None:
        """Print each cause of failed profiles and trials once, as it occurs, also if the trial is to be retried."""
        unmeasured = zip(snapshot.unmeasured, unmeasured_lines(snapshot.unmeasured), strict=False)
        lost = zip(snapshot.causes, cause_lines(snapshot.causes), strict=False)
        messages = {cause.text: line for cause, line in unmeasured}
        messages |= {each.job.cause: failing_text(each) for each in snapshot.failing if each.job is not None}
        messages |= {cause.text: line for cause, line in lost}
        for cause, line in messages.items():
            if cause not in self._causes and len(self._causes) < self._MAX_CAUSES:
                self._causes.add(cause)
                self._print(f"{duration_text(snapshot.elapsed)} {line}")

    def _improved(self, snapshot: Snapshot) -> bool:
        """Whether the best is better than the last one printed, or the front of several metrics has changed.

        It can get worse where a trial's last value counts.
        """
        if snapshot.best is None or isinstance(snapshot.best.value, tuple):
            changed, self._front = snapshot.front != self._front, snapshot.front
            return changed
        value, before = snapshot.best.value, self._best
        if before is not None and (value >= before if snapshot.mode == "min" else value <= before):
            return False
        self._best = value
        return True


def progress(
    take_snapshot: Callable[[], Snapshot], *, silent: bool = False, console: "Console | None" = None
) -> Progress:
    """The display that suits the console, or a silent one for output that a program reads.

    By default it is the output of the notebook's cell that runs the study, or else standard error.
    """
    if silent:
        return SilentProgress()
    if console is None and (display := _notebook_display()) is not None:
        return NotebookProgress(take_snapshot, display)
    from rich.console import Console

    stream: Any = sys.stderr and _Stream(sys.stderr)  # None if it is closed
    console = console or Console(file=stream, stderr=True)
    redraws = console.is_terminal and not console.is_dumb_terminal
    return LiveProgress(take_snapshot, console) if redraws else LineProgress(take_snapshot, console)


def _notebook_display() -> Callable[..., Any] | None:
    """Return the function that displays in a notebook; None outside of one, as in IPython's terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return display


def summary(
    spec: StudySpec, devices: Sequence[str], directory: Path, done: str = "", time_left: float | None = None
) -> list[str]:
    """Lines at the start of a run: what is trained, by what and why, where and how long; `done` as in "25 of 69
    epochs".
    """
    size = spec.repetition.size
    repeated = f", {size} trials of each configuration" if size > 1 else ""
    amount = "" if spec.totals is None else f" {_totals_text(spec.totals, spec.unit)}{repeated}, by"
    goals = " and ".join(
        f"{'maximises' if goal.mode == 'max' else 'minimises'} {goal.metric}" for goal in spec.objectives
    )
    batches = f"{spec.batches}; " if spec.batches else ""
    resumed = f"resumes after {done}; " if done else ""
    timeout = "" if time_left is None else f"timeout in {duration_text(time_left)}; "
    chosen = [f"{spec.algorithm} is chosen, as {spec.chosen_because}"] if spec.chosen_because else []
    return [
        f"{spec.task}:{amount} {spec.algorithm}; {goals}",
        *chosen,
        *(f"warm start: {line}" for line in spec.earlier_from),
        f"{batches}{', '.join(devices) or 'no device'}; {resumed}{timeout}directory {directory}",
    ]


def _totals_text(totals: Totals, unit: str) -> str:
    most = f" to {totals.most}" if totals.most > totals.least else ""
    return f"{trials_text(totals.trials)}, {totals.least}{most} {unit} in all"


def _status_text(snapshot: Snapshot) -> str:
    """Return epochs, time left, steps, use of the devices and the most frequent waiting reason on a line."""
    left = left_text(snapshot)
    parts = [f"{epochs_text(snapshot)} {snapshot.unit}{left and f', {left}'}"]
    if snapshot.progress:
        parts.append(", and ".join(progress_texts(snapshot, most=1)))
    uses = [use for use in snapshot.devices if use.device.healthy]
    if len(uses) > _MAX_DEVICES:
        parts.append(f"{len(uses)} devices, {sum(use.occupancy for use in uses) / len(uses):.0%} reserved")
    elif uses:
        parts.append(", ".join(f"{use.device.name} {use.occupancy:.0%}" for use in uses) + " reserved")
    if snapshot.waiting:
        reason, numbers = next(iter(snapshot.waiting.items()))
        waiting = sum(map(len, snapshot.waiting.values()))
        most = "" if len(numbers) == waiting else f"{len(numbers)} of them: "
        parts.append(f"{trials_text(waiting)} waiting: {most}{reason or 'for a place in a job'}")
    return "; ".join(parts)


def _devices_text(snapshot: Snapshot) -> str:
    return (
        ", ".join(use.device.name for use in snapshot.devices if use.device.healthy) or "no device, and waits for one"
    )
