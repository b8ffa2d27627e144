"""The status of a server as lines of text, which fit a terminal of any width. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gpuserve.cli.views.tables import fits, shortened, shortened_path, table, wrapped

_MODEL_HEAD: Final = ("MODEL", "VERSION", "STATE", "QUEUED", "IN FLIGHT", "SLOTS", "SATURATION", "SOURCE")
_INSTANCE_HEAD: Final = ("MODEL", "INSTANCE", "DEVICE", "STATE", "PID", "RESTARTS", "MEMORY", "GPU MEMORY")
_DOOR_HEAD: Final = ("DOOR", "PID", "STATE", "CONNECTIONS", "REQUESTS", "CPU", "RESTARTS")
_UNITS: Final = (("d", 86_400), ("h", 3600), ("min", 60))
_SERVICE: Final = {"LEAVING": ", draining", "OUT_OF_SERVICE": ", drained"}
_UNKNOWN: Final = "-"


def status_text(document: Mapping[str, Any], width: int | None = None) -> str:
    """Write the answer of ``status`` as lines for people, none longer than ``width``."""
    models = document["models"]
    parts = [list(_server_lines(document["server"], width))]
    if doors := document["server"]["doors"]:
        parts.append(list(table(_DOOR_HEAD, map(_door_row, doors), width)))
    if models:
        parts += _model_parts(models, width)
    if instances := [(model, one) for model in models for one in model["instances"]]:
        rows = [_instance_row(model, one) for model, one in instances]
        has_gpu = any("gpu_memory_nbytes" in one for _, one in instances)
        columns = len(_INSTANCE_HEAD) - (0 if has_gpu else 1)
        parts.append(list(table(_INSTANCE_HEAD[:columns], [row[:columns] for row in rows], width)))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _server_lines(server: Mapping[str, Any], line_width: int | None) -> Iterator[str]:
    state = f"{server['state']}{_SERVICE.get(server['service'], '')}"
    ready = "ready" if server["ready"] else "not ready"
    yield f"{server['name']}: {state}, {ready}, up {_duration(server['uptime_s'])}"
    front = server["front"]
    answers = "" if front["answers"] else ", does not answer"
    facts = {
        "version": server["version"],
        "pid": server["pid"],
        "front": f"pid {front['pid'] or _UNKNOWN}, {front['restarts']} restarts{answers}",
        "config": server["config"] or _UNKNOWN,
        **server["addresses"],
    }
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = str(value)
        if line_width is not None:
            short = shortened_path if name == "config" else shortened
            shown = short(shown, line_width - width - 4)
        yield f"  {name:<{width}}  {shown}"


def _model_parts(models: Sequence[Mapping[str, Any]], width: int | None) -> list[list[str]]:
    """Write the table of models; reasons that it has no room for stand below it."""
    rows = [_model_row(one, one["reason"]) for one in models]
    if width is None or fits(_MODEL_HEAD, rows, width):
        return [list(table(_MODEL_HEAD, rows))]
    short = list(table(_MODEL_HEAD, [_model_row(one, "") for one in models], width))
    reasons = [line for one in models if one["reason"] for line in _reason_lines(one, width)]
    return [short, reasons] if reasons else [short]


def _reason_lines(model: Mapping[str, Any], width: int) -> list[str]:
    version = f" {model['version']}" if model["version"] else ""
    return wrapped(f"{model['name']}{version}: {model['reason']}", width)


def _door_row(door: Mapping[str, Any]) -> Sequence[str]:
    return (
        str(door["number"]),
        _shown(door["pid"]),
        door["state"],
        str(door["connections"]),
        str(door["requests"]),
        _duration(door["cpu_s"]),
        str(door["restarts"]),
    )


def _model_row(model: Mapping[str, Any], reason: str) -> Sequence[str]:
    saturation = model["saturation"]
    return (
        model["name"],
        str(model["version"] or _UNKNOWN),
        model["state"] + (f" ({reason})" if reason else ""),
        _shown(model["queued"]),
        _shown(model["in_flight"]),
        _shown(model["slots"]),
        _UNKNOWN if saturation is None else f"{saturation:.2f}",
        model["source"],
    )


def _instance_row(model: Mapping[str, Any], instance: Mapping[str, Any]) -> Sequence[str]:
    return (
        model["name"],
        instance["name"],
        instance["device"],
        instance["state"],
        _shown(instance["pid"]),
        _shown(instance["restarts"]),
        _mebibytes(instance.get("memory_nbytes")),
        _mebibytes(instance.get("gpu_memory_nbytes")),
    )


def _duration(seconds: float) -> str:
    """Write seconds in their two largest units: "3 h 12 min"."""
    left, parts = int(seconds), []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join([*parts, f"{left} s"][:2])


def _mebibytes(nbytes: int | None) -> str:
    return _UNKNOWN if nbytes is None else f"{nbytes / (1 << 20):.0f} MiB"


def _shown(value: object) -> str:
    return _UNKNOWN if value is None else str(value)
