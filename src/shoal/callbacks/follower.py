"""The follower: the process that calls the callbacks of a study, and the engine's side of it.

New journal entries are delivered in batches; the callback's position is saved after each batch.
"""

import base64
import json
import logging
import os
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.callbacks.base import Callback, EpochReport, StudyInfo, TrialResult
from shoal.core.errors import ShoalError
from shoal.core.rows import TrialRow
from shoal.core.trial import Config
from shoal.host.pickling import dumped, loaded, why_not_loaded
from shoal.host.process_lock import ProcessLock
from shoal.journal.view import JournalView

__all__ = ["callbacks_text", "following", "main"]

BATCH = 1000
"""Largest number of reports in a batch."""

LOOK_SECONDS = 0.5
"""Time between two readings of the journal."""

CLOSE_SECONDS = 60.0
"""Longest time that the end of a study waits for its callbacks; then the follower continues, and ends by itself."""

NICE = 10
"""Priority of the follower below that of the training processes."""

LOG = Path("logs") / "callbacks.log"
"""Output of the follower, in the study's directory. It also is the lock by which a study has one follower at a time."""

_log = logging.getLogger("shoal.callbacks")

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from shoal.callbacks.follower import main; main()"
)


@dataclass
class Position:
    """The part of a journal that was delivered to a callback."""

    seq: int = 0
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


class Positions:
    """The positions of a study's callbacks, in the file `callbacks.json` of its directory."""

    def __init__(self, directory: Path, count: int) -> None:
        self._path = directory / "callbacks.json"
        self._all = [Position() for _ in range(count)]
        try:
            if self._path.exists():
                saved = json.loads(self._path.read_bytes())
                self._all = [Position(x["seq"], set(x["begun"]), set(x["ended"])) for x in saved]
            _ = self._all[count - 1]
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ShoalError(
                f"{self._path} is damaged ({type(error).__name__}: {error}), so no callback is called; remove it, and "
                "after a resume all callbacks are called from the beginning of the study"
            ) from error

    def __getitem__(self, index: int) -> Position:
        return self._all[index]

    def save(self) -> None:
        """Replace the file atomically, so that a kill leaves the old or the new content."""
        text = json.dumps([{"seq": x.seq, "begun": sorted(x.begun), "ended": sorted(x.ended)} for x in self._all])
        partial = self._path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._path)


class Delivery:
    """Calls one callback with the new entries of a journal."""

    def __init__(self, callback: Callback, journal: JournalView, positions: Positions, index: int) -> None:
        self._callback, self._journal = callback, journal
        self._positions, self._position = positions, positions[index]
        self._configs: dict[int, Config] = {}  # of trials that have begun and not ended

    def deliver(self) -> None:
        """Make all calls that are due, then flush the callback and save its position, batch by batch.

        Raises:
            Exception: any error of the callback; its position is still that of the last batch.
        """
        position, more = self._position, True
        while more:
            # Read before the reports, so that a trial's end is delivered after its reports.
            states = self._journal.begun_states()
            reports = self._journal.reports_after(position.seq, BATCH)
            more = len(reports) == BATCH
            reported = {report.trial for _, _, report in reports}
            final = {number for number, state in states.items() if state.final}
            retried = position.ended & (reported | (states.keys() - final))
            due = set() if more else final - (position.ended - retried)
            rows = self._rows(sorted(reported | (states.keys() - position.begun) | due))
            begun = set(self._begin(rows.values()))
            for _, time, report in reports:
                sent = EpochReport(report.epoch, report.metrics, report.seconds, time)
                self._callback.on_report(report.trial, self._configs[report.trial], sent)
            ended = set(self._end(rows[number] for number in sorted(due)))
            if not (reports or begun or ended or retried):
                return
            self._callback.flush()
            position.seq = reports[-1][0] if reports else position.seq
            position.begun |= begun
            position.ended = position.ended - retried | ended
            self._positions.save()

    def _rows(self, numbers: Iterable[int]) -> Mapping[int, TrialRow]:
        """The trials with these numbers; their configs are kept until they end."""
        rows = {row.number: row for row in self._journal.trials(numbers)}
        self._configs |= {number: row.config for number, row in rows.items()}
        return rows

    def _begin(self, rows: Iterable[TrialRow]) -> Iterator[int]:
        for row in rows:
            if row.number not in self._position.begun:
                self._callback.on_trial_begin(row.number, row.config)
                yield row.number

    def _end(self, rows: Iterable[TrialRow]) -> Iterator[int]:
        for row in rows:
            if row.state.final:  # else a user has retried it since its state was read
                result = TrialResult(row.state, row.reason, row.epoch, row.metrics, row.best, row.seconds)
                self._callback.on_trial_end(row.number, self._configs.pop(row.number), result)
                yield row.number


def study_info(journal: JournalView) -> StudyInfo:
    """Describe the study of a journal for its callbacks."""
    first, *later = journal.runs()
    with JournalView.read(journal.directory) as now:  # `journal.study` is read once, when the view is opened
        finished = bool(now.study.get("finished"))
    return StudyInfo(
        id=f"{int(first.started * 1e6):x}{first.pid:x}",
        name=journal.directory.name,
        directory=journal.directory,
        objectives=journal.objectives,
        resumed=bool(later),
        finished=finished,
    )


