"""The status of a server, its events, and tables in general, as lines of text that fit a terminal. Pure."""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

_MODEL_HEAD: Final = ("MODEL", "VERSION", "STATE", "QUEUED", "IN FLIGHT", "SLOTS", "SATURATION", "SOURCE")
_INSTANCE_HEAD: Final = (
    "MODEL", "INSTANCE", "DEVICE", "STATE", "PID", "RESTARTS", "THREADS", "MEMORY", "GPU MEMORY",
)  # fmt: skip
_INGRESS_HEAD: Final = ("INGRESS", "PID", "STATE", "CONNECTIONS", "REQUESTS", "CPU", "RESTARTS")
_WEIGHTS_HEAD: Final = ("SHARED WEIGHTS", "DEVICE", "STATE", "MEMORY", "INSTANCES")
_MEMORY_HEAD: Final = ("MEMORY", "TAKEN", "BUDGET")
_UNITS: Final = (("d", 86_400), ("h", 3600), ("min", 60))
_SERVICE: Final = {"LEAVING": ", draining", "OUT_OF_SERVICE": ", drained"}
_MISSING: Final = "-"
#: Escape sequences: to the upper left corner, clear the rest of a line, clear all below.
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def status_text(document: Mapping[str, Any], width: int | None = None) -> str:
    """Return the result of ``status`` as text, with no line longer than ``width``."""
    models = document["models"]
    parts = [list(_server_lines(document["server"], width))]
    if processes := document["server"]["doors"]:
        known = ("number", "pid", "state", "connections", "requests")
        cells = [(*_cells(one, *known), _duration(one["cpu_s"]), str(one["restarts"])) for one in processes]
        parts.append(list(table_lines(_INGRESS_HEAD, cells, width)))
    if models:
        parts += _model_parts(models, width)
    if instances := [(model, one) for model in models for one in model["instances"]]:
        rows = [_instance_row(model, one) for model, one in instances]
        has_gpu = any("gpu_memory_nbytes" in one for _, one in instances)
        columns = len(_INSTANCE_HEAD) - (0 if has_gpu else 1)
        parts.append(list(table_lines(_INSTANCE_HEAD[:columns], [row[:columns] for row in rows], width)))
    if weights := document.get("weights"):
        parts.append(list(table_lines(_WEIGHTS_HEAD, map(_weights_row, weights), width)))
    if memory := document.get("memory"):
        rows = [
            (device, *map(_mebibytes, (one["nbytes"], one["limit_nbytes"]))) for device, one in memory.items()
        ]
        parts.append(list(table_lines(_MEMORY_HEAD, rows, width)))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def status_screen(document: Mapping[str, Any], size: os.terminal_size) -> str:
    """Return escape sequences that draw the status over the screen, and count lines without room."""
    lines = status_text(document, size.columns).splitlines()
    if len(lines) >= size.lines:
        hidden = len(lines) - size.lines + 2
        lines = [*lines[: size.lines - 2], f"{hidden} more lines"]
    shown = "".join(f"{shortened(line, size.columns)}{_CLEAR_LINE}\n" for line in lines)
    return f"{_HOME}{shown}{_CLEAR_BELOW}"


def _server_lines(server: Mapping[str, Any], line_width: int | None) -> Iterator[str]:
    state = f"{server['state']}{_SERVICE.get(server['service'], '')}"
    ready = "ready" if server["ready"] else "not ready"
    yield f"{server['name']}: {state}, {ready}, up {_duration(server['uptime_s'])}"
    front = server["front"]
    answers = "" if front["answers"] else ", does not answer"
    facts = {
        "version": server["version"],
        "pid": server["pid"],
        "front": f"pid {front['pid'] or _MISSING}, {front['restarts']} restarts{answers}",
        "config": server["config"] or _MISSING,
        **server["addresses"],
    }
    if server.get("mps"):
        facts["mps"] = server["mps"]
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = str(value)
        if line_width is not None:
            room = line_width - width - 4
            is_long_path = name == "config" and len(shown) > room  # its end says more than its start
            shown = f"…{shown[len(shown) - room + 1 :]}" if is_long_path else shortened(shown, room)
        yield f"  {name:<{width}}  {shown}"


def _model_parts(models: Sequence[Mapping[str, Any]], width: int | None) -> list[list[str]]:
    rows = [_model_row(one, one["reason"]) for one in models]
    if width is None or table_fits(_MODEL_HEAD, rows, width):
        return [list(table_lines(_MODEL_HEAD, rows))]
    short = list(table_lines(_MODEL_HEAD, [_model_row(one, "") for one in models], width))
    reasons: list[str] = []
    for one in models:
        if one["reason"]:
            version = f" {one['version']}" if one["version"] else ""
            reasons += wrapped(f"{one['name']}{version}: {one['reason']}", width)
    return [short, reasons] if reasons else [short]


