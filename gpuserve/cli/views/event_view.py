"""Events as lines of text. Pure, but for the time zone."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Final

#: What has its own place in a line.
_PLACED: Final = frozenset({"time", "number", "kind", "model", "version", "instance", "reason", "state"})
_KIND_WIDTH: Final = 17


def event_line(event: Mapping[str, Any]) -> str:
    """Write an event: when, what, about whom, and the facts; what is empty is left out."""
    moment = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    parts = [f"{moment}.{int(event['time'] * 1000) % 1000:03d} {event['kind']:<{_KIND_WIDTH}}", _about(event)]
    parts += [str(event[name]) for name in ("state", "reason") if event.get(name)]
    facts = {name: value for name, value in event.items() if name not in _PLACED}
    parts += [f"{name}={_shown(value)}" for name, value in facts.items() if value not in (None, "", {}, [])]
    return " ".join(one for one in parts if one)


def _about(event: Mapping[str, Any]) -> str:
    version = f" {event['version']}" if "version" in event else ""
    instance = f"/{event['instance']}" if "instance" in event else ""
    return f"{event.get('model', '')}{version}{instance}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and " " not in value else json.dumps(value, ensure_ascii=False)
