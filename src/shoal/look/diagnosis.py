"""Diagnosis of a study: its largest losses of device time, with the cause and a remedy of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.core.activity import MEASURING, TRAINING_STEPS, Activity, seconds_of
from shoal.core.event import Outcome
from shoal.core.rows import Verdict
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.look.accounting import Accounting
from shoal.look.overview import Bar, Overview
from shoal.look.text import printable, rounded, shortened

__all__ = ["Diagnosis", "Loss", "diagnose", "diagnosis", "diagnosis_json"]

_MOST = 3
"""Number of losses that are named."""
_WHOLE = (Outcome.FINISHED, Outcome.STOPPED, Outcome.SUSPENDED)
"""Outcomes of jobs of which no work is lost."""
_LEAST_SHARE = 0.01
"""Share of the device time below which a loss is not named."""


@dataclass(frozen=True)
class Loss:
    """Device time that did not go into training steps whose results count.

    Args:
        seconds: Seconds of all devices; an upper bound if `at_most`.
        cause: What took the time, in a sentence.
        remedy: What a user can change, or why nothing need be changed, in a sentence.
    """

    name: str
    seconds: float
    cause: str
    remedy: str
    at_most: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The largest losses of device time of a study.

    Args:
        losses: At most three, a pause and then the largest first; none but a pause is below one percent of the device
            time, without that of the pause. None overlap but those that are upper bounds.
        total: Seconds of running time, summed over all devices.
        paused: Seconds of it since users have paused all that is left; 0 while anything else is open.
        steps: Seconds of training steps.
        unknown: Seconds of jobs that have not reported what they did: they run, were killed, or are programs.
        jobs: Number of jobs so far.
        running: Whether a job runs now.
    """

    losses: tuple[Loss, ...]
    total: float
    paused: float
    steps: float
    unknown: float
    jobs: int
    running: bool

    @property
    def summary(self) -> str:
        """How much of the device time went into training steps, and whether there is anything to gain."""
        if not self.jobs:
            return "No job has run."
        if self.unknown and not self.steps:
            if not self.running:
                return "What jobs spent their time on is not known: those that are killed and programs never report it."
            return "What jobs spent their time on is not known yet: each reports it at its end, and programs never do."
        share = self.steps / self.total if self.total > 0 else 0.0
        parts = [f"{share:.0%} of {rounded(self.total, 3)} s of device time were training steps."]
        if self.unknown >= _LEAST_SHARE * self.total:
            why = "known yet: a job reports its activities at its end" if self.running else "known, as jobs were killed"
            parts.append(f"{_seconds(self.unknown)} are not {why}.")
        elif not self.losses:
            parts.append("Nothing else took more than one percent of it, so there is nothing to gain.")
        return " ".join(parts)

    @property
    def lines(self) -> list[str]:
        """The summary, and a line for each loss."""
        return [
            self.summary,
            *(
                f"{loss.name}, {'at most ' if loss.at_most else ''}{_seconds(loss.seconds)} "
                f"({loss.seconds / self.total:.0%}): {loss.cause} {loss.remedy}"
                for loss in self.losses
            ),
        ]


def diagnosis(journal: JournalView, study: Overview, spent: Accounting) -> Diagnosis:
    """Diagnose a study from its journal, with what `overview` and `account` say of it."""
    cut = [bar.job.id for bar in study.bars if _is_cut(bar)]
    last_reports = StudyStatistics(journal).last_reports(cut) if cut else {}
    return diagnose(study, spent, last_reports, journal.spec.algorithm)


