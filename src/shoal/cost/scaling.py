"""How long a job takes on a part of a device, or on several (Fluid, section 4)."""

from dataclasses import dataclass
from math import inf

__all__ = ["Scaling"]


@dataclass(frozen=True)
class Scaling:
    """A job's run time by its width w, in devices: h(w), as a multiple of its time alone on one device.

    h(w) = α^(1/w - 1) for 0 < w < 1, on a share of a device; h(w) = β^(w - 1) / w for w ≥ 1, on several.

    Args:
        alpha: α, overhead of sharing: how much longer a job takes on half a device. 1: it would not notice.
        beta: β, overhead of scaling: 1 where w devices are w times as fast.
        sharing: c, most jobs of its kind on one device; a job's least width is 1/c.
        devices: d, most devices it may be spread over.
        resize_seconds: ε, what a change of width costs.
    """

    alpha: float = 2.0
    beta: float = 1.0
    sharing: int = 1
    devices: int = 1
    resize_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not 1 <= value < float("inf"):  # also refuses NaN
                raise ValueError(f"a scaling's {name} must be finite and at least 1, got {value!r}")
        for name in ("sharing", "devices"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"a scaling's {name} must be an integer of at least 1, got {value!r}")
        if not 0 <= self.resize_seconds < float("inf"):
            raise ValueError(f"a scaling's resize_seconds must be finite and not negative, got {self.resize_seconds!r}")

    def factor(self, width: float) -> float:
        """h(w) / h(1); inf where that is beyond all measure.

        Raises:
            ValueError: `width` is not above 0.
        """
        if not width > 0:
            raise ValueError(f"a width is above 0 devices, got {width!r}")
        try:
            if width < 1:
                return self.alpha ** (1 / width - 1)  # type: ignore[no-any-return]
            return self.beta ** (width - 1) / width  # type: ignore[no-any-return]
        except OverflowError:
            return inf
