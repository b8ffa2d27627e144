"""The search: settings of a model that may change, the latency limit, scores of points, and the next settings
to try. Pure: the same scores lead to the same trials.

An axis is a key of the config file with a few values in ascending order, one of which is the file's own. The
search moves along one axis at a time, from the best settings so far, to neighbours, until no step is better:
the throughput of a server over one setting mostly has a single maximum.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gpuserve.cli.bench.level_results import LatencySummary, LevelResult
from gpuserve.cli.bench.load_plan import BenchOptionError
from gpuserve.model.options import parse_duration
from gpuserve.model.spec import MAX_INSTANCES, RAGGED_BATCH_ELEMENTS, ModelSpec

#: The value of each axis, in the order of the axes.
Settings: TypeAlias = tuple[int, ...]

_DELAYS_US: Final = (0, 100, 500, 1000, 2000, 5000)
#: Values of ``max_batch_elements`` of a model that has its default.
_ELEMENTS: Final = (1 << 12, 1 << 14, 1 << 16, 1 << 18)
#: Lengths of a ragged input at which one bucket ends and the next begins; 0: one bucket.
_BOUNDARIES: Final = (0, 32, 64, 128, 256, 512, 1024)
_PREFETCH: Final = (0, 1, 2)
_MAX_PREFETCH: Final = 16


@dataclass(frozen=True, slots=True)
class Axis:
    """A key of the config with the values to try. ``keys`` lead from the model's entry to the key."""

    option: str
    keys: tuple[str | int, ...]
    values: tuple[int, ...]
    start: int

    def setting(self, value: int) -> Any:
        """Return a value of the axis as the value of its key."""
        if self.keys[-1] == "bucket_boundaries":
            return [value] if value else []
        return value

    @property
    def title(self) -> str:
        """The heading of the axis's column in tables."""
        return self.option.removeprefix("--").replace("-", " ")


#: The least and the most value of the axes that the user may request, by the name of the option.
_BOUNDS: Final = {
    "max_batch_sizes": (1, 1 << 20),
    "delays_us": (0, 60_000_000),
    "instances": (1, MAX_INSTANCES),
    "prefetch": (0, _MAX_PREFETCH),
    "batch_elements": (1, 1 << 40),
    "bucket_boundaries": (0, 1 << 30),
}
#: The values that the user requested for each axis; None means values around the file's own.
RequestedValues: TypeAlias = Mapping[str, tuple[int, ...] | None]


def tunable_axes(
    model: ModelSpec, counts: Sequence[int], cores: int, least_batch: int, requested: RequestedValues
) -> list[Axis]:
    """Return the axes of a model on which there is anything to try: the file's own value is tried unless the
    user requested values. ``counts`` are those of the entries of ``instances``, an axis if there is one;
    ``least_batch`` is the rows of a request.
    """
    found: list[Axis] = []

    def add(name: str, keys: tuple[str | int, ...], around: Sequence[int], own: int, least: int = 0) -> None:
        wanted = requested[name]
        values = {value for value in wanted or around if value >= least}
        if not (wanted and values):
            values.add(own)
        if values != {own}:
            found.append(Axis(_option(name), keys, tuple(sorted(values)), own))

    batching = model.batching
    if batch := model.max_batch_size:
        add("max_batch_sizes", ("max_batch_size",), _values_around(batch), batch, least_batch)
        keys = ("batching", "max_queue_delay_us")
        add("delays_us", keys, _DELAYS_US, batching.max_queue_delay_us)
    if any(one.ragged for one in model.inputs):
        elements, boundaries = batching.max_batch_elements, batching.bucket_boundaries
        around = _ELEMENTS if elements == RAGGED_BATCH_ELEMENTS else _values_around(elements)
        add("batch_elements", ("batching", "max_batch_elements"), around, elements)
        if len(boundaries) < 2 or requested["bucket_boundaries"]:
            keys, first = ("batching", "bucket_boundaries"), boundaries[0] if boundaries else 0
            add("bucket_boundaries", keys, _BOUNDARIES, first)
    if len(counts) == 1:
        add("instances", ("instances", 0, "count"), _instances(counts[0], cores), counts[0])
    add("prefetch", ("prefetch",), _PREFETCH, model.prefetch)
    return found


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parse_values(option: str, text: str | None, least: int, most: int) -> tuple[int, ...] | None:
    """Return the values of a list such as ``1,2,4``, ascending, or None. Raise BenchOptionError otherwise."""
    if text is None:
        return None
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        values = (least - 1,)
    if not all(least <= value <= most for value in values):
        form = f"whole numbers from {least} to {most} such as 1,2,4"
        raise BenchOptionError(option, f"expected {form}, given {text!r}")
    return values


