"""Settings of the trace and of the log: sections 2.11 and 2.12. Each case puts them back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from triton_differences.steps import Case, Step, call, case, get, post

_TRACE, _LOG = "/v2/trace/setting", "/v2/logging"
_OF_MODEL = "/v2/models/simple/trace/setting"
_TRACES: dict[str, Any] = {
    "nothing": {},
    "rate": {"trace_rate": "7"},
    "count": {"trace_count": "3"},
    "level": {"trace_level": ["TIMESTAMPS"]},
    "levels": {"trace_level": ["TIMESTAMPS", "TENSORS"]},
    "level off and another": {"trace_level": ["OFF", "TIMESTAMPS"]},
    "unknown level": {"trace_level": ["OTHER"]},
    "level as text": {"trace_level": "TIMESTAMPS"},
    "rate as number": {"trace_rate": 7},
    "rate as letters": {"trace_rate": "x"},
    "rate negative": {"trace_rate": "-1"},
    "rate huge": {"trace_rate": "99999999999"},
    "count below": {"trace_count": "-2"},
    "count as letters": {"trace_count": "x"},
    "frequency": {"log_frequency": "5"},
    "frequency as letters": {"log_frequency": "x"},
    "file": {"trace_file": "/tmp/other"},
    "mode": {"trace_mode": "opentelemetry"},
    "unknown": {"other": "1"},
    "cleared": {"trace_rate": None, "trace_level": None},
}
_RESET = {"trace_rate": None, "trace_count": None, "trace_level": None, "log_frequency": None}
_LOGS: dict[str, Any] = {
    "nothing": {},
    "info": {"log_info": False},
    "warning": {"log_warning": False},
    "error": {"log_error": False},
    "verbose": {"log_verbose_level": 1},
    "format": {"log_format": "ISO8601"},
    "info as text": {"log_info": "true"},
    "verbose as text": {"log_verbose_level": "1"},
    "format unknown": {"log_format": "other"},
    "format as number": {"log_format": 1},
    "file": {"log_file": "/tmp/other"},
    "unknown": {"other": 1},
    "null": {"log_info": None},
}
_LOG_RESET = {
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


def cases() -> Iterator[Case]:
    yield case("trace settings", get(_TRACE), get(_OF_MODEL), _trace({}), _trace({}, "simple"))
    yield case("trace settings of unknown", get("/v2/models/unknown/trace/setting"), _trace({}, "unknown"))
    yield case("trace settings of a version", get("/v2/models/simple/versions/1/trace/setting"))
    for name, settings in _TRACES.items():
        yield case(f"http trace: {name}", post(_TRACE, settings), get(_TRACE), post(_TRACE, _RESET))
        yield case(
            f"http trace of a model: {name}",
            post(_OF_MODEL, settings),
            get(_OF_MODEL),
            post(_OF_MODEL, _RESET),
        )
        yield case(f"grpc trace: {name}", _trace(settings), _trace({}), _trace(_RESET))
    yield case("trace not JSON", post(_TRACE, b"{"), post(_TRACE, b"[]"), post(_TRACE, b""))
    yield case("log settings", get(_LOG), _log({}))
    for name, settings in _LOGS.items():
        yield case(f"http log: {name}", post(_LOG, settings), get(_LOG), post(_LOG, _LOG_RESET))
        yield case(f"grpc log: {name}", _log(settings), _log({}), _log(_LOG_RESET))
    yield case("log not JSON", post(_LOG, b"{"), post(_LOG, b"[]"), post(_LOG, b""))


def _trace(settings: dict[str, Any], model: str = "") -> Step:
    request = pb.TraceSettingRequest(model_name=model)
    for name, value in settings.items():
        values = [] if value is None else value if isinstance(value, list) else [str(value)]
        request.settings[name].SetInParent()
        request.settings[name].value.extend(values)
    return call("TraceSetting", request)


def _log(settings: dict[str, Any]) -> Step:
    request = pb.LogSettingsRequest()
    for name, value in settings.items():
        match value:
            case bool():
                request.settings[name].bool_param = value
            case int():
                request.settings[name].uint32_param = value % 2**32
            case str():
                request.settings[name].string_param = value
            case None:
                request.settings[name].SetInParent()
    return call("LogSettings", request)
