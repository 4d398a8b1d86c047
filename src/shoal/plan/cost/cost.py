"""The cost of trials of one key on one kind of device: seconds, memory, compute, and what pays."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from shoal.core.demand import Demand, Profile, SampleSharing
from shoal.plan.cost.scaling import Scaling, multi_device_scaling, shared_device_scaling

__all__ = ["MIN_FUSING_GAIN", "MIN_WORK_TO_MEASURE", "Cost", "packed_demand"]

VALIDATION_COST = 1 / 3
"""A validation step is a forward pass; a training step is about three (forward, and twice that for backward)."""

STEP_OVERHEAD_SECONDS = 2.5e-4
"""Overhead of a step that does not depend on the size of the array: handing out the batch, recording the losses. It
counts in comparisons of arrays of different sizes."""

MIN_FUSING_GAIN = 0.05
"""Least expected saving, as a part of the time one after another, for fusing members."""

STEPS_TO_TRY = 30
"""Cost of trying how fast members are together, per member, in steps of a single member: the checks of the array and
the choice of its steps, measured on a CPU slot."""

MIN_MIXING_GAIN = 0.05
"""Least expected saving, as a part of the time, for fusing members at different epochs."""

MIN_WORK_TO_MEASURE = 60.0
"""Seconds of all expected epochs, one trial after another, from which several array sizes are measured before training
on a GPU. With less work, an array of all that wait has gained more by the time that the measurements would take."""

REPROFILE_FACTOR = 3
"""A key is profiled again if its number of waiting members, or of expected epochs, is this many times the number at its
last profile. Expected epochs include trained ones; they count only if the last profile had fewer members than wait."""

ENOUGH = 0.95
"""Part of its throughput on the whole device that an array must reach with its demand of compute."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Estimates for trials of one key on one kind of device, from its profile.

    Args:
        profile: The measurements. Callers hand the profile on to workers, and leave its fields to this class.
    """

    profile: Profile

    def step_seconds(self, members: int, batches: int = 1) -> float:
        """Return the seconds of one training step of `members` trained together.

        Linear between the measured sizes, and extrapolated above them by the line through the last two. Below them the
        time of the smallest size is returned, an upper bound. With a single measurement the time is proportional to the
        members.

        Args:
            members: B, at least 1.
            batches: Number of batches of the step, whose gradients add up.
        """
        return _interpolated(self.profile.step_seconds, members) * batches

    def fuse_seconds(self, members: int) -> float:
        """Return the seconds for building and fusing `members`; 0 if never measured."""
        return _interpolated(self.profile.fuse_seconds, members) if self.profile.fuse_seconds else 0.0

    def seconds(self, epochs: Sequence[int], step_overhead: float = 0.0) -> float:
        """Return the expected seconds until all members that begin together finish, including validation.

        Args:
            epochs: Epochs of each member; the others continue after a member has finished.
            step_overhead: Seconds added to each step.
        """
        steps = self.profile.epoch_steps + VALIDATION_COST * self.profile.validation_steps
        ordered = sorted(epochs)
        if ordered and ordered[0] == ordered[-1]:  # the common case
            return (self.step_seconds(len(ordered)) + step_overhead) * steps * ordered[0] if ordered[0] > 0 else 0.0
        total, done = 0.0, 0
        for remaining, length in zip(range(len(ordered), 0, -1), ordered, strict=True):
            if length > done:
                total += (self.step_seconds(remaining) + step_overhead) * steps * (length - done)
                done = length
        return total

    @property
    def sample_sharing(self) -> SampleSharing:
        """Method by which arrays in one process share the samples."""
        return self.profile.sample_sharing

    @property
    def fetch_seconds(self) -> float:
        """Seconds to fetch and prepare the samples of a batch that are not in memory."""
        return self.profile.fetch_seconds

    def with_fetch_seconds(self, seconds: float) -> "Cost":
        """Return the cost with other seconds to fetch and prepare the samples of a batch."""
        return self if self.fetch_seconds == seconds else Cost(replace(self.profile, fetch_seconds=seconds))

    def fetching(self, epochs: Sequence[int]) -> float:
        """Return the expected seconds for fetching and preparing the samples of members that begin together.

        It is 0 for kept samples, which the first job of a process fetches once.
        """
        return 0.0 if self.sample_sharing == "kept" else self.first_fetching * max(epochs)

    @property
    def first_fetching(self) -> float:
        """Expected seconds for fetching and preparing all samples once; 0 if they reside on the device."""
        if self.sample_sharing == "resident":
            return 0.0
        return self.fetch_seconds * (self.profile.epoch_steps + self.profile.validation_steps)

    def memory(self, members: int) -> int:
        """Return the peak bytes of a process with one array of `members`; of 0 members: of the process before any."""
        return self.profile.base_memory + members * self.profile.member_memory

    def largest_fitting(self, available: int, at_most: int) -> int:
        """Return the largest B up to `at_most` whose peak is within `available` bytes; 0 if no member fits."""
        if self.memory(at_most) <= available:
            return at_most
        free = max(0, available - self.profile.base_memory)
        return free // self.profile.member_memory if self.profile.member_memory else 0

    def compute(self, members: int = 1) -> float:
        """Return the compute demand of an array as a fraction of a device (HyperSack: c_p).

        It is the least measured share with 95 % of the throughput of the whole device; 1 if a smaller share has less.
        If no share was measured, it is the fraction of the device in use, an upper bound; capped at 1, since counters
        can show slightly more.
        """
        if speeds := self._share_speeds(members):
            return min((share for share, speed in speeds.items() if speed >= ENOUGH), default=1.0)
        return min(self.profile.compute, 1.0)

    def suffices(self, share: float, members: int) -> bool:
        """Return whether a share of a device was measured to be enough for an array."""
        return bool(self.profile.share_speeds) and self.compute(members) <= share

    def share_to_measure(self) -> float | None:
        """Return the next share of a device to measure: a half, then a quarter or three quarters; None if all is known.

        A quarter tells something if half of the device suffices, three quarters if it does not. Two shares of a
        structure are measured, whatever the sizes that they were measured with.
        """
        measured = {share for speeds in self.profile.share_speeds.values() for share in speeds}
        if not measured:
            return 0.5
        if len(measured) > 1:
            return None
        return 0.25 if self._share_speeds(max(self.profile.step_seconds)).get(0.5, 0.0) >= ENOUGH else 0.75

    def _share_speeds(self, members: int) -> Mapping[float, float]:
        """Return the speeds by share of the measured size nearest to `members`, the larger one of two."""
        speeds = self.profile.share_speeds
        return speeds[min(speeds, key=lambda size: (abs(size - members), -size))] if speeds else {}

    @property
    def is_untried(self) -> bool:
        """Whether members were only timed alone, so that training tries how fast they are together, if that may pay.

        An array finds out in its first steps whether fused steps are faster than plain ones, and takes plain ones if
        not. That costs `STEPS_TO_TRY`, where measuring before training would cost more than it could save.
        """
        return self.profile.expected_epochs is not None and set(self.profile.step_seconds) == {1}

    def best_size(self, at_most: int, devices: int = 1) -> int:
        """Return the B with the least seconds per member, including `STEP_OVERHEAD_SECONDS`; the largest one of a tie.

        Between two measured sizes the time per member is monotonic, so only measured sizes and `at_most` can be best.
        Since size 1 can win, fusing is never slower than not fusing. If several members were never timed together, it
        is the profile's `first_size`, or as many members as can be tried within `MIN_FUSING_GAIN` of all steps that
        were expected when the profile was made.

        Args:
            at_most: Largest B that memory or the number of trials allows, at least 1.
            devices: Devices on which arrays of this size begin before one of them is measured.
        """
        profile = self.profile
        if self.is_untried:
            return at_most if profile.first_size is None else min(at_most, self._first_size(devices))
        sizes = {size for size in profile.step_seconds if size <= at_most} | {at_most}
        per_member = {size: (self.step_seconds(size) + STEP_OVERHEAD_SECONDS) / size for size in sizes}
        least = min(per_member.values())
        return max(size for size, cost in per_member.items() if cost <= least * (1 + 1e-9))

    def _first_size(self, devices: int, expected_epochs: float | None = None) -> int:
        """Return the most members of the first arrays, one on each device, where `Profile.first_size` limits them."""
        profile = self.profile
        epochs = expected_epochs or profile.expected_epochs or 0.0
        affordable = MIN_FUSING_GAIN * profile.epoch_steps * epochs / (STEPS_TO_TRY * devices)
        return int(max(1, min(profile.first_size or 1, affordable)))

    def seconds_per_member(self, members: int) -> float:
        """Return the seconds of a step per member, for `members` in arrays of the most efficient size."""
        size = self.best_size(members)
        return (self.step_seconds(size) + STEP_OVERHEAD_SECONDS) / size

    def fused_gain(self, members: int) -> float | None:
        """Return the speed-up of fused steps of `members` over steps one after another; None if never measured.

        A measurement counts for sizes from half to twice its own.
        """
        measured = self.profile.fused_gain
        candidates = [size for size in measured if members <= 2 * size and size <= 2 * members]
        return measured[min(candidates, key=lambda size: abs(size - members))] if candidates else None

    def fusing_pays(self, epochs: Sequence[int]) -> bool:
        """Return whether to fuse members with these epochs, with the times to build the array and to build each alone.

        Members that were never timed together are worth trying.
        """
        if self.is_untried:
            return True
        alone = sum(self.fuse_seconds(1) + self.seconds([each], STEP_OVERHEAD_SECONDS) for each in epochs)
        together = self.fuse_seconds(len(epochs)) + self.seconds(epochs, STEP_OVERHEAD_SECONDS)
        return together <= (1 - MIN_FUSING_GAIN) * alone

    def mixing_pays(self, one: int, other: int) -> bool:
        """Return whether to fuse two arrays at different epochs, of `one` and of `other` members.

        Such members share no batches, so work that is common to the members of one batch is done for each member.
        """
        mixing = self.profile.mixing
        if mixing is None:
            return False
        apart = self.step_seconds(one) + self.step_seconds(other) + 2 * STEP_OVERHEAD_SECONDS
        together = mixing * self.step_seconds(one + other) + STEP_OVERHEAD_SECONDS
        return together <= (1 - MIN_MIXING_GAIN) * apart

    def joining_gain(self, present: Sequence[int], joining: Sequence[int]) -> float:
        """Return the seconds saved if members join an array instead of training after it; 0 if mixing does not pay.

        The costs are a new start of the array, the loss of shared batches, and compiling the step again if compiled.

        Args:
            present: Epochs that each member of the array has left.
            joining: Epochs of each member that joins.
        """
        profile = self.profile
        if profile.mixing is None or not self.mixing_pays(len(present), len(joining)):
            return 0.0
        shared = min(max(present), max(joining))  # epochs that both train
        mixed = self.seconds([min(epochs, shared) for epochs in (*present, *joining)])
        together = self.seconds([*present, *joining]) + (profile.mixing - 1) * mixed
        start = self.fuse_seconds(len(present) + len(joining))
        compiled = profile.compile_seconds if max(profile.compiled_gain.values(), default=1) > 1 else 0.0
        return self.seconds(present) + self.seconds(joining) - together - start - compiled

    def work(self, epochs: float) -> float:
        """Return the seconds of the steps of so many epochs of one member each, at the fastest measured size."""
        step = min(seconds / members for members, seconds in self.profile.step_seconds.items())
        return step * self.profile.epoch_steps * epochs

    @property
    def min_work_to_measure(self) -> float:
        """Seconds of expected work from which several sizes are measured; on a GPU little work is not measured."""
        return MIN_WORK_TO_MEASURE if self.profile.first_size is None else 0.0

    def is_outgrown(self, members: int, expected_epochs: float) -> bool:
        """Return whether to measure the key again, since far more members or epochs wait than at its last profile."""
        profile = self.profile
        if self.work(expected_epochs) < self.min_work_to_measure:
            return False
        if self.is_untried and profile.first_size is not None and self._first_size(1, expected_epochs) == 1:
            return False  # to time it again would change nothing
        if profile.measured_members * REPROFILE_FACTOR <= members:
            return True
        has_more_members = members > max(profile.step_seconds)
        before = profile.expected_epochs
        return has_more_members and before is not None and before * REPROFILE_FACTOR <= expected_epochs

    def time_on(self, devices: int) -> float:
        """Return the time of a step on so many devices over that on one; beyond the measured ones, that on the most."""
        spreading = self.profile.spreading
        if devices == 1 or not spreading:
            return 1.0
        return spreading.get(devices, spreading[max(spreading)])

    def scaling(self, expected: int, *, lasts: bool, team: bool) -> Scaling:
        """Return the scaling of a job of one array of this key.

        Args:
            expected: Number of such jobs on one device by their compute demand, which holds until measurements differ.
            lasts: Whether the job has enough epochs left to be tried beside another one.
            team: Whether the job may have several devices.
        """
        shared = shared_device_scaling(self.profile.crowding, expected)
        scaling = shared or Scaling(1.0, max_jobs=expected, trial=expected == 1 and lasts)
        return multi_device_scaling(self.profile.spreading, scaling) if team else scaling


def packed_demand(arrays: Sequence[tuple[Cost, Sequence[int]]], *, cores: float = inf) -> Demand:
    """Return the demand of arrays of one data set that take turns in one process.

    Args:
        arrays: Cost of each array, and the epochs left of each of its members.
        cores: Upper limit of CPU cores. A process measured alone can show slightly more cores than its threads allow;
            with that demand, a job on every slot would not fit on the node.
    """
    return Demand(
        compute=max(cost.compute(len(epochs)) for cost, epochs in arrays),
        memory=max(cost.memory(0) for cost, _ in arrays)
        + sum(len(epochs) * cost.profile.member_memory for cost, epochs in arrays),
        cores=min(max(cost.profile.cores for cost, _ in arrays), cores),
        seconds=sum(cost.seconds(epochs) for cost, epochs in arrays)
        + max(cost.fetching(epochs) for cost, epochs in arrays),
    )


def _interpolated(measured: Mapping[int, float], members: int) -> float:
    if members in measured:
        return measured[members]
    sizes = sorted(measured)
    if len(sizes) == 1:
        return measured[sizes[0]] * members / sizes[0]
    if members <= sizes[0]:
        return measured[sizes[0]]
    above = min(bisect_left(sizes, members), len(sizes) - 1)
    return _on_line(measured, sizes[above - 1], sizes[above], members)


def _on_line(measured: Mapping[int, float], low: int, high: int, members: int) -> float:
    """Return the value at `members` of the line through two measured sizes; beyond `high` the slope is at least 0."""
    slope = (measured[high] - measured[low]) / (high - low)
    if members > high:
        return measured[high] + max(slope, 0.0) * (members - high)
    return measured[low] + slope * (members - low)
