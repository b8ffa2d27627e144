"""Tables of ``gpuserve top``: the columns of a sample, their order, and numbers as short texts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

#: A model or an instance of a sample.
Row: TypeAlias = Mapping[str, Any]

UNKNOWN: Final = "-"
#: Saturation from which a model counts as nearly and as fully busy.
BUSY, FULL = 0.7, 0.9
_READY: Final = "READY"


class Column(NamedTuple):
    """A column of a table. ``text`` returns the cell's text, ``value`` the sort key (numbers sort descending)
    and ``style`` the colour. A ``width`` of 0 takes the space that the others leave.
    """

    head: str
    width: int
    text: Callable[[Row], str]
    value: Callable[[Row], Any]
    style: Callable[[Row], str] = lambda _: ""


def count_text(value: float | None) -> str:
    """Return a count or a rate in at most five characters: 0, 0.3, 12.5, 340, 12.3k, 4.1M."""
    if value is None:
        return UNKNOWN
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{_three_digits(value / size)}{unit}"
    return _three_digits(value)


def duration_text(value: float | None) -> str:
    """Return a duration in at most five characters: 85us, 1.2ms, 340ms, 2.5s, 90s."""
    if value is None:
        return UNKNOWN
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= size * 0.9995:
            return f"{_two_digits(value / size)}{unit}"
    return f"{value * 1e6:.0f}us"


def bytes_text(value: int | None) -> str:
    if value is None:
        return UNKNOWN
    for size, unit in ((1 << 30, "G"), (1 << 20, "M")):
        if value >= size:
            return f"{_two_digits(value / size)}{unit}"
    return f"{value >> 10}K"


def percent_text(value: float | None) -> str:
    """Return a fraction as a percentage: 0.93 is 93%."""
    return UNKNOWN if value is None else f"{100 * value:.0f}%"


def _three_digits(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if value < 100 else f"{value:.0f}"


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def restarts(model: Row) -> int:
    return sum(one["restarts"] or 0 for one in model["instances"])


def errors_per_s(model: Row) -> float | None:
    both = (model.get("failures_per_s"), model.get("rejections_per_s"))
    return None if None in both else sum(filter(None, both))


def memory_of(model: Row, name: str) -> int | None:
    """Return the sum of the field ``name`` over all instances in bytes, or None if none has the field."""
    known = [one[name] for one in model["instances"] if one.get(name) is not None]
    return sum(known) if known else None


def _state_style(row: Row) -> str:
    return "" if row["state"] == _READY else "bold red"


def _saturation_style(row: Row) -> str:
    saturation = row["saturation"] or 0.0
    return "red" if saturation >= FULL else "yellow" if saturation >= BUSY else ""


def _numeric(head: str, width: int, name: str, text: Callable[[Any], str]) -> Column:
    return Column(head, width, lambda row: text(row.get(name)), lambda row: row.get(name) or 0.0)


def _memory_cell(name: str) -> tuple[Callable[[Row], str], Callable[[Row], Any]]:
    return lambda row: bytes_text(memory_of(row, name)), lambda row: memory_of(row, name) or 0


#: In the order of importance: a narrow terminal gets the first columns only.
# fmt: off
MODEL_COLUMNS: Final[Sequence[Column]] = (
    Column("MODEL", 0, lambda row: str(row["title"]), lambda row: str(row["title"])),
    Column("STATE", 7, lambda row: str(row["state"])[:7], lambda row: str(row["state"]), _state_style),
    Column("INST", 5,
        lambda row: f"{sum(one['state'] == _READY for one in row['instances'])}/{len(row['instances'])}",
        lambda row: len(row["instances"])),
    _numeric("REQ/S", 6, "requests_per_s", count_text),
    _numeric("P50", 5, "p50_s", duration_text),
    _numeric("P99", 5, "p99_s", duration_text),
    _numeric("QUEUE", 5, "queued", count_text),
    _numeric("BATCH", 5, "batch_size", count_text),
    _numeric("SATUR", 5, "saturation", percent_text)._replace(style=_saturation_style),
    Column("ERR/S", 5,
        lambda row: count_text(errors_per_s(row)), lambda row: errors_per_s(row) or 0,
        lambda row: "bold red" if errors_per_s(row) else ""),
    Column("RESTARTS", 8, lambda row: count_text(restarts(row)), restarts),
    Column("MEM", 5, *_memory_cell("memory_nbytes")),
    Column("GPUMEM", 6, *_memory_cell("gpu_memory_nbytes")),
    _numeric("RUNS", 5, "in_flight", count_text),
    _numeric("SLOTS", 5, "slots", count_text),
)
# fmt: on
INSTANCE_COLUMNS: Final[Sequence[Column]] = (
    Column("INSTANCE", 0, lambda row: str(row["name"]), lambda row: str(row["name"])),
    Column("STATE", 8, lambda row: str(row["state"])[:8], lambda row: str(row["state"]), _state_style),
    Column("PID", 8, lambda row: str(row["pid"] or UNKNOWN), lambda row: row["pid"] or 0),
    _numeric("BATCH/S", 7, "batches_per_s", count_text),
    _numeric("BUSY", 5, "busy", percent_text),
    _numeric("RESTARTS", 8, "restarts", count_text),
    _numeric("MEM", 5, "memory_nbytes", bytes_text),
    _numeric("GPUMEM", 6, "gpu_memory_nbytes", bytes_text),
    Column("DEVICE", 12, lambda row: str(row["device"])[:12], lambda row: str(row["device"])),
)
SORTS: Final = tuple(one.head.lower() for one in MODEL_COLUMNS)
_LEAST_NAME_WIDTH: Final = 14


def model_rows(sample: Row, sort: str, *, reverse: bool, containing: str) -> list[Row]:
    """Return the models of a sample whose name contains a text, sorted by a column: numbers descending, names
    from a to z. ``title`` is the name, with the version if the model has several.
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


def fitting_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit a width; the flexible one takes the space that the others leave."""
    left = width - _LEAST_NAME_WIDTH
    chosen = []
    for one in columns:
        left -= one.width + 1 if one.width else 0
        if left < 0:
            break
        chosen.append(one)
    flexible = width - sum(one.width + 1 for one in chosen if one.width)
    return [one if one.width else one._replace(width=max(1, flexible)) for one in chosen]


def table_cells(columns: Iterable[Column], row: Row | None) -> list[tuple[str, str]]:
    """Return text and style of each column, padded; the heads if ``row`` is None."""
    made = []
    for place, one in enumerate(columns):
        text, style = (one.head, "bold") if row is None else (one.text(row), one.style(row))
        text = text if len(text) <= one.width else f"{text[: one.width - 1]}…"
        made.append((text.ljust(one.width) if not place else text.rjust(one.width), style))
    return made
