"""Costs of trials on devices: one way to observe, and one way to ask.

Profile jobs, training jobs, shared jobs and failed jobs are observed in one way:

    profile job         ─┐
    epoch of a training ─┤                                        ┌─ job history (on disk)
    memory, out of it   ─┼─▶ observe ─▶ weighted means ─▶ profile ─┤
    time of a pack      ─┘                                        └─ of ─▶ cost ─▶ planner

A new measurement is a field of `Profile`, which says beside its declaration how it merges with earlier values, and a
method of `Cost` if a plan depends on it.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import combinations
from math import ceil, inf
from typing import Any

from shoal.core.array import Array, FusionKey
from shoal.core.demand import MergeRule, Profile
from shoal.core.device import Device
from shoal.core.event import MemoryMeasured, Profiled, RelativeTimeMeasured, TeamMeasured
from shoal.core.job import Job, Purpose
from shoal.core.space import flatten
from shoal.plan.cost.cost import Cost
from shoal.plan.cost.history import History

__all__ = ["Costs", "EpochTimes", "Observation", "OutOfMemoryObserved", "WeightedMeans"]

MIN_WEIGHT = 0.3
"""Least weight of the newest observation. The first observations have equal weights, which are larger."""

MIN_RELATIVE_CHANGE = 0.03
"""Relative change from which an estimate is replaced, which leads to a new plan."""

RESET_FACTOR = 1.25
"""Factor from which a time or memory counts as wrong, and older observations are discarded."""

OUT_OF_MEMORY_FACTOR = 1.5
"""Factor for the memory of a member after its array ran out of memory, if no better estimate is known."""


@dataclass(frozen=True)
class EpochTimes:
    """Epochs of a job with one array, with constant members and constant jobs on the device.

    Args:
        seconds: Seconds of the shortest epoch.
        alone: Seconds of an epoch of as many members of the key alone on the device, or None if never observed.
    """

    jobs: int
    members: int
    seconds: float
    alone: float | None = None


@dataclass(frozen=True)
class OutOfMemoryObserved:
    """Out-of-memory failure of a job."""

    arrays: tuple[Array, ...]


Observation = Profiled | RelativeTimeMeasured | MemoryMeasured | TeamMeasured | EpochTimes | OutOfMemoryObserved


class WeightedMeans:
    """Exponentially weighted means with counts of observations; an initial mean counts as one observation."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def observe(self, name: Hashable, known: float | None, observation: float, reset_factor: float = inf) -> float:
        """Return the mean including one more observation, which replaces it if they differ by `reset_factor`; `known`
        itself if the change is small.
        """
        if known is None or not observation / reset_factor <= known <= observation * reset_factor:
            self._counts[name] = 1
            return observation
        count = self._counts[name] = max(1, self._counts[name]) + 1
        mean = known + max(MIN_WEIGHT, 1 / count) * (observation - known)
        return mean if abs(mean - known) > MIN_RELATIVE_CHANGE * abs(known) else known


