"""Lengths of time as people write them: ``10s``, ``1m30s``, ``500ms``, or a number in the unit that the name
of an option ends in. Pure.
"""

from __future__ import annotations

import re
from typing import Any, Final

SECONDS: Final = "s"
MICROSECONDS: Final = "us"
#: What an option's name ends in, by its type, where it is a length of time.
_UNITS: Final[dict[Any, str]] = {float: SECONDS, int: MICROSECONDS}
_MICROSECONDS_OF: Final = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "min": 60_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}
_NUMBER: Final = r"[0-9]+(?:\.[0-9]+)?"
_PART: Final = rf"{_NUMBER} ?(?:{'|'.join(_MICROSECONDS_OF)})"
_FORM: Final = rf"{_NUMBER}|{_PART}(?: ?{_PART})*"
#: For JSON Schema, of the texts that ``duration`` reads.
PATTERN: Final = f"^(?:{_FORM})$"


def unit_of(name: str, hint: Any) -> str:
    """The unit of an option of that name and type: seconds, whole microseconds, or "": it is no length of
    time.
    """
    unit = _UNITS.get(hint, "")
    return unit if unit and name.endswith(f"_{unit}") else ""


def duration(text: str, unit: str = SECONDS) -> float:
    """The length of time in that unit; a number without one is in it already. Raises ValueError: it has
    another form; the text says which was expected.
    """
    if re.fullmatch(_FORM, text) is None:
        raise ValueError(f"expected {expected(unit)}, given {text!r:.80}")
    parts = re.findall(rf"({_NUMBER}) ?([a-z]*)", text)
    microseconds = sum(float(count) * _MICROSECONDS_OF[of or unit] for count, of in parts)
    return microseconds / _MICROSECONDS_OF[unit]


def whole(value: float, unit: str) -> float | int:
    """The value as options in that unit have it: microseconds are whole."""
    return round(value) if unit == MICROSECONDS else value


def expected(unit: str) -> str:
    """What a message says that there could be."""
    if unit == MICROSECONDS:
        return "a whole number of microseconds or a time such as 500us or 2ms"
    return "a number of seconds or a time such as 500ms, 10s, 1m30s or 2h"
