"""Overrides of Hydra as a search space of Shoal, and configurations of that space as overrides."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep, Transformer
from hydra.errors import CompactHydraException

from shoal.core.domain import Choice, Domain, LogRandInt, LogUniform, QUniform, RandInt, Uniform
from shoal.core.space import flatten

__all__ = ["flat", "nested", "overrides", "parameters"]


def parameters(lines: Sequence[str], loader: ConfigLoader) -> dict[str, Any]:
    """Return the key of each override -> its domain, or the text of a value that is not searched, None if it has none.

    A later override replaces an earlier one of the same key.
    """
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(lines))
    last = {(each.key_or_group, each.package): each for each in parsed}
    return {each.get_key_element(): _domain(each) for each in last.values()}


def nested(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return values by the keys of overrides as a space nests them: {"optimizer.lr": 1} gives {"optimizer": {"lr": 1}}.

    If a config group, "optimizer", has keys below it, it is named "/optimizer" beside them.

    Args:
        keys: All keys of the space.
    """
    keys = list(keys)
    root: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[f"/{name}" if any(other.startswith(f"{key}.") for other in keys) else name] = value
    return root


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by the keys of overrides: the reverse of `nested`."""
    return {re.sub(r"(^|\.)/", r"\1", name): value for name, value in flatten(config).items()}


def overrides(config: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a configuration."""
    return [key if value is None else f"{key}={value}" for key, value in flat(config).items()]


def _domain(override: Override) -> Any:
    if not override.is_sweep_override():
        return None if override.value_type is None else override.get_value_element_as_str()
    sweep = override.value()
    tags = set(getattr(sweep, "tags", ()))
    if unknown := tags - ({"log"} if isinstance(sweep, IntervalSweep) else set()):
        raise CompactHydraException(
            f"{override.input_line}: Shoal does not know the tag {', '.join(sorted(unknown))} of this sweep; it knows "
            "tag(log, interval(low, high))"
        )
    if isinstance(sweep, RangeSweep):
        return _range(override, sweep)
    if isinstance(sweep, IntervalSweep):
        whole = isinstance(sweep.start, int) and isinstance(sweep.end, int)
        made: Any = {(True, True): LogRandInt, (True, False): RandInt, (False, True): LogUniform}
        return made.get((whole, "log" in tags), Uniform)(sweep.start, sweep.end)
    # A shuffled choice in its own order, because a study draws from it, and a resumed study compares it.
    items = sweep.list if isinstance(sweep, ChoiceSweep) else override.sweep_iterator()
    return Choice(tuple(map(_encoded, items)))


def _range(override: Override, sweep: RangeSweep) -> Domain:
    """Return the domain of start, start + step, ... before the stop."""
    given = (sweep.start, sweep.stop, sweep.step)
    start, stop, step = (Fraction(str(value)) for value in given)
    count = math.ceil((stop - start) / step) if step else 0
    if count < 1:
        raise CompactHydraException(f"{override.input_line}: the range holds no value")
    low, high = sorted((start, start + (count - 1) * step))
    if all(isinstance(value, int) for value in given):
        return RandInt(int(low), int(high) + 1, int(abs(step)))
    return QUniform(float(low), float(high), float(abs(step)))


def _encoded(item: Any) -> Any:
    """Return an item of a choice as a number, or as the text of an override, in which quotes stay."""
    is_number = isinstance(item, int) or (isinstance(item, float) and math.isfinite(item))
    return item if is_number else Transformer.str(item)
