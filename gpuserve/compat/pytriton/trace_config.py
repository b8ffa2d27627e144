"""From ``TritonConfig.trace_config`` to ``TraceSettings``. Pure.

Its items are those of Triton's ``--trace-config``: ``level=TIMESTAMPS``, ``rate=100``, ``count=-1``,
``mode=opentelemetry``, ``triton,file=trace.json``, ``triton,log-frequency=50``, ``opentelemetry,url=…``,
``opentelemetry,resource=service.name=name``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpuserve.compat.pytriton.exceptions import PyTritonValidationError
from gpuserve.errors import ConfigError
from gpuserve.settings import TraceSettings
from gpuserve.trace_output import check_trace

_NUMBERS: Final = {"rate": "rate", "count": "count", "triton,log-frequency": "log_frequency"}
_TEXTS: Final = {"mode": "mode", "triton,file": "file", "opentelemetry,url": "url"}
_LEVEL: Final = "level"
_RESOURCE: Final = "opentelemetry,resource"
_KNOWN: Final = (_LEVEL, *_NUMBERS, *_TEXTS, _RESOURCE)
_OFF: Final = "OFF"


def trace_settings(items: Sequence[str]) -> TraceSettings:
    """The settings that the items mean; what is given twice counts the last time, levels and resource add up.

    Raises:
        PyTritonValidationError: an item is none of these, or the settings cannot be.
    """
    fields: dict[str, Any] = {}
    for item in items:
        name, _, value = item.partition("=")
        _put(fields, name.strip().lower(), value.strip(), item)
    if _OFF in fields.get("level", ()):
        fields["level"] = ()
    settings = TraceSettings(**fields)
    try:
        check_trace(settings)
    except ConfigError as error:
        raise PyTritonValidationError(f"TritonConfig.trace_config: {error}") from None
    return settings


def _put(fields: dict[str, Any], name: str, value: str, item: str) -> None:
    if name in _NUMBERS:
        fields[_NUMBERS[name]] = _number(value, item)
    elif name in _TEXTS:
        fields[_TEXTS[name]] = value
    elif name == _LEVEL:
        fields["level"] = (*fields.get("level", ()), value.upper())
    elif name == _RESOURCE:
        key, _, text = value.partition("=")
        fields["resource"] = fields.get("resource", TraceSettings().resource) | {key: text}
    else:
        raise PyTritonValidationError(
            f"TritonConfig.trace_config {item!r} is not supported by gpuserve: expected one of "
            f"{', '.join(one + '=' for one in _KNOWN)}"
        )


def _number(value: str, item: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise PyTritonValidationError(
            f"TritonConfig.trace_config: expected an integer in {item!r}, given {value!r}"
        ) from None
