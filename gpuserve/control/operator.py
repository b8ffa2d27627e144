"""What an operator and a running server say to one another, and the arguments of each verb, which are checked
because a peer is not trusted. Framed as in ``messages.py``; one connection is one question.

::

    command -> server   Ask
    server -> command   Told and Alive (any number), Answered
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.errors import InvalidArgument, NotFound, RequestError
from gpuserve_worker.protocol.vocabulary import Vocabulary

#: Raised whenever a field of a message changes meaning.
PROTOCOL: Final = 1
ALIVE_PERIOD_S: Final = 3.0


class Ask(NamedTuple):
    """A verb and its arguments; see ``OperatorVerbs``."""

    protocol: int
    verb: str
    arguments: dict[str, Any]


class Told(NamedTuple):
    """A line of progress, while a verb is being done."""

    text: str


class Alive(NamedTuple):
    """The answer is still to come: every ``ALIVE_PERIOD_S``, so that a server that hangs is noticed."""


class Answered(NamedTuple):
    """The end of a verb: the fields of a ``VerbOutcome``."""

    code: str
    text: str
    result: dict[str, Any]


OPERATE: Final = Vocabulary({1: Ask, 20: Told, 21: Answered, 22: Alive})


class VerbOutcome(NamedTuple):
    """How a verb ended: ``code`` is "" for success, else a ``Code`` value; ``text`` is a sentence or "";
    ``result`` is plain data.
    """

    code: str = ""
    text: str = ""
    result: dict[str, Any] = {}  # noqa: RUF012 - nobody writes to it


#: Takes lines of progress.
Tell: TypeAlias = Callable[[str], None]
#: Takes the outcome; called exactly once.
AnswerOutcome: TypeAlias = Callable[[VerbOutcome], None]


def failed(error: RequestError, result: dict[str, Any] | None = None) -> VerbOutcome:
    return VerbOutcome(error.code.value, str(error).rstrip("\n"), result or {})


# ---- the verbs and their arguments ----------------------------------------------------------

#: The verbs, and the arguments that each may be given.
VERBS: Final[Mapping[str, frozenset[str]]] = {
    "status": frozenset(),
    "stacks": frozenset(),
    "events": frozenset(),
    "logs": frozenset({"model"}),
    "drain": frozenset({"timeout_s", "undo"}),
    "load": frozenset({"model"}),
    "unload": frozenset({"model"}),
    "reload": frozenset({"model"}),
    "scale": frozenset({"counts"}),
}
#: The longest drain.
MAX_TIMEOUT_S: Final = 86_400.0
_SHOWN_CHARACTERS: Final = 128


def check_verb(verb: object, arguments: object) -> None:
    if not isinstance(verb, str) or verb not in VERBS:
        raise InvalidArgument(f"expected one of {', '.join(VERBS)}, got {_shown(verb)}")
    if not isinstance(arguments, dict):
        raise InvalidArgument(f"{verb}: expected arguments by name, got {_shown(arguments)}")
    for name in arguments:
        if name not in VERBS[verb]:
            raise InvalidArgument(f"{verb} has no argument {_shown(name)}{near(name, VERBS[verb])}")


def model_name(verb: str, arguments: Mapping[str, Any]) -> str:
    name = arguments.get("model")
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{verb}: expected the name of a model, got {_shown(name)}")
    return name


def any_model(verb: str, arguments: Mapping[str, Any]) -> str:
    """Return the name of a model, "" where none is given; or raise ``InvalidArgument``."""
    return "" if arguments.get("model") is None else model_name(verb, arguments)


def timeout_s(arguments: Mapping[str, Any]) -> float | None:
    """Return how many seconds a drain may take, None where nothing is given; or raise ``InvalidArgument``."""
    value = arguments.get("timeout_s")
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_TIMEOUT_S:
        raise InvalidArgument(f"timeout_s: expected 0 to {MAX_TIMEOUT_S:g} seconds, got {_shown(value)}")
    return float(value)


def undo(arguments: Mapping[str, Any]) -> bool:
    """Whether a drain is to be undone; ``InvalidArgument`` where that is neither true nor false."""
    value = arguments.get("undo")
    if not isinstance(value, bool | None):
        raise InvalidArgument(f"undo: expected true or false, got {_shown(value)}")
    return bool(value)


def counts(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return how many instances each model is to have on each device, or raise ``InvalidArgument``."""
    value = arguments.get("counts")
    if not isinstance(value, dict) or not value:
        raise InvalidArgument(f"scale: expected the number of instances by model, got {_shown(value)}")
    for name, count in value.items():
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"scale: expected the name of a model, got {_shown(name)}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InvalidArgument(
                f"scale: model '{name}': expected 1 instance or more on each device, got {_shown(count)}"
            )
    return value


def unknown_model(name: str, known: Collection[str]) -> NotFound:
    return NotFound(f"there is no model {_shown(name)}{near(name, known)}")


def near(name: object, known: Collection[str]) -> str:
    """Say which name was probably meant instead, or which names there are."""
    if not known:
        return ""
    found = difflib.get_close_matches(str(name)[:_SHOWN_CHARACTERS], known, n=1)
    if found:
        return f"; did you mean {found[0]!r}?"
    return f"; there is {', '.join(sorted(known))[:_SHOWN_CHARACTERS]}"


def _shown(value: object) -> str:
    try:
        return repr(value)[:_SHOWN_CHARACTERS]
    except ValueError:  # Python prints no integer of thousands of digits
        return "a number that is too large to be shown"
