"""Tracebacks without frames of Shoal: as texts of failures, and of errors that end at the call of a public function."""

import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from shoal.core.errors import ShoalError, StudyInterrupted
from shoal.core.names import nearest_name_hint

__all__ = ["ends_at_call", "user_lines", "user_traceback"]

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = __name__.partition(".")[0]
_ROOT = f"{Path(__file__).parents[1]}{os.sep}"
_OVERRIDES = os.path.join("torch", "overrides.py")
_LIBRARIES = (*(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")), "<frozen ")
_CONTEXTS = contextmanager.__code__.co_filename


def ends_at_call(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: errors that Shoal raises on purpose end at the line of the user that calls it, and
    one frame of this module, which notebooks and pytest leave out.

    Frames of the user below the call stay, as those of an algorithm of their own, also those of the cause; with
    `SHOAL_DEBUG=1` all do. So do those of any error that is a bug. An argument that the function lacks is answered with
    the nearest one.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # read by IPython and pytest
        try:
            return function(*args, **kwargs)
        except (ShoalError, StudyInterrupted) as error:
            if os.environ.get("SHOAL_DEBUG"):
                raise
            raise error.with_traceback(_without_internal(error.__traceback__)) from _cause_of_user(error)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # raised within the function
                raise
            known = inspect.signature(function).parameters
            unknown = [f"{name!r}{nearest_name_hint(name, known)}" for name in kwargs if name not in known]
            text = f"{function.__name__}() has no argument {', '.join(unknown)}" if unknown else str(error)
            raise TypeError(text) from None

    return call


def user_lines(trace: TracebackType | None, file: str) -> str:
    """Return the frames of a traceback from the first one of a file on, without those of Shoal, with their lines."""
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return "".join(traceback.format_tb(_without_internal(trace)))


def user_traceback(error: BaseException) -> str:
    """Return the traceback as text, without frames of this package before the user's last one, if there is one."""
    frame = error.__traceback__
    while frame is not None and _is_own_frame(frame):
        frame = frame.tb_next
    formatted = traceback.TracebackException(type(error), error, frame or error.__traceback__)
    formatted.stack = traceback.StackSummary.from_list(_user_frames(formatted.stack))
    return "".join(formatted.format())


def _user_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames without those of this package and of `torch.overrides` before the user's last one."""
    ours = [frame.filename.startswith(_ROOT) or frame.filename.endswith(_OVERRIDES) for frame in frames]
    last = max((place for place, own in enumerate(ours) if not own), default=-1)
    return [frame for place, frame in enumerate(frames) if place > last or not ours[place]]


def _is_own_frame(frame: TracebackType) -> bool:
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def _is_internal(frame: TracebackType) -> bool:
    file = frame.tb_frame.f_code.co_filename
    return _is_own_frame(frame) or file.endswith(_OVERRIDES) or file == _CONTEXTS


def _cause_of_user(error: BaseException) -> BaseException | None:
    """Return the cause of an error if code of the user raised it, without other frames."""
    cause = error.__cause__
    kept = None if cause is None else _without_internal(cause.__traceback__)
    if cause is None or all(frame.f_code.co_filename.startswith(_LIBRARIES) for frame, _ in traceback.walk_tb(kept)):
        return None
    return cause.with_traceback(kept)


def _without_internal(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of Shoal; None if no other is left."""
    links = []
    while trace is not None:
        if not _is_internal(trace):
            links.append(trace)
        trace = trace.tb_next
    kept = None
    for link in reversed(links):
        kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept
