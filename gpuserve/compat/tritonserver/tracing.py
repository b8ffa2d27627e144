"""The options of tracing: items such as ``level=TIMESTAMPS``, ``mode=opentelemetry``, ``triton,file=t.json``
and ``opentelemetry,resource=service.name=name``, and the flags that there were before them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from gpuserve.compat.tritonserver.words import OptionProblem, Setting
from gpuserve.config.settings.server import TraceSettings

_OPTION: Final = "trace-config"
_NUMBERS: Final = {"rate": "rate", "count": "count", "triton,log-frequency": "log_frequency"}
_TEXTS: Final = {"mode": "mode", "triton,file": "file", "opentelemetry,url": "url"}
_LEVEL: Final = "level"
_RESOURCE: Final = "opentelemetry,resource"
_KNOWN: Final = (_LEVEL, *_NUMBERS, *_TEXTS, _RESOURCE)
_OFF: Final = "OFF"
#: Words for levels; others are told where all settings are checked.
_LEVELS: Final = {
    "TRUE": "TIMESTAMPS",
    "ON": "TIMESTAMPS",
    "MIN": "TIMESTAMPS",
    "MAX": "TIMESTAMPS",
    "FALSE": _OFF,
}
#: The older flags, of which ``trace-config`` goes first.
_OLDER: Final = {
    "trace-file": "file",
    "trace-rate": "rate",
    "trace-count": "count",
    "trace-log-frequency": "log_frequency",
}


def trace_settings(get: Callable[[str], Any]) -> list[Setting]:
    """The settings that the options mean, which ``get`` has by their names; what is given twice counts the
    last time, levels and resource add up. Raises OptionProblem: an item is none of these.
    """
    items: Sequence[str] = get(_OPTION) or ()
    fields: dict[str, Any] = {}
    for item in items:
        name, _, value = item.partition("=")
        _put(fields, name.strip().lower(), value.strip(), item)
    found = {key: Setting(("trace", key), value, _OPTION) for key, value in fields.items()}
    for option, key in _OLDER.items():
        if get(option) is not None:
            found.setdefault(key, Setting(("trace", key), get(option), option))
    levels = [*(_level(one) for one in get("trace-level") or ()), *fields.get(_LEVEL, ())]
    if levels:
        option = _OPTION if _LEVEL in fields else "trace-level"
        found[_LEVEL] = Setting(("trace", _LEVEL), () if _OFF in levels else tuple(levels), option)
    return list(found.values())


def _level(text: str) -> str:
    return _LEVELS.get(text.upper(), text.upper())


def _put(fields: dict[str, Any], name: str, value: str, item: str) -> None:
    if name in _NUMBERS:
        fields[_NUMBERS[name]] = _number(value, item)
    elif name in _TEXTS:
        fields[_TEXTS[name]] = value
    elif name == _LEVEL:
        fields[_LEVEL] = (*fields.get(_LEVEL, ()), _level(value))
    elif name == _RESOURCE:
        key, _, text = value.partition("=")
        fields["resource"] = fields.get("resource", TraceSettings().resource) | {key: text}
    else:
        expected = ", ".join(one + "=" for one in _KNOWN)
        raise OptionProblem(_OPTION, f"{item!r} is not supported by gpuserve: expected one of {expected}")


def _number(value: str, item: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise OptionProblem(_OPTION, f"expected an integer in {item!r}, given {value!r}") from None
