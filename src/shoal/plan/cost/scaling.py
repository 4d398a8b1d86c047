"""Scaling of a job: its run time on a part of a device or on several devices (Fluid, section 4).

The fits follow section 4.2.2. A marginal benefit is the part of the time that one more trial, or one more device,
saves; 0 means no benefit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log
from statistics import fmean

__all__ = [
    "Scaling",
    "fit_alpha",
    "fit_beta",
    "max_jobs_per_device",
    "measured_scaling",
    "multi_device_scaling",
    "packing_benefit",
    "shared_device_scaling",
]

THRESHOLD = 0.05
"""O_th, which the paper leaves open. Times of a few iterations scatter by a few per cent, so less is not a gain."""


@dataclass(frozen=True)
class Scaling:
    """A job's run time by its width w, in devices: h(w), as a multiple of its time alone on one device.

    h(w) = α^(1/w - 1) for 0 < w < 1, on a share of a device; h(w) = β^(w - 1) / w for w ≥ 1, on several.

    Args:
        alpha: α, overhead of sharing: the factor by which half a device lengthens a job; 1 means no slow-down.
        beta: β, overhead of scaling: 1 if w devices are w times as fast.
        max_jobs: c, largest number of jobs of this kind on one device; the least width is 1/c.
        trial: Whether one job more may be tried on one device, as c is 1 and no measurement of two speaks against it.
        devices: d, largest number of devices of a job.
        grows: Whether a job may be tried on one device more than d, as no measurement of so many speaks against it.
    """

    alpha: float = 2.0
    beta: float = 1.0
    max_jobs: int = 1
    devices: int = 1
    resize_seconds: float = 0.0
    trial: bool = False
    grows: bool = False

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not 1 <= value < float("inf"):  # also refuses NaN
                raise ValueError(f"a scaling's {name} must be finite and at least 1, got {value!r}")
        for name in ("max_jobs", "devices"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"a scaling's {name} must be an integer of at least 1, got {value!r}")
        if not 0 <= self.resize_seconds < float("inf"):
            raise ValueError(f"a scaling's resize_seconds must be finite and not negative, got {self.resize_seconds!r}")

    @property
    def may_share(self) -> bool:
        """Whether a device may hold another job beside one of this kind."""
        return self.max_jobs > 1 or self.trial

    @property
    def max_devices(self) -> int:
        """Largest number of devices of a job, one that is tried included."""
        return self.devices + self.grows

    def factor(self, width: float) -> float:
        """Return h(w) / h(1); inf on overflow."""
        if not width > 0:
            raise ValueError(f"a width is above 0 devices, got {width!r}")
        try:
            if width < 1:
                return self.alpha ** (1 / width - 1)  # type: ignore[no-any-return]
            return self.beta ** (width - 1) / width  # type: ignore[no-any-return]
        except OverflowError:
            return inf


def packing_benefit(trials: int, together: Sequence[float], before: Sequence[float]) -> float:
    """Return the marginal benefit O^p of packing the p-th trial on a device.

    O^p = 1 - (p-1)/p · avg(T^p) / avg(T^(p-1)), which is 1 - rate(p-1) / rate(p), with rate the iterations per second
    of all trials. Perfect packing, T^p = T^(p-1), gives 1/p; none, T^p = p/(p-1) · T^(p-1), gives 0.

    Args:
        trials: p, at least 2.
        together: T^p, seconds of an iteration of each of the p trials.
        before: T^(p-1), the same with one trial fewer.
    """
    if trials < 2:
        raise ValueError(f"a benefit of packing needs at least 2 trials, got {trials!r}")
    return 1 - (trials - 1) / trials * _checked_mean(together, trials) / _checked_mean(before, trials - 1)


def max_jobs_per_device(times: Mapping[int, Sequence[float]], threshold: float = THRESHOLD) -> int:
    """Return c, the number of trials to pack on a device, from times measured with 1, 2, 3 ... of them.

    The paper prints c = arg max_p O^p > O_th and describes the point where the benefit falls below O_th. This is the p
    before the first O^p of at most O_th. The largest p with O^p > O_th differs if packing first harms and then
    recovers: O^p compares with p - 1 trials only, so a gain over a slow p - 1 is not a gain over one trial.

    Args:
        times: p -> T^p, seconds of an iteration of each of p trials; times after the first missing p are ignored.
        threshold: O_th.
    """
    _checked_mean(times.get(1, ()), 1)
    trials = 1
    while trials + 1 in times and packing_benefit(trials + 1, times[trials + 1], times[trials]) > threshold:
        trials += 1
    return trials


def fit_alpha(times: Mapping[int, Sequence[float]]) -> float:
    """Return α of h(1/p) = h(1) · α^(p-1), at least 1.

    Least squares of ln(avg T^p / avg T^1) on p - 1, through the origin.

    Args:
        times: p -> T^p, as for `max_jobs_per_device`, of any p; 1 must be among them.
    """
    alone = _checked_mean(times.get(1, ()), 1)
    return _fit_base(
        {trials - 1: log(_checked_mean(seconds, trials) / alone) for trials, seconds in times.items() if trials > 1}
    )


def fit_beta(times: Mapping[int, float]) -> float:
    """Return β of h(w) = h(1) / w · β^(w-1), at least 1.

    Least squares of ln(w · T_w / T_1) on w - 1, through the origin.

    Args:
        times: w -> seconds of an iteration of the same batch on w devices; 1 must be among them.
    """
    alone = _checked_mean((times[1],) if 1 in times else (), 1)
    return _fit_base({w - 1: log(w * _checked_mean((seconds,), w) / alone) for w, seconds in times.items() if w > 1})


def measured_scaling(
    shared_times: Mapping[int, Sequence[float]],
    multi_device_times: Mapping[int, float],
    *,
    max_devices: int = 1,
) -> Scaling:
    """Return the scaling of a kind of trial on a kind of device, from a few iterations of it.

    c is lowered until α < c/(c-1), and d until β < 1 + 1/d: in these ranges h(w) is worth its devices (Lemmas 4 and 6).
    So the more careful one of the fitted curve and the times decides. If c is 1, α is that of two trials, so that the
    cost of having let in a second one is known.

    Args:
        shared_times: p -> T^p, seconds of an iteration of each of p trials on one device, including p = 1.
        multi_device_times: w -> seconds of an iteration on w devices; may be empty.
    """
    max_jobs = max_jobs_per_device(shared_times)
    measured = [p for p in range(1, max(max_jobs, 2) + 1) if p in shared_times]
    alpha = fit_alpha({p: shared_times[p] for p in measured}) if len(measured) > 1 else Scaling.alpha
    while max_jobs > 1 and alpha >= max_jobs / (max_jobs - 1):
        max_jobs -= 1
    has_several = any(devices > 1 for devices in multi_device_times)
    beta = fit_beta(multi_device_times) if has_several else Scaling.beta
    devices = max_devices if has_several else 1
    while devices > 1 and beta >= 1 + 1 / devices:
        devices -= 1
    return Scaling(alpha, beta, max_jobs, devices)


def shared_device_scaling(crowding: Mapping[int, float], expected: int) -> Scaling | None:
    """Return the scaling of a job on a share of a device, from measured crowding of jobs of its key.

    While every additional job has paid, c may be one more than the measured number of jobs.

    Args:
        crowding: Jobs on a device -> time of one of them over its time alone.
        expected: c by the compute demand of the jobs, which holds until measurements differ.
    """
    times = _relative_times(crowding)
    if len(times) == 1:
        return None
    found = measured_scaling(times, {})
    if found.max_jobs < max(times):
        return found
    max_jobs = max(expected, found.max_jobs + 1)
    while max_jobs > found.max_jobs and found.alpha >= max_jobs / (
        max_jobs - 1
    ):  # Lemma 4: h(w) is not worth its devices
        max_jobs -= 1
    return replace(found, max_jobs=max_jobs)


def multi_device_scaling(spreading: Mapping[int, float], scaling: Scaling) -> Scaling:
    """Return the scaling of a job, with its measured β and d on several devices.

    d is the last number of devices up to which each further one makes a step faster: a device that saves nothing is
    given back, one that saves a little would else be idle. While every measured number has paid, one more may be tried.

    Args:
        spreading: Devices -> time of a step on all of them over that on one.
    """
    times = {1: 1.0, **spreading}
    devices = 1
    while times.get(devices + 1, inf) < times[devices]:
        devices += 1
    paying = {number: times[number] for number in range(1, devices + 1)}
    beta = fit_beta(paying) if devices > 1 else Scaling.beta
    return replace(scaling, beta=beta, devices=devices, grows=devices + 1 not in times)


def _fit_base(logarithms: Mapping[int, float]) -> float:
    """Return the b of b^x that fits best in logarithms, at least 1, since only noise makes it smaller."""
    if not logarithms:
        raise ValueError("the fit of an overhead needs a time of 1 and of more than 1; measure 2 as well")
    slope = sum(x * y for x, y in logarithms.items()) / sum(x * x for x in logarithms)
    return max(1.0, exp(slope))


def _checked_mean(times: Sequence[float], of: int) -> float:
    if not times or not all(0 < time < float("inf") for time in times):
        raise ValueError(f"seconds of an iteration with {of} must be measured, finite and above 0, got {list(times)!r}")
    return fmean(times)


def _relative_times(crowding: Mapping[int, float]) -> dict[int, tuple[float]]:
    """Return number of jobs -> time of one job over its time alone; missing numbers follow from the next measured
    one by α.
    """
    times: dict[int, tuple[float]] = {1: (1.0,)}
    for jobs in sorted(crowding):
        alpha = crowding[jobs] ** (1 / (jobs - 1))
        times |= {fewer: (alpha ** (fewer - 1),) for fewer in range(len(times) + 1, jobs)}
        times[jobs] = (crowding[jobs],)
    return times
