"""What of a sample (``docs/reference.md``, "Events") stands in a table: columns, their order, and numbers as
short texts. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

#: A model or an instance, as a sample has it.
Row: TypeAlias = Mapping[str, Any]

UNKNOWN: Final = "-"
#: From here on a model is nearly, and then fully busy.
BUSY, FULL = 0.7, 0.9
_READY: Final = "READY"


class Column(NamedTuple):
    """One column. ``text`` is what stands there, ``value`` what it is sorted by, the largest first unless it
    is a text; ``style`` colours it by the row. A ``width`` of 0 takes what the others leave.
    """

    head: str
    width: int
    text: Callable[[Row], str]
    value: Callable[[Row], Any]
    style: Callable[[Row], str] = lambda _: ""


# ---- numbers --------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Write a count or a rate in at most five characters: 0, 0.3, 12.5, 340, 12.3k, 4.1M."""
    if value is None:
        return UNKNOWN
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{_three_digits(value / size)}{unit}"
    return _three_digits(value)


def seconds(value: float | None) -> str:
    """Write a time in at most five characters: 85us, 1.2ms, 340ms, 2.5s, 90s."""
    if value is None:
        return UNKNOWN
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= size * 0.9995:
            return f"{_two_digits(value / size)}{unit}"
    return f"{value * 1e6:.0f}us"


def nbytes(value: int | None) -> str:
    if value is None:
        return UNKNOWN
    for size, unit in ((1 << 30, "G"), (1 << 20, "M")):
        if value >= size:
            return f"{_two_digits(value / size)}{unit}"
    return f"{value >> 10}K"


def part(value: float | None) -> str:
    """Write a part of a whole: 0.93 is 93%."""
    return UNKNOWN if value is None else f"{100 * value:.0f}%"


def _three_digits(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if value < 100 else f"{value:.0f}"


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


# ---- models ---------------------------------------------------------------------------------


def ready_instances(model: Row) -> int:
    return sum(one["state"] == _READY for one in model["instances"])


def restarts(model: Row) -> int:
    return sum(one["restarts"] or 0 for one in model["instances"])


def errors_per_s(model: Row) -> float | None:
    both = (model.get("failures_per_s"), model.get("rejections_per_s"))
    return None if None in both else sum(filter(None, both))


def memory(model: Row, name: str) -> int | None:
    """Return the bytes of all instances under that name, None where nothing is known."""
    known = [one[name] for one in model["instances"] if one.get(name) is not None]
    return sum(known) if known else None


def _state_style(row: Row) -> str:
    return "" if row["state"] == _READY else "bold red"


def _saturation_style(row: Row) -> str:
    saturation = row["saturation"] or 0.0
    return "red" if saturation >= FULL else "yellow" if saturation >= BUSY else ""


def _error_style(row: Row) -> str:
    return "bold red" if errors_per_s(row) else ""


def _numeric(head: str, width: int, name: str, text: Callable[[Any], str]) -> Column:
    return Column(head, width, lambda row: text(row.get(name)), lambda row: row.get(name) or 0.0)


#: In the order of their worth: where there is not enough room, the last ones are left out.
MODEL_COLUMNS: Final[Sequence[Column]] = (
    Column("MODEL", 0, lambda row: str(row["title"]), lambda row: str(row["title"])),
    Column("STATE", 7, lambda row: str(row["state"])[:7], lambda row: str(row["state"]), _state_style),
    Column(
        "INST",
        5,
        lambda row: f"{ready_instances(row)}/{len(row['instances'])}",
        lambda row: len(row["instances"]),
    ),
    _numeric("REQ/S", 6, "requests_per_s", number),
    _numeric("P50", 5, "p50_s", seconds),
    _numeric("P99", 5, "p99_s", seconds),
    _numeric("QUEUE", 5, "queued", number),
    _numeric("BATCH", 5, "batch_size", number),
    _numeric("SATUR", 5, "saturation", part)._replace(style=_saturation_style),
    Column(
        "ERR/S", 5, lambda row: number(errors_per_s(row)), lambda row: errors_per_s(row) or 0, _error_style
    ),
    Column("RESTARTS", 8, lambda row: number(restarts(row)), restarts),
    Column(
        "MEM",
        5,
        lambda row: nbytes(memory(row, "memory_nbytes")),
        lambda row: memory(row, "memory_nbytes") or 0,
    ),
    Column(
        "GPUMEM",
        6,
        lambda row: nbytes(memory(row, "gpu_memory_nbytes")),
        lambda row: memory(row, "gpu_memory_nbytes") or 0,
    ),
    _numeric("RUNS", 5, "in_flight", number),
    _numeric("SLOTS", 5, "slots", number),
)
INSTANCE_COLUMNS: Final[Sequence[Column]] = (
    Column("INSTANCE", 0, lambda row: str(row["name"]), lambda row: str(row["name"])),
    Column("STATE", 8, lambda row: str(row["state"])[:8], lambda row: str(row["state"]), _state_style),
    Column("PID", 8, lambda row: str(row["pid"] or UNKNOWN), lambda row: row["pid"] or 0),
    _numeric("BATCH/S", 7, "batches_per_s", number),
    _numeric("BUSY", 5, "busy", part),
    _numeric("RESTARTS", 8, "restarts", number),
    _numeric("MEM", 5, "memory_nbytes", nbytes),
    _numeric("GPUMEM", 6, "gpu_memory_nbytes", nbytes),
    Column("DEVICE", 12, lambda row: str(row["device"])[:12], lambda row: str(row["device"])),
)
SORTS: Final = tuple(one.head.lower() for one in MODEL_COLUMNS)
_LEAST_NAME_WIDTH: Final = 14


def model_rows(sample: Row, sort: str, *, reverse: bool, containing: str) -> list[Row]:
    """Return the models of a sample whose name contains a text, in the order of a column of ``SORTS``: the
    largest first, names from a to z. ``title`` is the name, with the version where there are several.
    """
    column = MODEL_COLUMNS[SORTS.index(sort)]
    times = Counter(one["name"] for one in sample["models"])
    rows = [
        {**one, "title": one["name"] if times[one["name"]] == 1 else f"{one['name']}:{one['version']}"}
        for one in sample["models"]
        if containing.lower() in one["name"].lower()
    ]
    rows.sort(key=lambda row: str(row["title"]))
    is_text = sort in {"model", "state"}
    return sorted(rows, key=column.value, reverse=reverse if is_text else not reverse)


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit a width, the flexible one with all that the others leave."""
    left = width - _LEAST_NAME_WIDTH
    chosen = []
    for one in columns:
        left -= one.width + 1 if one.width else 0
        if left < 0:
            break
        chosen.append(one)
    flexible = width - sum(one.width + 1 for one in chosen if one.width)
    return [one if one.width else one._replace(width=max(1, flexible)) for one in chosen]


def cells(columns: Iterable[Column], row: Row | None) -> list[tuple[str, str]]:
    """Return text and style of each column, padded: the first to the right, the others to the left; the heads
    where ``row`` is None.
    """
    made = []
    for place, one in enumerate(columns):
        text, style = (one.head, "bold") if row is None else (one.text(row), one.style(row))
        text = text if len(text) <= one.width else f"{text[: one.width - 1]}…"
        made.append((text.ljust(one.width) if not place else text.rjust(one.width), style))
    return made
