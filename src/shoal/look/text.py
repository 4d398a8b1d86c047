"""Text of numbers, times, configs, states and requests in tables and messages."""

import math
import re
import time
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.event import EpochProgress
from shoal.core.hypervolume import Hypervolume
from shoal.core.request import Request
from shoal.core.rows import Intervention, TrialRow, Verdict
from shoal.core.space import Space, flatten
from shoal.core.trial import Config, TrialState, numbers_text, state_name
from shoal.look.savings import Savings, Speedup
from shoal.look.snapshot import Best, Snapshot, TaskEdit

__all__ = [
    "SMALL_SPEEDUP",
    "batch_text",
    "best_text",
    "best_texts",
    "config_text",
    "counts_in_words",
    "duration_text",
    "epochs_text",
    "finite_or_none",
    "hypervolume_text",
    "intervention_text",
    "key_text",
    "leaf_text",
    "left_text",
    "metric_text",
    "number_text",
    "numbered_trials",
    "printable",
    "progress_text",
    "progress_texts",
    "rate_text",
    "request_text",
    "rounded",
    "savings_text",
    "shortened",
    "speedup_text",
    "spread_text",
    "state_counts",
    "state_text",
    "states_text",
    "structure_text",
    "study_state_text",
    "task_edit_text",
    "time_text",
    "timeout_text",
    "trial_state_text",
    "trial_verdict_text",
    "trials_text",
    "verdict_text",
    "verdict_texts",
]

_MAX_BEST_LINES = 4
"""Most trials of the front that are shown."""
_MAX_NAMED = 3
"""Most trials that are named of several with the same state."""
_MAX_VERDICTS = 6
"""Most structures whose verdicts are shown."""
SMALL_SPEEDUP = 1.1
"""Speed-up below which training together is no reason to use Shoal."""
_EXACT_SECONDS = 60.0
"""Times of savings up to this one have tenths of seconds, so that they add up."""
_WAITING, _PAUSED, _HELD = "waiting", "paused", "waiting for others"
_DIGEST_LENGTH = 8
_MAX_CAUSE_LENGTH = 80
"""Most characters of a cause in a line."""
_DIGEST_PATTERN = re.compile(r"(?:^|(?<= ))[0-9a-f]{16,}\Z")


def number_text(value: Any) -> str:
    """Return floats to four significant digits, "–" for None, everything else as text, see `printable`."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def spread_text(value: Any, spread: float | None, repeats: int) -> str:
    """Return a value as a text: "0.851 ± 0.003" with its standard error, if known; of several repeats with the standard
    deviation, "0.851 ± 0.003 (n=3)".
    """
    shown = "" if spread is None else f" ± {spread:.2g}"
    return f"{number_text(value)}{shown}" + (f" (n={repeats})" if repeats > 1 else "")


def metric_text(row: TrialRow, name: str) -> str:
    """Return the value of a metric at the epoch that ranks a trial, or of a configuration, with its spread."""
    return spread_text(row.ranked.get(name), row.spreads.get(name), len(row.members))


def printable(text: str, lines: bool = False) -> str:
    """The text of a user, safe for a terminal: control, unencodable and, unless `lines`, newline characters escaped."""
    if text.isprintable():  # nearly every text is, and this looks at it once
        return text
    return "".join(char if _is_harmless(char, lines) else char.encode("unicode_escape").decode() for char in text)


def _is_harmless(char: str, lines: bool) -> bool:
    """Whether a character is no control character, format character or surrogate; all kinds of spaces are harmless."""
    return char.isprintable() or (lines and char in "\n\t") or unicodedata.category(char) == "Zs"


def finite_or_none(value: float | None) -> float | None:
    """Return a number for JSON: None for NaN and the infinities."""
    return value if value is not None and math.isfinite(value) else None


def rounded(value: float, digits: int) -> str:
    """Return a float to `digits` significant digits, in few characters: "0.083", "170", "3.2e-4"."""
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if value == 0 or -3 < int(exponent) < 5:
        return repr(float(f"{value:.{digits}g}")).removesuffix(".0")
    return f"{repr(float(mantissa)).removesuffix('.0')}e{int(exponent)}"


def shortened(text: str) -> str:
    """Return a cause, shortened to fit a line."""
    return text if len(text) <= _MAX_CAUSE_LENGTH else text[: _MAX_CAUSE_LENGTH - 1] + "…"


def rate_text(rate: float, what: str) -> str:
    """Return a rate per second in the unit of time with the most readable number: "12 epochs/s", "4.5 epochs/min"."""
    for seconds, unit in ((1, "s"), (60, "min")):
        if rate * seconds >= 1:
            return f"{rounded(rate * seconds, 2)} {what}/{unit}"
    return f"{rounded(rate * 3600, 2)} {what}/h"


def duration_text(seconds: float | None) -> str:
    """Return hours, minutes and seconds, "1:02:03"; "–" for None."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def time_text(snapshot: Snapshot) -> str:
    """Return the running time: "running time 0:04:26"; of a resumed study also "in 2 runs, 0:12:10 since the start"."""
    running = f"running time {duration_text(snapshot.elapsed)}"
    if snapshot.runs == 1:
        return running
    until = "since the first start" if snapshot.pid is not None else "from the first start to the last event"
    return f"{running} in {snapshot.runs} runs, {duration_text(snapshot.span)} {until}"


