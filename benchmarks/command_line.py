"""What the command lines of the benchmarks share. They run before an installation, with Python alone."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable


def names_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the type of an option that takes known names, separated by commas."""
    known = tuple(known)

    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return given

    return names


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def exit_on_sigterm() -> None:
    """End the program on SIGTERM as an exception does: what it has started is stopped on the way out."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
