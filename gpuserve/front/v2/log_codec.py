"""The log settings as JSON and as messages, with Triton's error texts, which differ between the two. Pure."""

from __future__ import annotations

from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.config.settings.logs import DEFAULT, ISO8601, LogSettings
from gpuserve.core.errors import InvalidArgument, Unavailable, Unimplemented
from gpuserve.front.v2.json_values import compact, loads
from gpuserve.front.v2.limits import check_entries, shown

_FILE: Final = "log_file"
_NO_FILE: Final = "log file location can not be updated through network protocol"
_BOOLEANS: Final = ("log_info", "log_warning", "log_error")
_VERBOSE: Final = "log_verbose_level"
_FORMAT: Final = "log_format"
_FORMATS: Final = frozenset({DEFAULT, ISO8601})
_MAX_VERBOSE: Final = (1 << 32) - 1
#: In which field of a message a setting is that is no boolean, and how Triton calls its type.
_FIELDS: Final = {_VERBOSE: ("uint32_param", "int32"), _FORMAT: ("string_param", "string")}


def parse_json(body: bytes) -> dict[str, Any]:
    """The fields of ``LogSettings`` that a body changes; raises a ``RequestError`` if it cannot be."""
    document = loads(body)
    if not isinstance(document, dict):
        raise InvalidArgument("the body of a logging request must be a JSON object")
    check_entries("settings", document)
    given = {name: value for name, value in document.items() if value is not None}
    if _FILE in given:
        raise Unimplemented(_NO_FILE)
    return {name: _json_value(name, given[name]) for name in LogSettings._fields if name in given}


def json_body(settings: LogSettings) -> bytes:
    return compact({_FILE: "", **settings._asdict()}).encode()


def parse_message(request: Any) -> dict[str, Any]:
    """The fields of ``LogSettings`` that a message changes; raises a ``RequestError`` if it cannot be."""
    check_entries("settings", request.settings)
    given = {name: one for name, one in request.settings.items() if one.WhichOneof("parameter_choice")}
    if _FILE in given:
        raise Unimplemented(_NO_FILE)
    return {name: _message_value(name, given[name]) for name in LogSettings._fields if name in given}


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


def _message_value(name: str, one: Any) -> Any:
    field, kind = _FIELDS.get(name, ("bool_param", "boolean"))
    if one.WhichOneof("parameter_choice") != field:
        raise InvalidArgument(f"expect {kind} for '{name}'")
    value = getattr(one, field)
    if name == _FORMAT and value not in _FORMATS:
        raise InvalidArgument(f"invalid argument for log_format, got: {shown(value)}")
    return value