def config_text(config: Config) -> str:
    """Return a config on one line: "lr=0.001 optimizer.name=sgd"."""
    return " ".join(f"{printable(name)}={leaf_text(value)}" for name, value in flatten(config).items())


def best_text(snapshot: Snapshot) -> str:
    """The best trial on a line, "accuracy 0.98 (trial 7, epoch 3) with lr=0.1", or the front's first and its size."""
    lines = best_texts(snapshot)
    more = len(snapshot.front) - 1
    return f"{lines[0]}, and {more} more that nothing dominates" if more > 0 else lines[0]


def best_texts(snapshot: Snapshot) -> list[str]:
    """Return the best trial on a line; for several metrics the first trials of the front, a line each."""
    best = snapshot.front if snapshot.best is None else (snapshot.best,)
    if not best:
        return [_no_best_text(snapshot)]
    lines = [_best_line(snapshot, each) for each in best[:_MAX_BEST_LINES]]
    if len(best) > _MAX_BEST_LINES:
        lines.append(f"and {len(best) - _MAX_BEST_LINES} more, see shoal best")
    return lines


def _no_best_text(snapshot: Snapshot) -> str:
    names = snapshot.metric if isinstance(snapshot.metric, str) else " or ".join(snapshot.metric)
    if snapshot.least_violation is not None:
        trial, violation = snapshot.least_violation
        return f"– (none is feasible; trial {trial} violates the constraints least, by {violation:.3g})"
    return f"– (all reported values of {names} are NaN)" if snapshot.all_nan else "–"


def hypervolume_text(found: Hypervolume, metrics: Sequence[str]) -> str:
    """Return a hypervolume with its reference: "hypervolume 1.234 within accuracy 0.09, valid_loss 2.2"."""
    point = ", ".join(f"{printable(name)} {number_text(x)}" for name, x in zip(metrics, found.reference, strict=True))
    return f"hypervolume {found.value:.6g} within {point}"


def _best_line(snapshot: Snapshot, best: Best) -> str:
    names = (snapshot.metric,) if isinstance(snapshot.metric, str) else snapshot.metric
    values = best.value if isinstance(best.value, tuple) else (best.value,)
    reached = " ".join(
        f"{printable(name)} {spread_text(value, best.spreads.get(name), best.repeats)}"
        for name, value in zip(names, values, strict=True)
    )
    varied = {
        name: value
        for name, value in flatten(best.config).items()
        if name not in snapshot.constants or value != snapshot.constants[name]
    }
    chosen = f" with {config_text(varied)}" if varied else ""
    return f"{reached} ({_place_text(best)}){chosen}"


def _place_text(best: Best) -> str:
    """Return where the best values were reached: "trial 2, epoch 8; last 0.966", the last ones if they differ."""
    trial = f"trial {best.trial}" if best.repeats == 1 else f"median trial {best.trial}"
    epoch = "" if best.epoch is None else f", epoch {best.epoch}"
    if best.last is None:
        return f"{trial}{epoch}"
    last = best.last if isinstance(best.last, tuple) else (best.last,)
    return f"{trial}{epoch}; last {' '.join(map(number_text, last))}"


