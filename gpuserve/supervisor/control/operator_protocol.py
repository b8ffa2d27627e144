"""The protocol between an operator's command and a running server, with checks for the arguments of each
verb, because the peer is not trusted. Messages are framed as in ``front_messages.py``. A connection carries
one command::

    command -> server   OperatorCommand
    server -> command   CommandProgress and CommandKeepAlive (any number), VerbOutcome
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.core.errors import InvalidArgument, NotFound, RequestError
from gpuserve_worker.protocol.datagram import MessageCodec

#: Incremented whenever a field of a message changes meaning.
PROTOCOL: Final = 1
KEEP_ALIVE_PERIOD_S: Final = 3.0


class OperatorCommand(NamedTuple):
    """A verb and its arguments; see ``OperatorVerbs``."""

    protocol: int
    verb: str
    arguments: dict[str, Any]


class CommandProgress(NamedTuple):
    """A line of progress of a running verb."""

    text: str


class CommandKeepAlive(NamedTuple):
    """A message every ``KEEP_ALIVE_PERIOD_S``, so that clients detect a server that hangs."""


class VerbOutcome(NamedTuple):
    """A verb's outcome: ``code`` ("": success), ``text`` (a sentence or ""), ``result`` (plain data)."""

    code: str = ""
    text: str = ""
    result: dict[str, Any] = {}  # noqa: RUF012 - never modified


OPERATOR_VOCABULARY: Final = MessageCodec(
    {1: OperatorCommand, 20: CommandProgress, 21: VerbOutcome, 22: CommandKeepAlive}
)


#: Receives lines of progress.
OnProgress: TypeAlias = Callable[[str], None]
#: Receives the outcome; called exactly once.
OnOutcome: TypeAlias = Callable[[VerbOutcome], None]


def failed(error: RequestError, result: dict[str, Any] | None = None) -> VerbOutcome:
    return VerbOutcome(error.code.value, str(error).rstrip("\n"), result or {})


#: The verbs, with the arguments that each accepts.
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
#: Maximum ``timeout_s`` of a drain.
MAX_TIMEOUT_S: Final = 86_400.0
_SHOWN_CHARACTERS: Final = 128
#: The most names that an error lists.
_SHOWN_NAMES: Final = 32


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


def timeout_s(arguments: Mapping[str, Any]) -> float | None:
    """Return the timeout of a drain in seconds, or None. Raise ``InvalidArgument``."""
    value = arguments.get("timeout_s")
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_TIMEOUT_S:
        raise InvalidArgument(f"timeout_s: expected 0 to {MAX_TIMEOUT_S:g} seconds, got {_shown(value)}")
    return float(value)


def undo(arguments: Mapping[str, Any]) -> bool:
    """Return whether a drain is to be undone, or raise ``InvalidArgument``."""
    value = arguments.get("undo")
    if not isinstance(value, bool | None):
        raise InvalidArgument(f"undo: expected true or false, got {_shown(value)}")
    return bool(value)


def counts(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of instances on each device by model, or raise ``InvalidArgument``."""
    value = arguments.get("counts")
    if not isinstance(value, dict) or not value:
        raise InvalidArgument(f"scale: expected the number of instances by model, got {_shown(value)}")
    for name, count in value.items():
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"scale: expected the name of a model, got {_shown(name)}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            text = f"expected 1 instance or more on each device, got {_shown(count)}"
            raise InvalidArgument(f"scale: model '{name}': {text}")
    return value


def unknown_model(name: str, known: Collection[str]) -> NotFound:
    return NotFound(f"there is no model {_shown(name)}{near(name, known)}")


def near(name: object, known: Collection[str]) -> str:
    """Return a hint for an error text: the name that was probably meant, or the names that exist."""
    if not known:
        return ""
    found = difflib.get_close_matches(str(name)[:_SHOWN_CHARACTERS], known, n=1)
    if found:
        return f"; did you mean {found[0]!r}?"
    shown = sorted(known)[:_SHOWN_NAMES]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return f"; there is {', '.join(shown)}{more}"


def _shown(value: object) -> str:
    try:
        return repr(value)[:_SHOWN_CHARACTERS]
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return "a number that is too large to be shown"