def _model_row(model: Mapping[str, Any], reason: str) -> Sequence[str]:
    version, state = str(model["version"] or _MISSING), model["state"] + (f" ({reason})" if reason else "")
    if model.get("residence"):
        state += f", {model['residence'].lower()}"
    load = _cells(model, "queued", "in_flight", "slots")
    saturation = _MISSING if model["saturation"] is None else f"{model['saturation']:.2f}"
    return (model["name"], version, state, *load, saturation, model["source"])


def _instance_row(model: Mapping[str, Any], instance: Mapping[str, Any]) -> Sequence[str]:
    memory = [_mebibytes(instance.get(name)) for name in ("memory_nbytes", "gpu_memory_nbytes")]
    if instance.get("pids"):
        instance = {**instance, "pid": f"{instance['pid']} +{len(instance['pids']) - 1}"}
    cells = _cells(instance, "name", "device", "state", "pid", "restarts", "threads")
    return (model["name"], *cells, *memory)


def _weights_row(weights: Mapping[str, Any]) -> Sequence[str]:
    instances = weights["instances"]
    shown = ", ".join(instances[:2]) + (f" and {len(instances) - 2} more" if len(instances) > 2 else "")
    return (weights["name"], weights["device"], weights["state"], _mebibytes(weights["nbytes"]), shown)


def _duration(seconds: float) -> str:
    """Return seconds in their two largest units: "3 h 12 min"."""
    left, parts = int(seconds), []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join([*parts, f"{left} s"][:2])


def _mebibytes(nbytes: int | None) -> str:
    return _MISSING if nbytes is None else f"{nbytes / (1 << 20):.0f} MiB"


def _cells(record: Mapping[str, Any], *names: str) -> list[str]:
    return [_MISSING if record.get(name) is None else str(record[name]) for name in names]


_GAP: Final = "  "
#: A placeholder for a space at which a line must not be broken.
_KEPT_SPACE: Final = "\0"


def table_lines(
    head: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None
) -> Iterator[str]:
    """Yield rows below a head in columns, or if these exceed ``width`` as paragraphs. No text is cut."""
    rows = list(rows)
    if width is not None and not table_fits(head, rows, width):
        for row in rows:
            yield from _paragraph(head, row, width)
        return
    widths = _widths(head, rows)
    for line in (head, *rows):
        yield _GAP.join(f"{text:<{column}}" for text, column in zip(line, widths, strict=True)).rstrip()


def table_fits(head: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> bool:
    return sum(_widths(head, rows)) + len(_GAP) * (len(head) - 1) <= width


def _widths(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(head, *rows, strict=True)]


def _paragraph(head: Sequence[str], row: Sequence[str], width: int) -> Iterator[str]:
    """Yield a row as its first column and, below it, all others with their names."""
    yield shortened(f"{head[0].lower()} {row[0]}", width)
    pairs = [f"{name.lower()} {text}" for name, text in zip(head[1:], row[1:], strict=True)]
    whole = [shortened(pair, width - len(_GAP) - 1).replace(" ", _KEPT_SPACE) for pair in pairs]
    for line in wrapped(", ".join(whole), width):
        yield line.replace(_KEPT_SPACE, " ")


def wrapped(text: str, width: int) -> list[str]:
    """Return a text broken at spaces into indented lines; a word longer than a line is cut."""
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(text, width, initial_indent=_GAP, subsequent_indent=_GAP, **options)
    return [shortened(line, width) for line in lines]


def shortened(text: str, width: int) -> str:
    """Return the text without its end if it is longer than a line."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


#: Fields with a position of their own in a line; the others follow as NAME=VALUE.
_POSITIONED: Final = frozenset({"time", "number", "kind", "model", "version", "instance", "reason", "state"})
_KIND_WIDTH: Final = 17


def event_line(event: Mapping[str, Any]) -> str:
    """Return an event as a line: time, kind, model and instance, and all facts that are not empty."""
    moment = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    version = f" {event['version']}" if "version" in event else ""
    instance = f"/{event['instance']}" if "instance" in event else ""
    parts = [
        f"{moment}.{int(event['time'] * 1000) % 1000:03d} {event['kind']:<{_KIND_WIDTH}}",
        f"{event.get('model', '')}{version}{instance}",
    ]
    parts += [str(event[name]) for name in ("state", "reason") if event.get(name)]
    for name, value in event.items():
        if name not in _POSITIONED and value not in (None, "", {}, []):
            is_word = isinstance(value, str) and " " not in value
            parts.append(f"{name}={value if is_word else json.dumps(value, ensure_ascii=False)}")
    return " ".join(one for one in parts if one)