def epochs_text(snapshot: Snapshot) -> str:
    """Return the epochs done of all epochs: "25 of 69"; if results decide how many there are, "25 of 184 to 1728"."""
    least, most = snapshot.epochs_total, snapshot.epochs_most
    return f"{snapshot.epochs_done} of {least}" + (f" to {most}" if most > least else "")


def progress_text(found: EpochProgress) -> str:
    """Return how far trials are in an epoch: "2 trials at step 120 of 469 of epoch 1, loss 0.43, 9.2 steps/s"."""
    loss = "" if found.loss is None else f", {'lowest ' * (len(found.trials) > 1)}loss {number_text(found.loss)}"
    step = f"step {found.step} of {found.steps} of epoch {found.epoch}"
    rate = "" if found.steps_per_second is None else f", {rate_text(found.steps_per_second, 'steps')}"
    return f"{trials_text(len(found.trials))} at {step}{loss}{rate}"


def progress_texts(snapshot: Snapshot, most: int = 3) -> list[str]:
    """Return how far arrays are in their epochs, a line each, at most `most` and one for the others; those of most
    trials first.
    """
    ordered = sorted(snapshot.progress, key=lambda each: -len(each.trials))
    lines = [progress_text(each) for each in ordered[:most]]
    others = f"{sum(len(each.trials) for each in ordered[most:])} more in {len(ordered[most:])} other jobs or arrays"
    return lines + [others] * (len(ordered) > most)


def left_text(snapshot: Snapshot) -> str:
    """Return the time left, "at least 0:03:04 left"; "" if the study is not running."""
    if snapshot.pid is None or snapshot.finished or snapshot.paused or snapshot.all_paused:
        return ""
    grows = snapshot.seconds_left is not None and snapshot.epochs_most > snapshot.epochs_total
    timeout = timeout_text(snapshot)
    return f"{'at least ' if grows else ''}{duration_text(snapshot.seconds_left)} left{timeout and f', {timeout}'}"


def timeout_text(snapshot: Snapshot) -> str:
    """Return what is left of the timeout, "timeout in 0:03:04", or what it has ended; "" if it has no effect."""
    if snapshot.time_left is None or snapshot.finished or snapshot.end not in ("", "timeout"):
        return ""
    if snapshot.time_left:
        return f"timeout in {duration_text(snapshot.time_left)}"
    unfinished = trials_text(snapshot.trials - snapshot.ended)
    before = "" if snapshot.epochs_done else " before a trial reported"
    return f"ended by its timeout{before}; {unfinished} open"


def savings_text(found: Savings, unit: str) -> str:
    """The gain of fusing and packing, and its base, on a line: "faster by 4.4 s, less 5.5 s of measuring: no net gain";
    for `unit` see `Snapshot`. The rounded times add up: two of them are calculated from the others.
    """
    exact = found.alone < _EXACT_SECONDS
    saved, measuring, together = (round(x, 1 if exact else 0) for x in (found.saved, found.measuring, found.together))
    faster = saved + measuring

    def text(seconds: float) -> str:
        return f"{seconds:.1f} s" if exact else duration_text(seconds)

    least = 0.05 if exact else 0.5  # less is shown as 0
    took = f"{found.epochs} {unit} took {text(together)}, one trial at a time {text(together + faster)}"
    if faster < least:
        return f"no gain: {took}; measuring took {text(measuring)}"
    packed = f" ({text(found.packed)} of it by packing)" if found.packed >= least else ""
    net = f"{text(saved)} of device time saved" if saved >= least else "no net gain"
    return f"faster by {text(faster)}{packed}, less {text(measuring)} of measuring: {net}; {took}"


def speedup_text(found: Speedup) -> str:
    """Whether it helps to train trials together, in a sentence."""
    if found.most < SMALL_SPEEDUP:
        full = f"training steps of one of these models already fill a {found.fills}"
        why = full if found.fills else "training these models together gains little"
        return f"{why}: expect 1.0 to {SMALL_SPEEDUP:.1f} times the speed of one trial at a time, as measured"
    what = f"arrays of {found.members}" if found.members > 1 else "trials packed into one process"
    least, most = f"{found.least:.1f}", f"{found.most:.1f}"
    times = most if least == most else f"{least} to {most}"
    return f"training steps of {what} are {times} times as fast as those of one trial at a time, as measured"


