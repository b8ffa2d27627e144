"""JSON and protobuf of statistics, trace and log settings, with Triton's error texts for each. Pure."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.config.settings.logs import DEFAULT, ISO8601, LogSettings
from gpuserve.core.errors import InvalidArgument, Unavailable, Unimplemented
from gpuserve.front.requests.json_values import compact, loads, typed
from gpuserve.front.requests.limits import check_entries, shown
from gpuserve.front.requests.statistics import Duration, Executions, StatisticsEntry

#: Every count is a uint64 on the wire.
_MAX: Final = (1 << 64) - 1


def statistics_message(entries: Iterable[StatisticsEntry]) -> Any:
    return pb.ModelStatisticsResponse(model_stats=[_entry(one) for one in entries])


def statistics_json(entries: Iterable[StatisticsEntry]) -> bytes:
    return compact({"model_stats": [_entry(one) for one in entries]}).encode()


def statistics_message_in_steps(entries: Iterable[StatisticsEntry]) -> Generator[None, None, bytes]:
    """Serialise the message entry by entry. Entries of a repeated field can be concatenated."""
    parts: list[bytes] = []
    for one in entries:
        parts.append(statistics_message([one]).SerializeToString())
        yield
    return b"".join(parts)


def statistics_json_in_steps(entries: Iterable[StatisticsEntry]) -> Generator[None, None, bytes]:
    """Serialise the JSON entry by entry."""
    parts: list[str] = []
    for one in entries:
        parts.append(compact(_entry(one)))
        yield
    return f'{{"model_stats":[{",".join(parts)}]}}'.encode()


def _entry(entry: StatisticsEntry) -> dict[str, Any]:
    statistics = entry.statistics
    executions = statistics.executions()
    return {
        "name": entry.name,
        "version": entry.version,
        "last_inference": int(statistics.last_answer_at * 1000),
        "inference_count": executions.rows,
        "execution_count": executions.count,
        "inference_stats": _durations(statistics.durations()),
        "batch_stats": [_batch(size, one) for size, one in statistics.by_size().items()],
        "memory_usage": [
            {"type": "CPU", "id": 0, "byte_size": entry.memory_nbytes},
            *(
                {"type": "GPU", "id": number, "byte_size": nbytes}
                for number, nbytes in entry.gpu_memory_nbytes.items()
            ),
        ],
        "response_stats": {
            str(index): _durations(one.durations()) for index, one in enumerate(statistics.responses)
        },
    }


def _batch(size: int, executions: Executions) -> dict[str, Any]:
    phases = ("compute_input", "compute_infer", "compute_output")
    durations = {one: Duration(executions.count, getattr(executions, f"{one}_ns")) for one in phases}
    return {"batch_size": size, **_durations(durations)}


def _durations(durations: dict[str, Duration]) -> dict[str, dict[str, int]]:
    return {name: {"count": times, "ns": min(ns, _MAX)} for name, (times, ns) in durations.items()}


# ---- trace settings ------------------------------------------------------------------------------

#: The only setting that is a list in JSON; all others are strings.
_LEVEL: Final = "trace_level"


def parse_trace_json(body: bytes) -> dict[str, list[str] | None]:
    """Return the changes of a body; null resets a setting. Raise InvalidArgument if malformed."""
    document = loads(body)
    if not isinstance(document, dict):
        raise InvalidArgument("the body of a trace setting request must be a JSON object")
    check_entries("settings", document)
    return {name: None if value is None else _texts(name, value) for name, value in document.items()}


def trace_json(settings: Mapping[str, Sequence[str]]) -> bytes:
    return compact({name: texts if name == _LEVEL else texts[0] for name, texts in settings.items()}).encode()


def parse_trace_message(request: Any) -> dict[str, list[str] | None]:
    """Return the changes of a ``TraceSettingRequest``; a setting without a value is reset."""
    check_entries("settings", request.settings)
    for one in request.settings.values():
        check_entries("values of a setting", one.value)
    return {name: list(one.value) or None for name, one in request.settings.items()}


def trace_message(settings: Mapping[str, Sequence[str]]) -> Any:
    response = pb.TraceSettingResponse()
    for name, texts in settings.items():
        response.settings[name].value.extend(texts)
    return response


def _texts(name: str, value: Any) -> list[str]:
    if name == _LEVEL:
        check_entries("values of a setting", value if isinstance(value, list) else ())
        return [typed(one, str, f"'{name}'") for one in typed(value, list, f"'{name}'")]
    return [typed(value, str, f"'{name}'")]


# ---- log settings --------------------------------------------------------------------------------

_FILE: Final = "log_file"
_NO_FILE: Final = "log file location can not be updated through network protocol"
_BOOLEANS: Final = ("log_info", "log_warning", "log_error")
_VERBOSE: Final = "log_verbose_level"
_FORMAT: Final = "log_format"
_FORMATS: Final = frozenset({DEFAULT, ISO8601})
_MAX_VERBOSE: Final = (1 << 32) - 1
#: Message field of each setting that is not a boolean, and Triton's name for its type.
_FIELDS: Final = {_VERBOSE: ("uint32_param", "int32"), _FORMAT: ("string_param", "string")}


def parse_log_json(body: bytes) -> dict[str, Any]:
    """Return the ``LogSettings`` fields that a body changes. Raise a ``RequestError`` if it cannot."""
    document = loads(body)
    if not isinstance(document, dict):
        raise InvalidArgument("the body of a logging request must be a JSON object")
    check_entries("settings", document)
    given = {name: value for name, value in document.items() if value is not None}
    if _FILE in given:
        raise Unimplemented(_NO_FILE)
    return {name: _json_value(name, given[name]) for name in LogSettings._fields if name in given}


def log_json(settings: LogSettings) -> bytes:
    return compact(settings._asdict()).encode()


def parse_log_message(request: Any) -> dict[str, Any]:
    """Return the ``LogSettings`` fields that a message changes. Raise a ``RequestError`` if it cannot."""
    check_entries("settings", request.settings)
    given = {name: one for name, one in request.settings.items() if one.WhichOneof("parameter_choice")}
    if _FILE in given:
        raise Unimplemented(_NO_FILE)
    return {name: _message_value(name, given[name]) for name in LogSettings._fields if name in given}


def log_message(settings: LogSettings) -> Any:
    response = pb.LogSettingsResponse()
    for name in _BOOLEANS:
        response.settings[name].bool_param = getattr(settings, name)
    response.settings[_FILE].string_param = settings.log_file
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
