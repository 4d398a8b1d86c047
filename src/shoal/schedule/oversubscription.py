"""How many times the compute of each kind of device may be promised, found from measured speeds (HyperSack: r)."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from shoal.core.device import Cluster, Device
from shoal.core.errors import PolicyError

__all__ = ["OversubscriptionTuner"]


@dataclass(frozen=True)
class _Level:
    """What was seen at one ratio: means of the compute promised, and of the part of it that was delivered."""

    ratio: float
    promised: float
    delivered: float


@dataclass
class _Climb:
    """Where the search for the ratio of one kind stands.

    Args:
        ratio: in force.
        step: to the next ratio.
        base: the best level so far; None: not measured yet.
        rose: whether the base was reached by a step up, so that what is below it is known to be worse.
        resting: settled, and only watching.
        seen: (promised, delivered), newest last, of the ratio in force.
    """

    ratio: float
    step: float
    base: _Level | None = None
    rose: bool = False
    resting: bool = False
    seen: list[tuple[float, float]] = field(default_factory=list)


class OversubscriptionTuner:
    """Finds the ratio of each kind of device by climbing, while jobs run.

    A job of demand c that runs at a fraction v of its speed alone is delivered c · v of compute. Promised compute that
    the device has is delivered; beyond that, one job more takes from the others, by degrees on real devices, until what
    is delivered stays or falls. While jobs wait, anything delivered in addition is gained. So a ratio is widened as
    long as more than a quarter (`worth`) of what is promised in addition is delivered, and narrowed when less than a
    quarter of what that takes away was. When neither holds the step is halved, and in the end the ratio rests for a
    while. Then both directions are tried again, with the first step: the workload may have changed.

    What counts is speed alone against speed together. A utilisation counter does not tell: NVML's is the part of the
    time in which any kernel ran, however little of the chip that used, and may be near 100 % for each of three jobs
    that do not slow each other down. If demands are such readings, they are too large, and the ratio makes up for it.

    The same observations in the same order give the same ratios. With devices that can deliver up to 4 times what is
    promised at a ratio of 1, and the default settings, a ratio is settled after at most 120 observations of a kind, as
    long as jobs wait to fill what is promised.

    Args:
        window: observations of which a ratio is judged; more of them stand more noise.
        step: by which a ratio is changed first.
        finest: least step.
        most: greatest ratio that is tried.
        worth: fraction of what is promised in addition that has to be delivered; less of it can be told from noise less
            surely.
        margin: by how much more, or less, than `worth` must be delivered before the ratio moves (hysteresis).
        rest: windows for which a settled ratio is left alone.
        kinds: of devices whose ratio is looked for, what is observed of others being ignored; None: of all.

    Raises:
        PolicyError: a setting is impossible.
    """

    def __init__(
        self,
        *,
        window: int = 10,
        step: float = 0.5,
        finest: float = 0.25,
        most: float = 8.0,
        worth: float = 0.25,
        margin: float = 0.1,
        rest: int = 4,
        kinds: Collection[str] | None = None,
    ) -> None:
        if not all(isinstance(count, int) and count >= 1 for count in (window, rest)):
            raise PolicyError(f"`window` and `rest` must be integers of at least 1, got {window!r} and {rest!r}")
        if not 0 < finest <= step < float("inf"):
            raise PolicyError(f"`finest` must be above 0 and at most `step`, got {finest!r} and {step!r}")
        if not 1 <= most < float("inf"):
            raise PolicyError(f"`most` must be finite and at least 1, got {most!r}")
        if not 0 <= margin < worth < 1 - margin:
            raise PolicyError(
                f"`margin` must be at least 0 and below `worth` and 1 - `worth`, got {margin!r} and {worth!r}"
            )
        self._window, self._step, self._finest = window, step, finest
        self._most, self._worth, self._margin, self._rest = most, worth, margin, rest
        self._kinds = kinds
        self._climbs: dict[str, _Climb] = {}

    @property
    def ratios(self) -> Mapping[str, float]:
        """Device kind -> the ratio to use now, of the kinds that were observed."""
        return {kind: climb.ratio for kind, climb in self._climbs.items()}

    def ratio(self, kind: str) -> float:
        """The ratio to use now; 1 for a kind of which nothing was observed."""
        return self._climbs[kind].ratio if kind in self._climbs else 1.0

    def settled(self, kind: str) -> bool:
        """Whether the ratio of a kind is found, as far as one can know."""
        return kind in self._climbs and self._climbs[kind].resting

    def tunes(self, kind: str) -> bool:
        """Whether the ratio of a kind is looked for."""
        return self._kinds is None or kind in self._kinds

    def apply(self, cluster: Cluster) -> Cluster:
        """The cluster with the ratio to use now on every device of the kinds that are tuned."""
        if not any(self.tunes(device.kind) for _, device in cluster):
            return cluster
        return Cluster(
            tuple(
                replace(node, devices=tuple(self._tuned(device) for device in node.devices)) for node in cluster.nodes
            )
        )

    def observe(self, kind: str, jobs: Iterable[tuple[float, float]]) -> None:
        """Tell what one device did for its jobs under the present ratio.

        Devices that have room left because no job waits for it say nothing of a higher ratio, and do no harm.

        Args:
            kind: of the device.
            jobs: demand of each job on it, and its measured throughput as a fraction of that alone.

        Raises:
            PolicyError: a demand or a speed is negative or not finite.
        """
        pairs = list(jobs)
        for demand, speed in pairs:
            if not (0 <= demand < float("inf") and 0 <= speed < float("inf")):
                raise PolicyError(
                    f"a job on {kind} has demand {demand!r} and speed {speed!r}; both must be finite and not negative"
                )
        if not self.tunes(kind):
            return
        climb = self._climbs.setdefault(kind, _Climb(1.0, self._step))
        climb.seen.append((sum(demand for demand, _ in pairs), sum(demand * speed for demand, speed in pairs)))
        if len(climb.seen) == self._window * (self._rest if climb.resting else 1):
            self._judge(climb)

    def _tuned(self, device: Device) -> Device:
        return replace(device, oversubscription=self.ratio(device.kind)) if self.tunes(device.kind) else device

    def _judge(self, climb: _Climb) -> None:
        """Decide what a full window means, and which ratio comes next."""
        newest = climb.seen[-self._window :]
        level = _Level(climb.ratio, fmean(p for p, _ in newest), fmean(d for _, d in newest))
        climb.seen.clear()
        if climb.base is None or climb.resting:
            climb.step, climb.resting, climb.rose = self._step, False, False
            self._widen(climb, level)
        elif climb.ratio > climb.base.ratio:
            self._judge_wider(climb, climb.base, level)
        else:
            self._judge_narrower(climb, climb.base, level)

    def _judge_wider(self, climb: _Climb, base: _Level, level: _Level) -> None:
        extra = level.promised - base.promised
        if extra < self._finest / 2 and level.ratio + climb.step <= min(base.ratio + 1, self._most):
            climb.ratio += climb.step  # no job fitted into what was added; one that takes a whole device would at + 1
        elif extra >= self._finest / 2 and level.delivered - base.delivered > (self._worth + self._margin) * extra:
            climb.rose = True
            self._widen(climb, level)
        else:
            self._narrow(climb, base)

    def _judge_narrower(self, climb: _Climb, base: _Level, level: _Level) -> None:
        taken = base.promised - level.promised
        if taken > 0 and base.delivered - level.delivered < (self._worth - self._margin) * taken:
            self._narrow(climb, level)
        else:
            self._refine(climb, base)

    def _widen(self, climb: _Climb, base: _Level) -> None:
        """Try a wider ratio than this."""
        climb.base = base
        if base.ratio + climb.step <= self._most:
            climb.ratio = base.ratio + climb.step
        else:
            self._narrow(climb, base)

    def _narrow(self, climb: _Climb, base: _Level) -> None:
        """Try a narrower ratio than this, unless it is known to be worse."""
        climb.base = base
        if not climb.rose and base.ratio - climb.step >= 1:
            climb.ratio = base.ratio - climb.step
        else:
            self._refine(climb, base)

    def _refine(self, climb: _Climb, base: _Level) -> None:
        """Neither direction is better: look closer, or rest."""
        climb.base, climb.rose = base, False
        if climb.step / 2 >= self._finest:
            climb.step /= 2
            self._widen(climb, base)
        else:
            climb.ratio, climb.resting = base.ratio, True
