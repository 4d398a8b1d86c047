"""The device time that fusing has saved in a study, relative to the same steps one trial after another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.demand import Profile
from shoal.core.job import Purpose
from shoal.cost.estimate import fused_gain
from shoal.cost.history import history_path, records
from shoal.reporting.overview import Bar, Usage

__all__ = ["FusionGain", "fusion_gain", "measured_profiles"]


@dataclass(frozen=True)
class FusionGain:
    """Training time of a study, and an estimate of the time that fused steps have saved.

    Args:
        trained: Device seconds of all training jobs; those of concurrent jobs are all counted.
        fused: Part of `trained` in arrays of several trials.
        measured: Part of `fused` in arrays of a size whose speed-up was measured on this machine.
        saved: Device seconds that the steps of `measured` would have taken in addition, one trial after another.
        trials_at_once: Mean number of trials of a training job, weighted by its seconds; 0 before the first.
        packed: Part of `trained` in jobs with several arrays.
    """

    trained: float
    fused: float
    measured: float
    saved: float
    trials_at_once: float
    packed: float


def fusion_gain(
    bars: Sequence[Bar], usage: Sequence[Usage], profiles: Mapping[tuple[str, str], Sequence[Profile]]
) -> FusionGain:
    """Sum what fusing has saved over the training jobs of a study.

    The arrays of a job take turns, so its seconds are divided among them by their numbers of trials.

    Args:
        bars: Jobs of the study.
        usage: Devices of the study.
        profiles: As `measured_profiles` returns them.
    """
    kinds = {use.device.name: use.device.kind for use in usage}
    trained = fused = measured = saved = members = packed = 0.0
    for bar in bars:
        if bar.job.purpose is not Purpose.TRAIN or not bar.job.trials:
            continue
        seconds = bar.end - bar.begin
        trained += seconds
        members += seconds * len(bar.job.trials)
        packed += seconds if len(bar.job.keys) > 1 else 0.0
        for key, trials in bar.job.members.items():
            if len(trials) < 2:
                continue
            part = seconds * len(trials) / len(bar.job.trials)
            fused += part
            known = profiles.get((key, kinds.get(bar.job.device, "")), ())
            gain = next((gain for profile in known if (gain := fused_gain(profile, len(trials))) is not None), None)
            if gain is not None:
                measured += part
                saved += part * (gain - 1)
    return FusionGain(trained, fused, measured, saved, members / trained if trained else 0.0, packed)


def measured_profiles() -> dict[tuple[str, str], list[Profile]]:
    """Return the profiles of this machine's job history: (`FusionKey.steps`, kind of device) -> profiles.

    Raises:
        ShoalError: The file is not a job history.
    """
    found: dict[tuple[str, str], list[Profile]] = {}
    for record in records(history_path()):
        if record.profile is not None:
            key = f"{record.structure} x {record.batch_size}"
            found.setdefault((key, record.kind), []).append(record.profile)
    return found
