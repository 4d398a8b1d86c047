"""What jobs show of their costs, written into the job history."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.core.array import Array, FusionKey
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.event import MemoryMeasured, PackSpeedMeasured, Profiled, Reported
from shoal.core.job import Job, Purpose
from shoal.core.space import flatten
from shoal.cost.correct import after_running_out, with_memory
from shoal.cost.crowding import with_crowding
from shoal.cost.history import History
from shoal.cost.watched import merged
from shoal.study.drift import ProfileDrift

__all__ = ["ProfileStore"]


class ProfileStore:
    """Keeps profiles as they were measured, and corrects them by what jobs take.

    Args:
        history: where they are kept.
        task: name of the study's task, which people are told.
    """

    def __init__(self, history: History, task: str = "") -> None:
        self.learnt = 0
        """How often anything was found that a plan may depend on."""
        self._history = history
        self._task = task
        self._tempo = ProfileDrift()
        self._done: Counter[FusionKey] = Counter()
        self._peaks: dict[str, int] = {}  # bytes that a running job was seen to hold

    def profile(self, key: FusionKey, kind: str) -> Profile | None:
        """What is known of a key on a kind of device."""
        return self._history.get(key.structure, key.data, key.batch_size, kind)

    def learn(self, found: Profiled | PackSpeedMeasured | MemoryMeasured, job: Job, device: Device) -> None:
        """A job on a device has measured something."""
        match found:
            case Profiled():
                self._profiled(found, job, device.kind)
            case PackSpeedMeasured():
                self._paced(found, device.kind)
            case MemoryMeasured():
                self._measured(found, device.kind, device.memory)

    def epoch(self, event: Reported, arrays: Sequence[Array], kind: str, *, alone: bool) -> None:
        """Members of a job have finished an epoch; if its time is not what their profile says, that is corrected.

        Args:
            event: their reports.
            arrays: of the job.
            kind: of its device.
            alone: whether no other job is on the device.
        """
        trials = [report.trial for report in event.reports]
        for array in arrays:
            mine = {member.trial.number for member in array.members}
            self._done[replace(array.key, order=0)] += sum(trial in mine for trial in trials)
        profile = self.profile(arrays[0].key, kind) if alone and len(arrays) == 1 else None
        if profile is None:
            self._tempo.interrupt(event.job)
        elif (right := self._tempo.epoch(event, profile)) is not None:
            self._put(arrays[0].key, kind, right)

    def done(self, key: FusionKey) -> int:
        """Epochs that trials of a key have trained, whatever their order of samples."""
        return self._done[replace(key, order=0)]

    def crowded(self, key: FusionKey, kind: str, jobs: int, factor: float) -> None:
        """An epoch of a job of a key took so many times as long as alone, for it shared its device.

        Args:
            key: of its array.
            kind: of its device.
            jobs: on the device.
            factor: how many times; about 1 or more.
        """
        profile = self.profile(key, kind)
        if profile is not None and (right := with_crowding(profile, jobs, factor)) is not None:
            self._put(key, kind, right)

    def ran_out(self, job: str, arrays: Iterable[Array], kind: str, memory: int) -> None:
        """Arrays of a job ran out of memory, so more is expected of them from now on.

        Args:
            job: its id.
            arrays: with the members that they had.
            kind: of its device.
            memory: bytes of its device.
        """
        arrays = [array for array in arrays if array.members]
        alone = len(arrays) == 1
        for array in arrays:
            profile = self.profile(array.key, kind)
            if profile is not None:
                peak = self._peaks.get(job, 0) if alone else 0
                self._put(array.key, kind, after_running_out(profile, len(array.members), memory, peak))

    def end(self, job: str) -> None:
        """A job is over."""
        self._peaks.pop(job, None)
        self._tempo.interrupt(job)

    def _profiled(self, found: Profiled, job: Job, kind: str) -> None:
        """A job measured a key; what a training job found is added to what others may have found meanwhile.

        What was measured anew is not held against what only jobs show that train: what they ran out of, what they lose
        in company, what compiling gains.
        """
        key = found.key
        mine = [member for array in job.arrays if array.key == key for member in array.members]
        if mine:
            configs = [flatten(member.trial.config) for member in mine]
            self._history.belongs(key.structure, key.data, key.batch_size, self._task, configs)
        profile, known = found.profile, self.profile(found.key, kind)
        if found.key.opaque and known is not None:
            profile = replace(merged(known, profile), crowding=known.crowding)
        elif known is not None:
            compiled_gain = {**known.compiled_gain, **profile.compiled_gain}
            compile_seconds = profile.compile_seconds or known.compile_seconds
            if job.purpose is Purpose.PROFILE:
                memory = max(known.member_memory, profile.member_memory)
                sample = max(known.sample, profile.sample)
                profile = replace(profile, member_memory=memory, crowding=known.crowding, sample=sample)
            else:
                profile = replace(known, fused_gain={**known.fused_gain, **profile.fused_gain})
            profile = replace(profile, compiled_gain=compiled_gain, compile_seconds=compile_seconds)
        self._put(found.key, kind, profile)

    def _paced(self, found: PackSpeedMeasured, kind: str) -> None:
        """A job measured what its arrays cost each other."""
        self._history.put_pace([key.steps for key in found.keys], kind, found.pace)
        self.learnt += 1

    def _measured(self, found: MemoryMeasured, kind: str, memory: int) -> None:
        """A training job took so much memory; if that is far above what its profiles say, they are raised.

        Args:
            found: what it took.
            kind: of its device.
            memory: bytes of its device.
        """
        self._peaks[found.job] = found.memory
        known = [(key, self.profile(key, kind), members) for key, members in found.members.items()]
        arrays = [(profile, members) for _, profile, members in known if profile is not None]
        raised = with_memory(arrays, found.memory, memory) if 0 < len(arrays) == len(known) else None
        for (key, _, _), profile in zip(known, raised or (), strict=bool(raised)):
            self._put(key, kind, profile)

    def _put(self, key: FusionKey, kind: str, profile: Profile) -> None:
        self._history.put(key.structure, key.data, key.batch_size, kind, profile)
        self.learnt += 1