def parse_requested(texts: Mapping[str, str | None]) -> RequestedValues:
    """Return the values of the options of the axes; raise BenchOptionError for another form."""
    return {
        name: parse_values(_option(name), texts.get(name), least, most)
        for name, (least, most) in _BOUNDS.items()
    }


def _values_around(value: int) -> tuple[int, ...]:
    """Return values from a quarter of the file's own to four times that."""
    return tuple(sorted({max(1, value // 4), max(1, value // 2), value, value * 2, value * 4}))


def _instances(count: int, cores: int) -> tuple[int, ...]:
    """Return powers of two up to the cores, or to twice the file's count."""
    return tuple(2**power for power in range(16) if 2**power <= max(cores, 2 * count))


_FIELDS: Final = {
    "mean": "mean_ms",
    "p50": "p50_ms",
    "p90": "p90_ms",
    "p95": "p95_ms",
    "p99": "p99_ms",
    "p99.9": "p999_ms",
    "max": "max_ms",
}


@dataclass(frozen=True, slots=True)
class LatencyLimit:
    """An upper limit for a figure of the latencies, such as p99."""

    figure: str = "p99"
    limit_ms: float = float("inf")

    def figure_of(self, latency: LatencySummary) -> float:
        found: float = getattr(latency, _FIELDS[self.figure])
        return found

    def is_met(self, latency: LatencySummary) -> bool:
        return self.figure_of(latency) <= self.limit_ms


def parse_limit(text: str) -> LatencyLimit:
    """Return the limit of a text such as ``p99=50ms``; raise BenchOptionError for another form."""
    figure, _, time = text.partition("=")
    try:
        if figure in _FIELDS and time[-1:].isalpha():  # a bare number has no unit
            return LatencyLimit(figure, parse_duration(time) * 1e3)
    except ValueError:
        pass
    form = f"expected one of {', '.join(_FIELDS)} with a time, such as p99=50ms"
    raise BenchOptionError("--latency-limit", f"{form}, given {text!r}")


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A level of load on a server with these settings; ``latency_ms`` is the figure of the limit."""

    settings: Settings
    concurrency: float
    throughput: float
    latency_ms: float


def points_of(settings: Settings, levels: Iterable[LevelResult], limit: LatencyLimit) -> list[MeasuredPoint]:
    """Return the points of the levels in which every request was answered."""
    return [
        MeasuredPoint(settings, one.level.value, one.throughput, limit.figure_of(one.latency))
        for one in levels
        if one.completed and not one.failed
    ]


def score_of(points: Sequence[MeasuredPoint], limit: LatencyLimit) -> float:
    """Return the highest throughput within the limit; if there is none, the lowest latency, negated."""
    within = [one.throughput for one in points if one.latency_ms <= limit.limit_ms]
    if within:
        return max(within)
    return -min((one.latency_ms for one in points), default=float("inf"))


def best_point(points: Iterable[MeasuredPoint], limit: LatencyLimit) -> MeasuredPoint | None:
    within = [one for one in points if one.latency_ms <= limit.limit_ms]
    return max(within, key=lambda one: (one.throughput, -one.latency_ms), default=None)


def pareto_front(points: Iterable[MeasuredPoint]) -> list[MeasuredPoint]:
    """Return the points that no other point matches or beats in both figures, by ascending throughput."""
    found: list[MeasuredPoint] = []
    for one in sorted(points, key=lambda one: (-one.throughput, one.latency_ms)):
        if not found or one.latency_ms < found[-1].latency_ms:
            found.append(one)
    return found[::-1]


#: A position on each axis.
Position: TypeAlias = tuple[int, ...]

#: The factor by which a better score must exceed the old one; smaller differences are noise.
NOISE_MARGIN: Final = 1.03


def coordinate_search(sizes: Sequence[int], start: Position) -> Generator[Position, float, Position]:
    """Yield positions to try on axes of these ``sizes``, receive their scores, and return the best."""
    scores: dict[Position, float] = {}

    def evaluate(position: Position) -> Generator[Position, float, float]:
        if position not in scores:
            scores[position] = yield position
        return scores[position]

    best = start
    yield from evaluate(start)
    moved = True
    while moved:
        moved = False
        for axis, size in enumerate(sizes):
            for step in (1, -1):
                while 0 <= best[axis] + step < size:
                    tried = (*best[:axis], best[axis] + step, *best[axis + 1 :])
                    yield from evaluate(tried)
                    if not is_better(scores[tried], scores[best]):
                        break
                    best, moved = tried, True
    return best


def is_better(new: float, old: float) -> bool:
    """Return whether a score is better by more than noise. Scores below 0 are over the limit."""
    return new > old * NOISE_MARGIN if old > 0 else new > old / NOISE_MARGIN
