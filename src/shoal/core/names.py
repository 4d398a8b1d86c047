"""Unknown names: the nearest known one, and the names that a config has."""

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from traceback import walk_tb
from types import FrameType

__all__ = ["explain_missing_name", "nearest_name_hint"]


def nearest_name_hint(name: object, names: Collection[str]) -> str:
    """Return the closest of some names, in words; "" if none is close."""
    close = get_close_matches(str(name), names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def explain_missing_name(error: KeyError, *arguments: object) -> None:
    """Add a note to a KeyError that a config may have raised: the names that the config has, and the nearest one.

    A config may have raised it if the frame that raised it has the config, or a dict in it, and the name, which is no
    value of the config, as in a lookup by one, and if no other mapping that the frame names lacks it. A mapping that
    the frame does not name is not seen, so the note does not say that the config raised it. Errors with notes stay as
    they are.

    Args:
        arguments: Those of the user's function that raised the error; configs are the dicts among them.
    """
    if hasattr(error, "__notes__") or len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    *_, (frame, _) = walk_tb(error.__traceback__)
    (name,) = error.args
    configs = [list(_parts(each)) for each in arguments if isinstance(each, dict)]
    own = {id(part) for parts in configs for part in parts}
    named = [*frame.f_locals.values(), *(frame.f_globals.get(each) for each in frame.f_code.co_names)]
    if not _has_name(frame, name) or any(isinstance(x, Mapping) and id(x) not in own and name not in x for x in named):
        return
    held = {id(value) for value in named}
    for parts in configs:
        names = [str(key) for part in reversed(parts) for key in dict.keys(part)]
        values = [value for part in parts for value in dict.values(part) if isinstance(value, str | int | float)]
        if held.isdisjoint(map(id, parts)) or name in names or name in values:
            continue
        known = ", ".join(map(repr, names)) or "no values"
        error.add_note(f"KeyError: {name!r}; the config has only {known}{nearest_name_hint(name, names)}")
        return


def _parts(config: dict[object, object]) -> Iterator[dict[object, object]]:
    """Yield the dicts in a config, the innermost first; read as plain dicts, since a tracked one records reads."""
    for value in dict.values(config):
        if isinstance(value, dict):
            yield from _parts(value)
    yield config


def _has_name(frame: FrameType, name: str) -> bool:
    """Whether the code of a frame has a name as a constant, or as the value of a variable."""
    return name in frame.f_code.co_consts or any(type(x) is str and x == name for x in frame.f_locals.values())
