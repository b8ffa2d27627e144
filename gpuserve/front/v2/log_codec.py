"""The log settings as JSON and as ``LogSettings`` messages. Pure; what they do is in ``service/control.py``.

The texts of the errors are Triton's, which differ between the two protocols.
"""

from __future__ import annotations

from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.errors import InvalidArgument, Unavailable, Unimplemented
from gpuserve.front.v2.json_values import compact, loads
from gpuserve.front.v2.limits import shown
from gpuserve.settings.log import DEFAULT, ISO8601, LogSettings

_FILE: Final = "log_file"
_NO_FILE: Final = "log file location can not be updated through network protocol"
_BOOLEANS: Final = ("log_info", "log_warning", "log_error")
_VERBOSE: Final = "log_verbose_level"
_FORMAT: Final = "log_format"
_FORMATS: Final = frozenset({DEFAULT, ISO8601})
_MAX_VERBOSE: Final = (1 << 32) - 1


def parse_json(body: bytes) -> dict[str, Any]:
    """The fields of ``LogSettings`` that a body changes; null leaves one as it is.

    Raises:
        InvalidArgument: malformed JSON, or a value of another type.
        Unimplemented: the log file, which is not for clients to choose.
        Unavailable: an unknown format of the time.
    """
    document = loads(body)
    if not isinstance(document, dict):
        raise InvalidArgument("the body of a logging request must be a JSON object")
    given = {name: value for name, value in document.items() if value is not None}
    if _FILE in given:
        raise Unimplemented(_NO_FILE)
    changes: dict[str, Any] = {}
    for name in (*_BOOLEANS, _VERBOSE, _FORMAT):
        if name in given:
            changes[name] = _json_value(name, given[name])
    return changes


def json_body(settings: LogSettings) -> bytes:
    return compact({_FILE: "", **settings._asdict()}).encode()


def parse_message(request: Any) -> dict[str, Any]:
    """The fields of ``LogSettings`` that a ``LogSettingsRequest`` changes; no value leaves one as it is.

    Raises:
        InvalidArgument: a value of another type, or an unknown format of the time.
        Unimplemented: the log file, which is not for clients to choose.
    """
    given = {name: one for name, one in request.settings.items() if one.WhichOneof("parameter_choice")}
    if _FILE in given:
        raise Unimplemented(_NO_FILE)
    changes: dict[str, Any] = {}
    for name in _BOOLEANS:
        if name in given:
            changes[name] = _message_value(name, given[name], "bool_param", "boolean")
    if _VERBOSE in given:
        changes[_VERBOSE] = _message_value(_VERBOSE, given[_VERBOSE], "uint32_param", "int32")
    if _FORMAT in given:
        changes[_FORMAT] = _message_value(_FORMAT, given[_FORMAT], "string_param", "string")
        if changes[_FORMAT] not in _FORMATS:
            raise InvalidArgument(f"invalid argument for log_format, got: {shown(changes[_FORMAT])}")
    return changes


def message(settings: LogSettings) -> Any:
    response = pb.LogSettingsResponse()
    for name in _BOOLEANS:
        response.settings[name].bool_param = getattr(settings, name)
    response.settings[_FILE].string_param = ""
    response.settings[_VERBOSE].uint32_param = settings.log_verbose_level
    response.settings[_FORMAT].string_param = settings.log_format
    return response


def _json_value(name: str, value: Any) -> Any:
    if name in _BOOLEANS:
        if not isinstance(value, bool):
            raise _wrong_json(name, "a boolean", value)
    elif name == _VERBOSE:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_VERBOSE:
            raise _wrong_json(name, f"an integer from 0 to {_MAX_VERBOSE}", value)
    elif not isinstance(value, str):
        raise _wrong_json(name, "a string", value)
    elif value not in _FORMATS:
        raise Unavailable(f"invalid argument for --log_format, got: {shown(value)}")
    return value


def _wrong_json(name: str, expected: str, value: Any) -> InvalidArgument:
    return InvalidArgument(f"Unable to parse '{name}': expected {expected}, got: {shown(compact(value))}")


def _message_value(name: str, one: Any, field: str, kind: str) -> Any:
    if one.WhichOneof("parameter_choice") != field:
        raise InvalidArgument(f"expect {kind} for '{name}'")
    return getattr(one, field)
