"""What becomes of a verb that an operator asks for, as it travels between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from gpuserve.errors import RequestError


class Outcome(NamedTuple):
    """How it went: ``code`` is "" for success, else a ``Code`` value; ``text`` is a sentence, "" where
    nothing is to be said; ``result`` is plain data.
    """

    code: str = ""
    text: str = ""
    result: dict[str, Any] = {}  # noqa: RUF012 - nobody writes to it


#: Is given lines of progress.
Tell: TypeAlias = Callable[[str], None]
#: Is called exactly once.
AnswerOutcome: TypeAlias = Callable[[Outcome], None]


def failed(error: RequestError, result: dict[str, Any] | None = None) -> Outcome:
    """The outcome that an error is."""
    return Outcome(error.code.value, str(error).rstrip("\n"), result or {})