def verdict_texts(found: Sequence[Verdict]) -> list[str]:
    """Return the verdicts of structures, a line each, up to a number of lines."""
    lines = list(map(verdict_text, found[:_MAX_VERDICTS]))
    return lines + [f"{len(found) - len(lines)} more, see shoal status --json"] * (len(found) > len(lines))


def verdict_text(found: Verdict) -> str:
    """Whether trials of a structure train as arrays or in plain PyTorch, why, and what was proven, on a line."""
    count = f"{found.members} member{'s' if found.members > 1 else ''}"
    members = f"{count} (trial{'s' if len(found.trials) > 1 else ''} {_first_numbers(found.trials)})"
    if found.refusal:
        return f"plain, {members}{_end_text(found)}: {_line(found.refusal)}"
    if not found.checks:
        return f"an array of {members}; not compared with plain PyTorch"
    return f"{_training_text(found)}, {members}; equal to plain PyTorch at {_checks_text(found)}"


def trial_verdict_text(found: Verdict) -> str:
    """The same of one trial, shorter; of its structure if it was not compared itself."""
    if found.refusal:
        return f"plain{_end_text(found)}: {_line(found.refusal)}"
    if not found.checks:
        return "in an array, not compared"
    whose = "" if len(found.trials) == 1 else "others of its structure "
    return f"{_training_text(found)}: {whose}equal at {_checks_text(found)}"


def _training_text(found: Verdict) -> str:
    if found.members == 1:
        return "alone"
    return "plain, as that is faster" if found.is_slower else "fused"


def _end_text(found: Verdict) -> str:
    """Return until when trials that were refused were an array; "" if they never were."""
    if found.step:
        return f", fused for {found.step} step{'s' if found.step > 1 else ''} of epoch {found.epoch + 1}"
    return f", fused before epoch {found.epoch + 1}" if found.checks else ""


def _checks_text(found: Verdict) -> str:
    checks = f"{found.checks} check{'s' if found.checks > 1 else ''}"
    return f"{checks}, largest difference {rounded(found.difference, 1)}"


def _line(text: str) -> str:
    return " ".join(text.split())


def study_state_text(snapshot: Snapshot) -> str:
    """Return the state of a study: "running", "paused", "waits for paused trials", "not running", or how it ended."""
    if snapshot.end:
        return {"finished": "complete", "timeout": "ended by its timeout"}.get(snapshot.end, snapshot.end)
    if snapshot.paused:
        return "paused"
    if snapshot.pid is None:
        return "not running"
    return "waits for paused trials" if snapshot.all_paused else "running"


def states_text(snapshot: Snapshot) -> str:
    """Return the number of trials in each state: "3 waiting, 2 running, 7 complete, 20 to come"."""
    parts = [f"{count} {state}" for state, count in state_counts(snapshot).items()]
    if snapshot.unproposed:
        parts.append(f"{snapshot.unproposed} to come")
    return ", ".join(parts) or "none yet"


def state_counts(snapshot: Snapshot) -> dict[str, int]:
    """State in words, as of `trial_state_text` -> number of its trials; only states that trials have."""
    held = {number for numbers in snapshot.waiting.values() for number in numbers} & set(snapshot.held)
    return counts_in_words(snapshot.states, len(held), snapshot.pid is not None)


def counts_in_words(states: Mapping[TrialState, int], paused: int, runs: bool) -> dict[str, int]:
    """As `state_counts`, of trials in these states; users have paused `paused` of the pending ones."""
    found = {state_text(state, runs): count for state, count in states.items()}
    if paused:
        found |= {_WAITING: found[_WAITING] - paused, _PAUSED: paused}
    return {state: count for state, count in found.items() if count}


def trial_state_text(row: TrialRow, runs: bool) -> str:
    """The state of a trial in words for users: "paused" if a user has paused it, "waiting" for a device, "waiting for
    others" while its algorithm holds it at the end of a budget.

    Args:
        runs: Whether a process runs the study.
    """
    return _PAUSED if row.state is TrialState.PENDING and row.paused_by else state_text(row.state, runs)


