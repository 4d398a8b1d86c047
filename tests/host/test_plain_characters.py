"""Output in an encoding that lacks characters: plain ones for those of Shoal, and a mark for any other."""

import io

import pytest

from shoal.host.plain_characters import PRINTED, SHOWN, encodable


@pytest.mark.parametrize(
    ("encoding", "errors", "text"),
    [
        ("ascii", PRINTED, "-, 0.5 +- 0.1, ?? v"),
        ("ascii", SHOWN, r"-, 0.5 +- 0.1, \xe9\u4e2d v"),
        ("latin-1", SHOWN, "-, 0.5 ± 0.1, é\\u4e2d v"),
        ("utf-8", SHOWN, "–, 0.5 ± 0.1, é中 ✓"),
    ],
)
def test_what_cannot_be_encoded_has_a_plain_form(encoding: str, errors: str, text: str) -> None:
    given = "–, 0.5 ± 0.1, é中 ✓"
    assert given.encode(encoding, errors).decode(encoding) == text
    if errors == SHOWN:
        assert encodable(given, io.TextIOWrapper(io.BytesIO(), encoding)) == text
