"""The composed configuration as a search space, for a task whose trials train as arrays."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from shoal.core.domain import Choice, Constant, Domain
from shoal.core.space import Space

from ._space import flat, nested, overrides

__all__ = ["fused", "plain"]


def plain(value: Any) -> Any:
    """Return a node of a configuration as a dict, a list or a value, with what its interpolations stand for."""
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def fused(loader: ConfigLoader, config: DictConfig, found: Mapping[str, Any]) -> tuple[Any, Space]:
    """Return the task of `hydra.sweeper.task`, and the composed configuration with domains in the place of values.

    An option of a config group stands for its part of the configuration. An override must change its own part and
    nothing else, since what an interpolation computes from it would be the same in all trials.

    Args:
        found: Key of each override -> domain or text, of `parameters`.
    """
    first = flat(Space(nested(found, found)).sample(0))
    made, task = _composed(loader, config, first)
    places = [(_place(key, loader), key, x) for key, x in found.items() if isinstance(x, Domain)]
    for (_, path), key, domain in sorted(places, key=lambda place: place[0]):
        rest, _ = _composed(loader, config, first)
        _cut(rest, path, key)
        parts = []
        for value in domain.options if isinstance(domain, Choice) else (domain.value_at(0), domain.value_at(1)):
            other, other_task = _composed(loader, config, first | {key: value})
            parts.append(_cut(other, path, key))
            if (other, other_task) != (rest, task):
                changed = ["hydra.sweeper.task"] if other == rest else _differing(flat(rest), flat(other))
                raise CompactHydraException(
                    f"{key}={value} changes {', '.join(changed)}, too, which trials of an array must share; compute it "
                    "from the config in the task's methods, or leave hydra.sweeper.task out"
                )
        _set(made, path, Choice(tuple(parts)) if isinstance(domain, Choice) else domain)
    HydraConfig.instance().set_config(config)
    return instantiate(task, _convert_="all"), Space(_with_constants(made))


def _composed(loader: ConfigLoader, config: DictConfig, values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the configuration without Hydra's own, and that of the task."""
    composed = loader.load_sweep_config(config, overrides(values))
    HydraConfig.instance().set_config(composed)
    return {str(k): plain(composed[k]) for k in composed if k != "hydra"}, plain(composed.hydra.sweeper.task)


def _place(key: str, loader: ConfigLoader) -> tuple[bool, list[str]]:
    """Return whether the key is one of a value, not of a config group, and where in the configuration it is."""
    name, _, package = key.lstrip("+").partition("@")
    is_value = not loader.get_group_options(name)
    return is_value, (package or (name if is_value else name.replace("/", "."))).split(".")


def _cut(node: Any, path: Sequence[str], key: str) -> Any:
    """Remove a part of a configuration and return it."""
    *parents, name = path
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    if not isinstance(node, dict) or name not in node:
        raise CompactHydraException(
            f"{key}: there is no mapping with {'.'.join(path)} in the composed configuration, so trials cannot train "
            "as arrays; leave hydra.sweeper.task out"
        )
    return node.pop(name)


def _set(node: Any, path: Sequence[str], value: Any) -> None:
    """Set a part of a configuration, in all options of the choices on the way."""
    name, *rest = path
    for each in node.options if isinstance(node, Choice) else (node,):
        if rest:
            _set(each[name], rest, value)
        else:
            each[name] = copy.deepcopy(value)


def _with_constants(node: Any) -> Any:
    """Return a part of a space in which a list is a value, not a choice."""
    match node:
        case dict():
            return {name: _with_constants(value) for name, value in node.items()}
        case Choice():
            return Choice(tuple(x if isinstance(x, list) else _with_constants(x) for x in node.options))
    return Constant(node) if isinstance(node, list) else node


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(
        name for name in one.keys() | other.keys() if (name in one, one.get(name)) != (name in other, other.get(name))
    )