def state_text(state: TrialState, runs: bool) -> str:
    """A state in words, as of `trial_state_text`, of trials that no user has paused."""
    return {TrialState.PENDING: _WAITING, TrialState.PAUSED: _HELD}.get(state) or state_name(state, runs)


def trials_text(count: int) -> str:
    """Return a number of trials, in words."""
    return "1 trial" if count == 1 else f"{count} trials"


def numbered_trials(numbers: Sequence[int]) -> str:
    """Return a number of trials with the numbers of the first ones: "12 trials (0, 1, 2, …)"."""
    return f"{trials_text(len(numbers))} ({_first_numbers(numbers)})"


def _first_numbers(numbers: Sequence[int]) -> str:
    return ", ".join([*map(str, numbers[:_MAX_NAMED]), *["…"] * (len(numbers) > _MAX_NAMED)])


def task_edit_text(edit: TaskEdit) -> str:
    """Return a line with the time of an edit of the task, its files, and the trials that had not ended."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(edit.time))
    files = ", ".join(Path(path).name for path in edit.files)
    unended = f"trials {numbers_text(edit.open)} had not ended, those" if edit.open else "trials"
    return f"{files} edited when it continued at {when}: {unended} from {edit.next} on had not begun"


def request_text(request: Request) -> str:
    """Return a request that was not carried out yet, in words: "clone of trial 3 with lr=0.1 to epoch 9"."""
    given = request.arguments
    text = f"of trial {given['source']} " if "source" in given else ""
    if "trials" in given:
        text += f"to {given['trials']} trials"
    if "config" in given:
        text += f"with {config_text(given['config'])} to epoch {given['epochs']}"
    return _action_text(
        request.verb,
        request.trials,
        text or str(given.get("policy", given.get("keep", ""))) or " ".join(request.devices),
    )


def intervention_text(each: Intervention) -> str:
    """Return a line with the time of a request, its results, and refusals with their reasons."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.time))
    carried_out = each.trials or each.devices or each.text or not each.refused
    done = [_action_text(each.verb, each.trials, each.text or " ".join(each.devices))] if carried_out else []
    return f"{when} {'; '.join([*done, *(f'not done ({each.verb}): {why}' for why in each.refused)])}"


def _action_text(verb: str, trials: Sequence[int], text: str = "") -> str:
    """Return a request in words: "pause trials 3, 7", "clone 1000000 of trial 3"."""
    if verb == "clone":
        return " ".join(filter(None, [verb, *map(str, trials), text]))
    trials_part = f" trial{'s' if len(trials) > 1 else ''} {', '.join(map(str, trials))}" if trials else ""
    action = verb.removesuffix(" trial") if trials_part else verb
    return f"{action}{trials_part}{f': {text}' if text and trials_part else f' {text}' if text else ''}"


def structure_text(structure: str) -> str:
    """Return a structure with its digest shortened: "1f0a33be", and of a program "opaque train 06cc46cf"."""
    return _DIGEST_PATTERN.sub(lambda match: match[0][:_DIGEST_LENGTH], structure)


def key_text(steps: str) -> str:
    """Return a structure and its batch size: "1f0a33be, batches of 32"."""
    structure, _, size = steps.rpartition(" x ")
    return f"{structure_text(structure)}, batches of {size}" if structure else steps


def leaf_text(value: Any) -> str:
    """Return a value of a config, of which None is one."""
    return "None" if value is None else number_text(value)


def batch_text(space: Space, task: str | None) -> str:
    """The batch size, as far as the space determines it; `task` is the name of a task that overrides `batch_size`."""
    if task is not None:
        return f"batch size as {task}.batch_size says"
    leaf = space.leaves().get("batch_size")
    if leaf is None:
        return "batch size 32 (default: the config has no batch_size), or the DataLoader's"
    values = ", ".join(map(str, leaf.values))
    missing = ", or 32 (default) or the DataLoader's where the config has no batch_size" if leaf.optional else ""
    return f"batch size{'s' if len(leaf.values) > 1 else ''} {values}{missing}"
