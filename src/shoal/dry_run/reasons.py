"""What becomes of each array, and why, in words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.core.device import Device
from shoal.cost.estimate import fetching, memory
from shoal.dry_run.parts import Parts, job, percent, saved, total
from shoal.dry_run.result import Company, Measured, company_of, in_company
from shoal.planner.packing.base import Candidate, Packing, Scene
from shoal.planner.packing.cost import Cost
from shoal.planner.packing.groups import needed
from shoal.planner.packing.prediction import predicted
from shoal.schedule.ledger import bytes_text

__all__ = ["Reasons"]


@dataclass(frozen=True)
class Reasons:
    """Says what decided for each of some arrays.

    Args:
        arrays: all of them.
        candidates: the same, as the strategy saw them.
        groups: indices of those that share a process.
        companies: measured, of groups of several arrays that were to share one.
        scene: what the strategy knew of them.
        packing: the strategy.
        device: where they are to run.
        fuse: whether trials may be fused at all.
    """

    arrays: Sequence[Measured]
    candidates: Sequence[Candidate]
    groups: Sequence[tuple[int, ...]]
    companies: Sequence[Company]
    scene: Scene
    packing: Packing
    device: Device
    fuse: bool

    def of(self, index: int) -> str:
        """What becomes of an array: whether its trials are fused, and with whom it shares a process."""
        group = next(group for group in self.groups if index in group)
        company = self._packed(index, group) if len(group) > 1 else f"by itself: {self._why_single(index)}"
        fused = self._fused(index)
        if fused and len(self.arrays) == 1:
            return fused
        return f"{fused}; {company}" if fused else company

    def _fused(self, index: int) -> str:
        each = self.arrays[index]
        if each.members > 1:
            return f"fused: {each.members} trials, {each.gain:.1f}x"
        like = sum(other.members for other in self.arrays if other.array.key == each.array.key)
        if like == 1:
            return ""
        if not self.fuse:
            return "not fused: fuse=False"
        if memory(each.profile, 2) > self.device.memory:
            return f"not fused: two take {bytes_text(memory(each.profile, 2))}, {self._limit}"
        return "not fused: together no faster"

    def _packed(self, index: int, group: tuple[int, ...]) -> str:
        others = ", ".join(str(other + 1) for other in group if other != index)
        some = [self.arrays[each] for each in group]
        company = company_of([each.array for each in some], self.companies)
        parts = [_in_search(each) for each in some]
        apart, packed = total(map(job, parts)), in_company(parts, company)
        ways = {
            "samples are fetched once": apart.preprocessing - packed.preprocessing,
            "fewer jobs start": apart.switching - packed.switching,
            f"their steps take {percent(1 - company.pace)} less": apart.steps - packed.steps,
        }
        return f"packed with {others}: saves {percent(saved(apart, packed))} ({max(ways, key=ways.__getitem__)})"

    def _why_single(self, index: int) -> str:
        each, own = self.arrays[index], self.candidates[index]
        if each.memory_alone > self.device.memory:
            return f"{bytes_text(each.memory_alone)}, {self._limit}"
        for company in self.companies:
            if company.error and any(lane is each.array for lane in company.lanes):
                return f"in company it could not be measured: {company.error}"
        others = [other for other in self.candidates if other is not own]
        if not others:
            return "there is nobody else"
        near = [other for other in others if other.key.data == own.key.data]
        if not near:
            return "it reads other data"
        fitting = [other for other in near if needed([own, other]) <= self.device.memory]
        if not fitting:
            return f"with another {bytes_text(min(needed([own, other]) for other in near))}, {self._limit}"
        best = max(predicted([own, other], self.scene).impv for other in fitting)
        if isinstance(self.packing, Cost) and best < self.packing.worth:
            kept = "; samples are kept for all jobs of a process" if each.profile.sharing == "kept" else ""
            return f"sharing would save {percent(best)}, at least {percent(self.packing.worth)} is asked{kept}"
        return f"{self.packing} has it so, company would save up to {percent(best)}"

    @property
    def _limit(self) -> str:
        return f"{self.device.name} has {bytes_text(self.device.memory)}"


def _in_search(each: Measured) -> Parts:
    """An epoch of an array in a process that has its samples already, if they are kept."""
    return replace(each.fused, preprocessing=fetching(each.profile, [1]))
