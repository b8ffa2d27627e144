"""The parameters and headers of a call, checked, and which of them the protocol itself reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuserve.client.exceptions import ClientValueError

#: Parameters that tritonclient takes as arguments of their own.
_ARGUMENTS: Final[tuple[str, ...]] = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end")


def infer_options(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parameters of a request as the arguments that tritonclient takes them by.

    ``priority`` and ``timeout`` (microseconds) are the protocol's, as are ``sequence_*``; all others reach
    the model.

    Raises:
        ClientValueError: no mapping of strings to strings, integers or booleans.
    """
    if parameters is None:
        return {}
    custom = dict(check_values("parameters", parameters))
    options = {name: custom.pop(name) for name in _ARGUMENTS if name in custom}
    for name in ("priority", "timeout"):
        value = options.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ClientValueError(f"Parameter {name!r} must be an integer of at least 0, got {value!r}")
    if custom:
        options["parameters"] = custom
    return options


def check_values(what: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters or headers, if they may be sent. ``what`` names them in messages.

    Raises:
        ClientValueError: no mapping of strings to strings, integers or booleans.
    """
    if not isinstance(given, Mapping):
        raise ClientValueError(f"{what} must be a dictionary, got {type(given).__name__}")
    for key, value in given.items():
        if not isinstance(key, str):
            raise ClientValueError(f"Each key of {what} must be a string, got {key!r}")
        if not isinstance(value, str | int | bool):
            raise ClientValueError(
                f"The value of {key!r} in {what} must be a string, integer or boolean, got {value!r:.200}"
            )
    return given