def diagnose(study: Overview, spent: Accounting, last_reports: Mapping[str, float], algorithm: str = "") -> Diagnosis:
    """Name the largest losses of device time.

    Args:
        last_reports: Id of each job that failed or was killed -> time of its last report, in seconds since 1970.
        algorithm: As in `StudySpec`.
    """
    seconds, paused = spent.seconds, _paused_seconds(study, spent)
    least = _LEAST_SHARE * (spent.total - paused)
    steps = seconds_of(TRAINING_STEPS, seconds)
    # What failed trials and jobs did beside steps is in the losses by activity.
    cut = list(_cut_losses(study, last_reports, steps + seconds[Activity.UNREPORTED]))
    failed = _failed_losses(study, steps + seconds[Activity.UNREPORTED] - sum(loss.seconds for loss in cut))
    found = [
        *_of_activities(study, seconds, paused, "ASHA(" not in algorithm),
        *_plain_losses(study),
        *failed,
        *cut,
    ]
    named = sorted((loss for loss in found if loss.seconds >= least > 0), key=lambda loss: -loss.seconds)
    return Diagnosis(
        losses=(*_of_users(study, paused), *named)[:_MOST],
        total=spent.total,
        paused=paused,
        steps=steps,
        unknown=seconds[Activity.UNREPORTED],
        jobs=len(study.bars),
        running=study.state.pid is not None and any(bar.job.ended is None for bar in study.bars),
    )


