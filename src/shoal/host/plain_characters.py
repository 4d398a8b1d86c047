"""Output in an encoding that lacks characters which Shoal prints, as in the C locale."""

import codecs
from typing import TextIO

__all__ = ["PRINTED", "SHOWN", "encodable"]

_PLAIN = {"–": "-", "±": "+-", "…": "~", "·": ".", "✓": "v", "■": "s", "✗": "x", "‖": "=", "□": "p", "▸": ">"}
"""Character of Shoal's own -> what stands for it; all but one keep the width of a table."""

PRINTED = "shoal.replace"
"""Error handler of standard output: any other character becomes "?"."""
SHOWN = "shoal.backslashreplace"
"""Error handler of standard error: any other character becomes its escape."""


def encodable(text: str, stream: TextIO) -> str:
    """Return a text as a stream can write it."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, SHOWN).decode(encoding)


def _register(name: str, otherwise: str) -> None:
    other = codecs.lookup_error(otherwise)

    def plain(error: UnicodeError) -> tuple[str | bytes, int]:
        if isinstance(error, UnicodeEncodeError) and error.object[error.start] in _PLAIN:
            return _PLAIN[error.object[error.start]], error.start + 1
        if isinstance(error, UnicodeEncodeError):
            error.end = error.start + 1  # the next character may be one of Shoal's
        return other(error)

    codecs.register_error(name, plain)


_register(PRINTED, "replace")
_register(SHOWN, "backslashreplace")
