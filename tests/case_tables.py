"""Tables of cases as text: the lines of an input, and below them the expected text behind an arrow."""

from __future__ import annotations

import pytest

_ARROW = "-> "


def cases(table: str) -> list[tuple[str, str]]:
    """Return the inputs and expected texts of a table, for ``pytest.mark.parametrize``.

    Args:
        table: For each case the lines of the input, then one line or several that start with ``->``. Several
            lines of expected text are joined with a space.
    """
    found: list[tuple[list[str], list[str]]] = []
    for line in table.splitlines():
        if line.startswith(_ARROW):
            found[-1][1].append(line.removeprefix(_ARROW))
        elif not found or found[-1][1]:
            found.append(([line], []))
        else:
            found[-1][0].append(line)
    return [("\n".join(given), " ".join(expected)) for given, expected in found]


def unmarked(text: str) -> tuple[str, int, str]:
    """Return a text without its marks « and », the number of the marked line, and the marked text."""
    before, _, rest = text.partition("«")
    marked, found, after = rest.partition("»")
    if not found:
        pytest.fail(f"expected « and » in {text!r}")
    return before + marked + after, before.count("\n") + 1, marked
