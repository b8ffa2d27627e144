"""Which sequence a request belongs to, by its parameters ``sequence_id``, ``sequence_start`` and
``sequence_end``, the same for every codec. Pure; whether the model knows sequences is said elsewhere.
"""

from __future__ import annotations

from typing import Any, Final

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.v2.json_values import described, typed
from gpuserve.front.v2.limits import shown
from gpuserve.front.v2.types import Sequence

ID: Final = "sequence_id"
START: Final = "sequence_start"
END: Final = "sequence_end"
SEQUENCE_KEYS: Final = frozenset({ID, START, END})
MAX_ID_CHARACTERS: Final = 128
_MAX_UINT64: Final = (1 << 64) - 1


def sequence_of(correlation_id: int | str, *, start: bool, end: bool) -> Sequence | None:
    """The sequence of a request; None: its id is 0 or "". A negative id is one above 2^63."""
    if isinstance(correlation_id, int):
        correlation_id &= _MAX_UINT64
    elif len(correlation_id) > MAX_ID_CHARACTERS:
        raise InvalidArgument(
            f"'{ID}' '{shown(correlation_id)}' is longer than the {MAX_ID_CHARACTERS} characters it may "
            f"have, got {len(correlation_id)}"
        )
    return Sequence(correlation_id, start, end) if correlation_id else None


def json_sequence(parameters: dict[str, Any]) -> Sequence | None:
    """The sequence that parameters over HTTP name; InvalidArgument: a wrong type, or an id out of range."""
    if SEQUENCE_KEYS.isdisjoint(parameters):
        return None
    correlation_id = parameters.get(ID, 0)
    if type(correlation_id) is not str and not (
        type(correlation_id) is int and 0 <= correlation_id <= _MAX_UINT64
    ):
        raise InvalidArgument(
            f"'{ID}': expected an integer of 64 bits, or a string, got {described(correlation_id)}"
        )
    return sequence_of(
        correlation_id,
        start=typed(parameters.get(START, False), bool, f"'{START}'"),
        end=typed(parameters.get(END, False), bool, f"'{END}'"),
    )