def diagnosis_json(found: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as plain values."""
    return {
        "summary": found.summary,
        "seconds": found.total,
        "paused_seconds": found.paused,
        "steps_seconds": found.steps,
        "unknown_seconds": found.unknown,
        "losses": [{**asdict(loss), "share": loss.seconds / found.total} for loss in found.losses],
    }


def _of_users(study: Overview, seconds: float) -> Iterator[Loss]:
    if seconds:
        whole = "The study is paused" if study.state.paused else "All trials that could train are paused"
        cause = f"{whole}, and no device has a job."
        yield Loss("paused by a user", seconds, cause, "Resume them, or end the study.")


def _paused_seconds(study: Overview, spent: Accounting) -> float:
    """Seconds of all devices since the last job ended, if users have paused what is left; else 0."""
    if not (study.state.paused or study.state.all_paused) or any(bar.job.ended is None for bar in study.bars):
        return 0.0
    return (spent.wall - max((bar.end for bar in study.bars), default=0.0)) * len(spent.devices)


def _of_activities(
    study: Overview, seconds: Mapping[Activity, float], paused: float, synchronous: bool
) -> Iterator[Loss]:
    """The activities beside training steps, those with one remedy together."""
    # Without a job on any device, the accounting counts time as waiting for measuring.
    waits = max(0.0, seconds[Activity.WAITS_FOR_MEASURING] - paused)
    measured = {each: sum(bar.job.activities.get(each, 0.0) for bar in study.bars) for each in MEASURING}
    idle = seconds[Activity.FINISHED] if study.bars and len(study.usage) > 1 else 0.0  # else no other device trained
    took = {**seconds, **measured, Activity.WAITS_FOR_MEASURING: waits, Activity.FINISHED: idle}
    asynchronous = "; an asynchronous algorithm such as shoal.ASHA waits least" if synchronous else ""
    structures = _count(len(study.structures), "structure")
    jobs = _count(len(study.bars), "job")
    for name, activities, cause, remedy in (
        (
            "devices idle while others train",
            (Activity.WAITS_FOR_TRIALS,),
            "Devices had no job, because the next trials depend on results of trials on other devices.",
            f"Use more trials or fewer devices{asynchronous}.",
        ),
        (
            "devices idle while others measure",
            (Activity.WAITS_FOR_MEASURING,),
            "Devices had no job, because models were still compared or measured on other devices.",
            "The results stay on this machine (shoal history), so the next study of these models waits less.",
        ),
        (
            "devices idle at the end",
            (Activity.FINISHED,),
            "Devices had no job left while the last trials finished on others.",
            "Use fewer devices, or more trials; the longest trial sets the end of the study.",
        ),
        (
            "start of processes",
            (Activity.START, Activity.DATA),
            f"Processes imported the task and its packages ({_seconds(took[Activity.START])}), and loaded data.",
            "This does not grow with the number of epochs. Keep slow imports and preprocessing out of the task's file.",
        ),
        (
            "measuring",
            MEASURING,
            f"Models were built and short runs timed, to decide how to group the trials of {structures}.",
            "The results stay on this machine (shoal history), so the next study of these models skips most of it.",
        ),
        (
            "compilation",
            (Activity.COMPILE,),
            f"Training steps of {structures} were traced and compiled.",
            "Search fewer values of the hyper-parameters that change tensor shapes, or train for more epochs.",
        ),
        (
            "checks against plain PyTorch",
            (Activity.CHECKS,),
            "Copies of some trials trained in plain PyTorch beside their arrays, and were compared with them.",
            "Nothing to change: they prove that grouping changes no result, and become rarer as training continues.",
        ),
        (
            "validation",
            (Activity.VALIDATION,),
            "Trials were evaluated on the validation set after each epoch.",
            "If this is more than the ranking needs, use a smaller validation set or larger validation batches.",
        ),
        (
            "end_epoch",
            (Activity.END_EPOCH,),
            "`end_epoch` of the task was called for one trial after another, of an array too.",
            "Move what it computes into the training step, or do it less often.",
        ),
        (
            "checkpoints",
            (Activity.CHECKPOINTS, Activity.BUILD),
            "Trials were saved, and models made or restored at the start of jobs.",
            "Increase checkpoint_seconds, or use longer rungs, so that trials change jobs less often.",
        ),
        (
            "planning",
            (Activity.ENGINE,),
            f"Devices waited until results were taken and the next of {jobs} were planned.",
            "Use longer rungs, so that fewer jobs are started.",
        ),
    ):
        yield Loss(name, sum(took[activity] for activity in activities), cause, remedy)


def _plain_losses(study: Overview) -> Iterator[Loss]:
    """Structures that were refused as arrays: fused, n members take at least one n-th of their time."""
    refused = [found for found in study.state.arrays if found.refusal and found.members > 1]
    took = {found.key: _steps_seconds(study.bars, found) * (1 - 1 / found.members) for found in refused}
    if refused:
        worst = max(refused, key=lambda found: took[found.key])
        cause = f"{_count(len(refused), 'structure')} cannot train as arrays: {printable(shortened(worst.refusal))}."
        remedy = "Change what the reason names; how much that gains is not known before."
        yield Loss("training one trial at a time", sum(took.values()), cause, remedy, at_most=True)


def _steps_seconds(bars: Sequence[Bar], found: Verdict) -> float:
    """Seconds of training steps of the trials of a structure."""
    total = 0.0
    for bar in bars:
        members = bar.job.members
        if found.key in members:
            steps = seconds_of(TRAINING_STEPS, bar.job.activities)
            total += steps * len(members[found.key]) / sum(map(len, members.values()))
    return total


def _failed_losses(study: Overview, most: float) -> Iterator[Loss]:
    failed = study.failed_trials
    seconds = min(sum(row.seconds for row in failed), most)
    if failed:
        causes = study.state.causes
        first = f", {len(causes[0].trials)} of them by: {printable(shortened(causes[0].text))}" if causes else ""
        cause = f"{_count(len(failed), 'trial')} failed for good after training{first}."
        yield Loss("failed trials", seconds, cause, "Correct the cause, then run: shoal trial retry.")


def _is_cut(bar: Bar) -> bool:
    """Whether a job has ended otherwise than by its own end or a request."""
    return bar.job.ended is not None and bar.job.outcome not in _WHOLE


def _cut_losses(study: Overview, last_reports: Mapping[str, float], most: float) -> Iterator[Loss]:
    """Time of jobs that failed or were killed, from their last report on: their trials begin again before it.

    Of a job that has reported its activities, this is at most the time of its training steps.
    """
    cut = [bar for bar in study.bars if _is_cut(bar)]
    reported = {name: study.elapsed(moment) for name, moment in last_reports.items()}
    seconds = 0.0
    for bar in cut:
        lost = max(0.0, bar.end - max(bar.begin, reported.get(bar.job.id, 0.0)))
        seconds += min(lost, seconds_of(TRAINING_STEPS, bar.job.activities)) if bar.job.activities else lost
    if cut:
        cut_off = f"{_count(len(cut), 'job')} {'was' if len(cut) == 1 else 'were'} cut off"
        cause = f"{cut_off} by a failure or a kill; their work since the last report is lost."
        remedy = "Correct what ended them; a smaller checkpoint_seconds makes trials repeat less."
        yield Loss("work that was cut off", min(seconds, most), cause, remedy)


def _seconds(seconds: float) -> str:
    return f"{rounded(seconds, 3)} s"


def _count(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