class Costs:
    """Observes what jobs cost, and answers what trials of a key cost on a kind of device."""

    def __init__(self, history: History, task: str = "") -> None:
        self.version = 0
        """Number of changes that can affect a plan."""
        self._history = history
        self._task = task
        self._means = WeightedMeans()
        self._peaks: dict[str, int] = {}  # measured peak bytes by running job

    def of(self, key: FusionKey, kind: str) -> Cost | None:
        """Return the cost of trials of a key on a kind of device; None if they were never measured there."""
        profile = self.profile(key, kind)
        return None if profile is None else Cost(profile)

    def profile(self, key: FusionKey, kind: str) -> Profile | None:
        """Return the measurements of a key on a kind of device, for the workers that train it there."""
        return self._history.get(key.structure, key.data, key.batch_size, kind)

    def observe(self, observation: Observation, job: Job, device: Device) -> None:
        """Update profiles with an observation."""
        match observation:
            case Profiled():
                self._observe_profile(observation, job, device.kind)
            case RelativeTimeMeasured():
                self._observe_relative_time(observation, device.kind)
            case MemoryMeasured():
                self._peaks[job.id] = observation.memory
                self._observe_memory(observation, device)
            case TeamMeasured():
                self._observe_team(observation, device.kind)
            case EpochTimes():
                self._observe_epochs(observation, job.arrays[0].key, device.kind)
            case OutOfMemoryObserved():
                self._observe_out_of_memory(observation, self._peaks.get(job.id, 0), device)

    def end(self, job: str) -> None:
        """Remove the peak memory of a finished job."""
        self._peaks.pop(job, None)

    def _observe_profile(self, found: Profiled, job: Job, kind: str) -> None:
        """Merge a profile into what is known, as each of its fields says.

        A profile job whose process was limited to a share of the device only adds its speed there.
        """
        key, profile = found.key, found.profile
        if members := [member for array in job.arrays if array.key == key for member in array.members]:
            configs = [flatten(member.trial.config) for member in members]
            self._history.put_task(key.structure, key.data, key.batch_size, self._task, configs)
        known, profiling = self.profile(key, kind), job.purpose is Purpose.PROFILE
        if job.compute_limit is not None and profiling:
            if known is not None and found.compute_limit is not None:
                self._put(key, kind, _with_share(known, profile, found.compute_limit))
        elif known is None:
            self._put(key, kind, profile)
        else:
            begun = next((array.profile for array in job.arrays if array.key == key), None) or profile
            source = "program" if key.opaque else "profiling" if profiling else "training"
            merged: dict[str, Any] = {}
            for field in fields(Profile):
                values = [getattr(each, field.name) for each in (known, profile, begun)]
                merged[field.name] = self._merged(field.metadata[source], (key, kind, field.name), *values)
            self._put_if_changed(key, kind, known, Profile(**merged))

    def _merged(self, rule: MergeRule, name: Hashable, known: Any, found: Any, begun: Any) -> Any:
        """Return the merged value of a measurement; `begun` is the value with which the job began."""
        match rule:
            case "newest":
                return found
            case "known":
                return known
            case "measured":
                return found or known
            case "mean":
                return self._updated_means(name, known, found)
            case "largest":
                return max(known, found)
            case "least":
                return {**known, **{size: min(value, known.get(size, value)) for size, value in found.items()}}
            case "added":
                return {**known, **{size: value for size, value in found.items() if size not in begun}}

    def _observe_relative_time(self, found: RelativeTimeMeasured, kind: str) -> None:
        """Take the relative time of a pack for each pair in it; measurements of the pair alone take precedence."""
        known = self._history.relative_times(kind)
        steps = sorted(key.steps for key in found.keys)
        for pair in dict.fromkeys(combinations(steps, 2)):
            if len(steps) == 2 or pair not in known:
                relative_time = self._means.observe((pair, kind), known.get(pair), found.relative_time)
                self._history.put_relative_time(pair, kind, relative_time)
        self.version += 1

    def _observe_team(self, found: TeamMeasured, kind: str) -> None:
        if (profile := self.profile(found.key, kind)) is None:
            return
        relative = {devices: step / found.seconds[1] for devices, step in found.seconds.items() if devices > 1}
        spreading = self._updated_means((found.key, kind, "spreading"), profile.spreading, relative)
        self._put_if_changed(found.key, kind, profile, replace(profile, spreading=spreading))

    def _observe_epochs(self, observation: EpochTimes, key: FusionKey, kind: str) -> None:
        """Update the step times by epochs of a job alone on its device, or the crowding by epochs of a shared device.

        The first epochs of several members that train together give the step time of that size.
        Profiles hold times of steps that are not compiled. So if steps may be compiled, a shorter epoch is ignored, and
        crowding needs epochs alone for comparison.
        """
        if (profile := self.profile(key, kind)) is None:
            return
        compiled = max(profile.compiled_gain.values(), default=1.0) > 1
        cost = Cost(profile)
        expected = cost.seconds([1] * observation.members) + cost.fetching([1])
        if observation.jobs == 1 and observation.members > 1 and cost.is_untried:
            step_count = cost.seconds([1]) / profile.step_seconds[1]
            step = max(0.0, observation.seconds - cost.fetching([1])) / step_count
            self._put(key, kind, replace(profile, step_seconds={**profile.step_seconds, observation.members: step}))
        elif observation.jobs == 1:
            if not compiled or observation.seconds >= expected:
                factor = self._means.observe((key, kind, "steps"), 1.0, observation.seconds / expected, RESET_FACTOR)
                steps = {size: each * factor for size, each in profile.step_seconds.items()}
                self._put_if_changed(key, kind, profile, replace(profile, step_seconds=steps))
        elif observation.alone is not None or not compiled:
            factors = {
                observation.jobs: observation.seconds / (expected if observation.alone is None else observation.alone)
            }
            crowding = self._updated_means((key, kind, "crowding"), profile.crowding, factors)
            self._put_if_changed(key, kind, profile, replace(profile, crowding=crowding))

    def _observe_memory(self, observation: MemoryMeasured, device: Device) -> None:
        """Raise the memory of all profiles of a process in proportion, if it took far more than they predict.

        The measurement is capped at the memory of the device, else nothing would fit there any more.
        """
        known = {key: self.profile(key, device.kind) for key in observation.members}
        profiles = {key: profile for key, profile in known.items() if profile is not None}
        if not profiles or len(profiles) < len(known):
            return
        expected = max(each.base_memory for each in profiles.values())
        expected += sum(count * profiles[key].member_memory for key, count in observation.members.items())
        factor = min(observation.memory, device.memory) / expected if expected else 0.0
        if factor > RESET_FACTOR:
            for key, profile in profiles.items():
                base, member = ceil(profile.base_memory * factor), ceil(profile.member_memory * factor)
                self._put(key, device.kind, replace(profile, base_memory=base, member_memory=member))

    def _observe_out_of_memory(self, observation: OutOfMemoryObserved, peak: int, device: Device) -> None:
        """Multiply the memory of each member by `OUT_OF_MEMORY_FACTOR`; use the peak of a single array if it is larger.

        The new value lets one member fit on the device, so that one member is tried before giving up.
        """
        arrays = [array for array in observation.arrays if array.members]
        for key in dict.fromkeys(array.key for array in arrays):
            if (profile := self.profile(key, device.kind)) is not None:
                observed = (peak - profile.base_memory) // len(arrays[0].members) if len(arrays) == 1 else 0
                raised = max(ceil(profile.member_memory * OUT_OF_MEMORY_FACTOR), observed, 1)
                member = max(profile.member_memory, min(raised, device.memory - profile.base_memory))
                self._put(key, device.kind, replace(profile, member_memory=member))

    def _updated_means(
        self, name: Hashable, known: Mapping[int, float], observation: Mapping[int, float]
    ) -> dict[int, float]:
        """Return the means by size, or by number of jobs; an unchanged value was not observed."""
        changed = {size: value for size, value in observation.items() if value != known.get(size)}
        return {
            **known,
            **{size: self._means.observe((name, size), known.get(size), value) for size, value in changed.items()},
        }

    def _put_if_changed(self, key: FusionKey, kind: str, known: Profile, profile: Profile) -> None:
        if profile != known:
            self._put(key, kind, profile)

    def _put(self, key: FusionKey, kind: str, profile: Profile) -> None:
        self._history.put(key.structure, key.data, key.batch_size, kind, profile)
        self.version += 1


def _with_share(known: Profile, found: Profile, share: float) -> Profile:
    """Return a profile with the speeds on a share of the device, for each size measured on it and on all of it."""
    speeds = dict(known.share_speeds)
    for size in known.step_seconds.keys() & found.step_seconds.keys():
        speed = min(1.0, known.step_seconds[size] / found.step_seconds[size])
        speeds[size] = {**speeds.get(size, {}), share: speed}
    return replace(known, share_speeds=speeds)
