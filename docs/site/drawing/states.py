"""Tables of states as pictures. Where a state stands is said here; the states and the arrows are those of the
code, and a state without a place, or a place without a state, is an error.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from drawing.svg import Box, Point, arrow, labelled, picture
from gpuserve.front.ingress.monitored_ingress import STEPS as INGRESS
from gpuserve.front.observability.gpu_health.gpu_states import LIVES as GPU
from gpuserve.front.scheduling.request_queue import TRANSITIONS as REQUEST
from gpuserve.supervisor.processes.lifecycle import INSTANCE_STEPS as INSTANCE
from gpuserve.supervisor.processes.lifecycle import SERVER_STEPS as SERVER

_HEIGHT: Final = 34

Arrow = tuple[enum.Enum, enum.Enum, str]


class Drawn(NamedTuple):
    """How a table is drawn: where each state stands, and the bend of a line, with the place of its word."""

    title: str
    arrows: Iterable[Arrow]
    size: tuple[int, int]
    places: Mapping[str, tuple[int, int]]
    bends: Mapping[tuple[str, str], tuple[float, float]] = {}


def drawn_states(drawn: Drawn) -> str:
    """Give the picture of one table. What leads from a state to itself is not drawn."""
    between: dict[tuple[str, str], list[str]] = defaultdict(list)
    for before, after, event in drawn.arrows:
        if before is not after:
            between[before.name, after.name].append(event.lower())
    _check(drawn, {name for pair in between for name in pair})
    boxes = {name: _box(name, at) for name, at in drawn.places.items()}
    lines = (
        part
        for (before, after), events in sorted(between.items())
        for part in _line(boxes[before], boxes[after], events, drawn.bends.get((before, after)))
    )
    states = (part for name, box in boxes.items() for part in labelled(box, [(name, "title")], "strong"))
    return picture(*drawn.size, drawn.title, (*lines, *states))


def _line(start: Box, end: Box, events: Iterable[str], bent: tuple[float, float] | None) -> Iterator[str]:
    bend, along = bent or (0.0, 0.5)
    yield from arrow(start, end, " or ".join(sorted(filter(None, events))), bend, along)


def _check(drawn: Drawn, names: set[str]) -> None:
    if odd := names ^ set(drawn.places):
        raise ValueError(f"{drawn.title}: states without a place, or places without a state: {sorted(odd)}")
    known = {(before.name, after.name) for before, after, _ in drawn.arrows}
    if odd_lines := set(drawn.bends) - known:
        raise ValueError(f"{drawn.title}: bends of lines that are not there: {sorted(odd_lines)}")


def _box(name: str, at: tuple[int, int]) -> Box:
    return Box(Point(*at), 22 + 8.6 * len(name), _HEIGHT)


def _of_request() -> Iterator[Arrow]:
    for event, (before, after) in REQUEST.items():
        yield before, after, event


TABLES: Final[dict[str, Any]] = {
    "states-of-a-request": Drawn(
        "The states of a request",
        tuple(_of_request()),
        (560, 190),
        {"NEW": (60, 60), "QUEUED": (230, 60), "RUNNING": (460, 60), "FINISHED": (345, 150)},
        {("QUEUED", "RUNNING"): (-13, 0.5), ("RUNNING", "QUEUED"): (-13, 0.5)},
    ),
    "states-of-an-instance": Drawn(
        "The states of an instance, that is of a worker process and those that come in its place",
        tuple(INSTANCE.arrows()),
        (680, 430),
        {
            "DOWN": (115, 50), "LOADING": (290, 50), "READY": (470, 50), "FENCED": (115, 200),
            "ASLEEP": (610, 125), "WAITING": (290, 200), "HUNG": (470, 200), "STOPPING": (470, 310),
            "STOPPED": (290, 385),
        },
        {
            ("DOWN", "WAITING"): (-14, 0.6), ("WAITING", "DOWN"): (-14, 0.42),
            ("DOWN", "FENCED"): (-13, 0.6), ("FENCED", "DOWN"): (-13, 0.6),
            ("DOWN", "STOPPED"): (-150, 0.7), ("LOADING", "STOPPING"): (0, 0.8),
            ("ASLEEP", "LOADING"): (0, 0.3), ("ASLEEP", "WAITING"): (0, 0.45),
            ("ASLEEP", "STOPPING"): (0, 0.6), ("READY", "ASLEEP"): (0, 0.5),
            ("READY", "WAITING"): (0, 0.3), ("READY", "STOPPING"): (48, 0.5), ("HUNG", "WAITING"): (0, 0.7),
        },
    ),
    "states-of-the-server": Drawn(
        "The states of the server",
        tuple(SERVER.arrows()),
        (560, 190),
        {
            "STOPPED": (75, 140), "STARTING": (75, 50), "SERVING": (260, 50), "DRAINING": (450, 50),
            "STOPPING": (350, 140),
        },
        {("STARTING", "STOPPED"): (-14, 0.5), ("STOPPED", "STARTING"): (-14, 0.5)},
    ),
    "states-of-an-ingress-process": Drawn(
        "The states of an ingress process",
        tuple(INGRESS.arrows()),
        (560, 190),
        {"DOWN": (60, 50), "STARTING": (220, 50), "UP": (390, 50), "ENDING": (390, 140), "ENDED": (130, 140)},
        {("DOWN", "STARTING"): (0, 0.5), ("STARTING", "DOWN"): (-16, 0.5), ("UP", "DOWN"): (34, 0.5)},
    ),
    "states-of-a-gpu": Drawn(
        "The states of a GPU, as far as is known",
        tuple(GPU.arrows()),
        (560, 190),
        {"HEALTHY": (90, 50), "SUSPECT": (440, 50), "LOST": (265, 145)},
        {
            ("HEALTHY", "SUSPECT"): (-13, 0.5), ("SUSPECT", "HEALTHY"): (-13, 0.5),
            ("HEALTHY", "LOST"): (-14, 0.5), ("LOST", "HEALTHY"): (-14, 0.5),
        },
    ),
}  # fmt: skip