def callbacks_text(callbacks: object, more: Sequence[Callback] = ()) -> list[dict[str, str]]:
    """Callbacks for the journal, each with its name and pickle; trackers of the command line only if of no class among
    them.
    """
    if not isinstance(callbacks, list | tuple) or not all(isinstance(each, Callback) for each in callbacks):
        raise ShoalError(
            "`callbacks` must be a list of objects of subclasses of shoal.Callback, such as "
            f"[shoal.integrations.tensorboard.TensorBoardCallback()], got {callbacks!r}"
        )
    own = {type(each) for each in callbacks}
    added = {type(each): each for each in more if type(each) not in own}
    found = []
    for each in (*callbacks, *added.values()):
        name = type(each).__name__
        what, remedy = f"the callback {name} cannot be pickled for its process", "make it in `on_study_begin`"
        content = dumped(each, what, ShoalError, remedy)
        found.append({"name": name, "pickled": base64.b64encode(content).decode()})
    return found


@contextmanager
def following(journal: JournalView) -> Iterator[None]:
    """While this context lasts, the callbacks of a study are called, by another process.

    At the end it waits up to `CLOSE_SECONDS` until all entries of the journal are delivered. Warnings of the
    follower are passed on to the logger `shoal.callbacks`.
    """
    if not journal.spec.callbacks:
        yield
        return
    log = journal.directory / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    path = [entry or os.getcwd() for entry in sys.path]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP, journal.directory, str(os.getpid()), json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,  # a Ctrl-C is for the engine
        )
    assert process.stdin is not None
    listener = threading.Thread(target=_listen, args=(process, log), name="shoal-callbacks", daemon=True)
    listener.start()
    try:
        yield
    finally:
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(b"\n")  # a closed pipe is not enough: a fork of this process may hold it, too
        listener.join(CLOSE_SECONDS)
        if listener.is_alive():
            _log.warning(
                "the study has ended, and process %d still calls its callbacks; it ends when all entries of the "
                "journal are delivered",
                process.pid,
            )


def _listen(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            _log.warning("%s", json.loads(line))
    if status := process.wait():
        _log.warning("the process of the callbacks ended with status %d, and the study continues; see %s", status, log)


def main() -> None:
    """Follow a study; arguments are its directory and the id of the process that runs it."""
    directory, engine = Path(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)  # what callbacks print goes to the log
        os.nice(NICE)

        def warn(text: str) -> None:
            with suppress(BrokenPipeError):  # the engine was killed
                print(json.dumps(text), file=channel, flush=True)

        def wait() -> bool:
            ready, _, _ = select.select([0], [], [], LOOK_SECONDS)
            return not ready and os.getppid() == engine

        lock = ProcessLock(directory / LOG)
        lock.exclusive(wait=True)  # a follower of an earlier run may be ending
        try:
            with JournalView.read(directory) as journal:
                _follow(journal, wait, warn)
        except ShoalError as error:
            warn(str(error))


def _follow(journal: JournalView, wait: Callable[[], bool], warn: Callable[[str], None]) -> None:
    recorded = journal.spec.callbacks
    positions = Positions(journal.directory, len(recorded))
    followers = [_FollowedCallback(journal, positions, index, warn) for index in range(len(recorded))]
    info = replace(study_info(journal), finished=False)
    for each in followers:
        each.begin(info)
    goes_on = True
    while goes_on:
        goes_on = wait()
        for each in followers:
            each.deliver()
    info = study_info(journal)
    for each in followers:
        each.end(info)


class _FollowedCallback:
    """One callback of a study, which is called until it raises."""

    def __init__(self, journal: JournalView, positions: Positions, index: int, warn: Callable[[str], None]) -> None:
        self._journal, self._positions, self._index, self._warn = journal, positions, index, warn
        recorded = journal.spec.callbacks[index]
        self._name, self._content = recorded["name"], base64.b64decode(recorded["pickled"])
        self._delivery: Delivery | None = None
        self._callback = Callback()

    def begin(self, info: StudyInfo) -> None:
        with self._left_out_if_it_raises():
            self._callback = self._unpickled()
            self._callback.on_study_begin(info)
            self._delivery = Delivery(self._callback, self._journal, self._positions, self._index)

    def deliver(self) -> None:
        if self._delivery is not None:
            with self._left_out_if_it_raises():
                self._delivery.deliver()

    def end(self, info: StudyInfo) -> None:
        if self._delivery is not None:
            with self._left_out_if_it_raises():
                self._callback.on_study_end(info)

    def _unpickled(self) -> Callback:
        try:
            callback: Callback = loaded(self._content)
        except Exception as error:
            raise ShoalError(f"it cannot be loaded: {why_not_loaded(error)}") from error
        return callback

    @contextmanager
    def _left_out_if_it_raises(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            self._delivery = None
            traceback.print_exc()
            self._warn(self._told(error))

    def _told(self, error: BaseException) -> str:
        """The warning for an error: where it was raised, except for an error of Shoal, which names its remedy."""
        consequence = "is left out until the study is resumed, and the study continues"
        if isinstance(error, ShoalError):
            return f"callback {self._name} {consequence}: {error}"
        frames = traceback.extract_tb(error.__traceback__)
        own = next(frame for frame in reversed(frames) if Path(frame.filename).parent == Path(__file__).parent)
        place = frames[min(frames.index(own) + 1, len(frames) - 1)]  # the method of the callback
        what = "".join(traceback.format_exception_only(error)).strip()
        log = self._journal.directory / LOG
        where = f"{place.filename}, line {place.lineno}, in {place.name}"
        return f"callback {self._name} {consequence}: {what} ({where}); the traceback is in {log}"
