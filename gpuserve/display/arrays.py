"""Arrays by name, as a table of what they are and how they begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpuserve.display.html import line, table

_HEAD: Final = ("name", "dtype", "shape", "begins with")
#: So many elements are shown, and so much of each.
_ELEMENTS: Final = 6
_CHARACTERS: Final = 40


def arrays_html(arrays: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> str:
    """Write a row for each array, and a line of the parameters that came beside them, if any."""
    rows = ((name, *_row(array)) for name, array in arrays.items())
    beside = line("parameters", ", ".join(f"{key}={one!r}" for key, one in (parameters or {}).items()))
    return table(_HEAD, rows) + (beside if parameters else "")


def _row(array: Any) -> Iterator[str]:
    yield str(array.dtype)
    yield str(list(array.shape))
    shown = [_cut(repr(one)) for one in array.ravel()[:_ELEMENTS].tolist()]
    yield ", ".join([*shown, "…"] if array.size > _ELEMENTS else shown)


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"
