"""The names of the classes of a model's output: ``LabelSpec``, a part of ``ModelSpec``, and the two ways to
write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

#: As many elements can be classified.
MAX_LABELS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class LabelSpec:
    """The labels of one output, by the position of the element that each names.

    ``filename`` is where they were read from, or "".
    """

    output: str
    labels: tuple[str, ...]
    filename: str = ""


def labels_from(given: Any) -> tuple[str, ...]:
    """Labels as a program gives them.

    Raises:
        ValueError: they are no texts, or too many.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"labels must be a list of texts, got {given!r:.100}")
    if len(given) > MAX_LABELS:
        raise ValueError(f"expected at most {MAX_LABELS} labels, got {len(given)}")
    for position, label in enumerate(given):
        if not isinstance(label, str):
            raise ValueError(f"labels must be texts, but label {position} is {label!r:.100}")
    return tuple(given)


def labels_in(text: str) -> tuple[str, ...]:
    """The labels in the text of a file: one a line, an end of line at the very end is none.

    Raises:
        ValueError: too many.
    """
    return labels_from(text.splitlines())
