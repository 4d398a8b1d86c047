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
    """Add a note to a KeyError that a config may have raised: the missing name, the nearest one, those that it has.

    Errors with notes stay as they are. The error may be one of a config if the frame that raised it has the config, or
    a dict in it, and the name, which is no value of the config, as in a lookup by one, and if no other mapping that
    the frame names lacks it. A mapping that the frame does not name is not seen.

    Args:
        arguments: Those of the user's function that raised the error; configs are the dicts among them.
    """
    if hasattr(error, "__notes__") or len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    *_, (frame, _) = walk_tb(error.__traceback__)
    (name,), held = error.args, {id(value) for value in frame.f_locals.values()}
    configs = [list(_parts(each)) for each in arguments if isinstance(each, dict)]
    own = {id(part) for parts in configs for part in parts}
    named = [*frame.f_locals.values(), *(frame.f_globals.get(each) for each in frame.f_code.co_names)]
    if any(isinstance(each, Mapping) and id(each) not in own and name not in each for each in named):
        return
    for parts in configs:
        if not _has_name(frame, name) or any(value == name for part in parts for value in _leaves(part)):
            continue
        for part in parts:
            names = [str(key) for key in dict.keys(part)]
            if id(part) in held and name not in names:
                known = ", ".join(map(repr, names)) or "no values"
                error.add_note(f"The config has no {name!r}{nearest_name_hint(name, names)}; it has {known}")
                return


def _parts(config: dict[object, object]) -> Iterator[dict[object, object]]:
    """Yield the dicts in a config, the innermost first; read as plain dicts, since a tracked one records reads."""
    for value in dict.values(config):
        if isinstance(value, dict):
            yield from _parts(value)
    yield config


def _leaves(part: dict[object, object]) -> Iterator[object]:
    return (value for value in dict.values(part) if isinstance(value, str | int | float))


def _has_name(frame: FrameType, name: str) -> bool:
    """Whether the code of a frame has a name as a constant, or as the value of a variable."""
    return name in frame.f_code.co_consts or any(type(x) is str and x == name for x in frame.f_locals.values())
