"""Tuner of oversubscription: the ratio of promised to available compute of each kind of device (HyperSack: r)."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from shoal.core.device import Cluster, Device
from shoal.core.errors import PolicyError

__all__ = ["OversubscriptionTuner"]


@dataclass(frozen=True)
class _Level:
    """Measurement at one ratio: mean promised compute, and mean delivered compute."""

    ratio: float
    promised: float
    delivered: float


@dataclass
class _Climb:
    """State of the search for the ratio of one kind.

    Args:
        ratio: Current ratio.
        step: Step to the next ratio.
        base: Best level so far; None: not measured yet.
        rose: Whether the base was reached by a step up, so that lower ratios are known to be worse.
        resting: Whether the ratio is settled and only observed.
        seen: Observations (promised, delivered) at the current ratio, newest last.
    """

    ratio: float
    step: float
    base: _Level | None = None
    rose: bool = False
    resting: bool = False
    seen: list[tuple[float, float]] = field(default_factory=list)


class OversubscriptionTuner:
    """Finds the ratio of each kind of device by hill climbing, while jobs run.

    A job of demand c that runs at a fraction v of its speed alone receives c · v of compute. Promised compute that the
    device has is delivered; beyond it, one more job slows the others, gradually on real devices, until the delivered
    compute stays or falls. While jobs wait, all additional delivered compute is a gain. So a ratio is widened
    while more than a quarter (`worth`) of the additional promised compute is delivered, and narrowed if that loses less
    than a quarter of the removed promised compute. If neither holds the step is halved, and finally the ratio rests for
    a while. Then both directions are tried again with the first step, since the workload may have changed.

    The tuner compares speed alone with speed together. A utilisation counter is not sufficient: NVML's is the part of
    the time in which any kernel ran, however small, and may be near 100 % for each of three jobs that do not slow each
    other down. Demands from such counters are too large, and the ratio compensates for that.

    Equal observations in equal order give equal ratios. With devices that can deliver up to 4 times the compute
    promised at a ratio of 1, and the default settings, a ratio is settled after at most 120 observations of a kind, as
    long as waiting jobs fill the promised compute.

    Args:
        window: Observations per decision; more tolerate more noise.
        step: First change of a ratio.
        finest: Least change of a ratio.
        most: Largest ratio.
        worth: Part of the additional promised compute that must be delivered; small parts are lost in noise.
        margin: Difference to `worth` from which the ratio moves (hysteresis).
        rest: Windows for which a settled ratio stays.
        kinds: Kinds of devices to tune; observations of other kinds are ignored; None: all kinds.

    Raises:
        PolicyError: A setting is impossible.
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
        """Device kind -> current ratio, for the observed kinds."""
        return {kind: climb.ratio for kind, climb in self._climbs.items()}

    def ratio(self, kind: str) -> float:
        """The current ratio of a kind; 1 without observations."""
        return self._climbs[kind].ratio if kind in self._climbs else 1.0

    def settled(self, kind: str) -> bool:
        """Whether the ratio of a kind is settled."""
        return kind in self._climbs and self._climbs[kind].resting

    def tunes(self, kind: str) -> bool:
        """Whether the ratio of a kind is tuned."""
        return self._kinds is None or kind in self._kinds

    def apply(self, cluster: Cluster) -> Cluster:
        """The cluster with the current ratio on every device of a tuned kind."""
        if not any(self.tunes(device.kind) for _, device in cluster):
            return cluster
        return Cluster(
            tuple(
                replace(node, devices=tuple(self._tuned(device) for device in node.devices)) for node in cluster.nodes
            )
        )

    def observe(self, kind: str, jobs: Iterable[tuple[float, float]]) -> None:
        """Record the demands and speeds of the jobs on one device under the current ratio.

        Devices with room left, for lack of waiting jobs, give no information on a higher ratio, and do no harm.

        Args:
            kind: Kind of the device.
            jobs: Demand of each job, and its measured throughput as a fraction of its throughput alone.

        Raises:
            PolicyError: A demand or a speed is negative or not finite.
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
        """Evaluate a full window, and choose the next ratio."""
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
            climb.ratio += climb.step  # no job fitted into the addition; a job of a whole device fits at + 1
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
        """Try a larger ratio."""
        climb.base = base
        if base.ratio + climb.step <= self._most:
            climb.ratio = base.ratio + climb.step
        else:
            self._narrow(climb, base)

    def _narrow(self, climb: _Climb, base: _Level) -> None:
        """Try a smaller ratio, unless it is known to be worse."""
        climb.base = base
        if not climb.rose and base.ratio - climb.step >= 1:
            climb.ratio = base.ratio - climb.step
        else:
            self._refine(climb, base)

    def _refine(self, climb: _Climb, base: _Level) -> None:
        """Neither direction is better: halve the step, or rest."""
        climb.base, climb.rose = base, False
        if climb.step / 2 >= self._finest:
            climb.step /= 2
            self._widen(climb, base)
        else:
            climb.ratio, climb.resting = base.ratio, True
