"""The arguments of the operator's verbs, checked: a peer's word is not trusted. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from gpuserve.errors import InvalidArgument, NotFound

#: The verbs, and the arguments that each may be given.
VERBS: Final[Mapping[str, frozenset[str]]] = {
    "status": frozenset(),
    "drain": frozenset({"timeout_s", "undo"}),
    "load": frozenset({"model"}),
    "unload": frozenset({"model"}),
    "reload": frozenset({"model"}),
    "scale": frozenset({"counts"}),
}
#: A server that is to finish what it has is not waited for longer.
MAX_TIMEOUT_S: Final = 86_400.0
_SHOWN_CHARACTERS: Final = 128


def check_verb(verb: object, arguments: object) -> None:
    """Whether there is such a verb, which takes such arguments.

    Raises:
        InvalidArgument: there is not, or it does not.
    """
    if not isinstance(verb, str) or verb not in VERBS:
        raise InvalidArgument(f"expected one of {', '.join(VERBS)}, got {_shown(verb)}")
    if not isinstance(arguments, dict):
        raise InvalidArgument(f"{verb}: expected arguments by name, got {_shown(arguments)}")
    for name in arguments:
        if name not in VERBS[verb]:
            raise InvalidArgument(f"{verb} has no argument {_shown(name)}{near(name, VERBS[verb])}")


def model_name(verb: str, arguments: Mapping[str, Any]) -> str:
    """The model that a verb is about.

    Raises:
        InvalidArgument: none is named.
    """
    name = arguments.get("model")
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{verb}: expected the name of a model, got {_shown(name)}")
    return name


def timeout_s(arguments: Mapping[str, Any]) -> float | None:
    """How long a drain may take, in seconds; None where that is left open.

    Raises:
        InvalidArgument: it is no time.
    """
    value = arguments.get("timeout_s")
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 <= value <= MAX_TIMEOUT_S:
        raise InvalidArgument(f"timeout_s: expected 0 to {MAX_TIMEOUT_S:g} seconds, got {_shown(value)}")
    return float(value)


def undo(arguments: Mapping[str, Any]) -> bool:
    """Whether a drain is to be undone.

    Raises:
        InvalidArgument: it is neither true nor false.
    """
    value = arguments.get("undo")
    if value not in (None, True, False) or (isinstance(value, int) and not isinstance(value, bool)):
        raise InvalidArgument(f"undo: expected true or false, got {_shown(value)}")
    return bool(value)


def counts(arguments: Mapping[str, Any]) -> dict[str, int]:
    """How many instances each model is to have on each of its devices.

    Raises:
        InvalidArgument: that is not what was given.
    """
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
    """What is said of a model that does not exist."""
    return NotFound(f"there is no model {_shown(name)}{near(name, known)}")


def near(name: object, known: Collection[str]) -> str:
    """What was meant instead, or which there are."""
    if not known:
        return ""
    found = difflib.get_close_matches(str(name)[:_SHOWN_CHARACTERS], known, n=1)
    if found:
        return f"; did you mean {found[0]!r}?"
    return f"; there is {', '.join(sorted(known))[:_SHOWN_CHARACTERS]}"


def _shown(value: object) -> str:
    """A peer's value in a sentence: never all of a long one."""
    return repr(value)[:_SHOWN_CHARACTERS]
