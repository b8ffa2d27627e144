"""The metrics of connections and of what they hold, over the front and doors that are processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from gpuserve.front.exchange.limits import Admission
from gpuserve.front.exchange.transport import DoorRow
from gpuserve.front.memory.intake import Intake
from gpuserve.front.observe.triton_metrics import Family, family
from gpuserve_worker.memory.orphans import KINDS, ORPHANS

#: Of each door: the end of the name, its kind, what it is, and where that is in its counts.
_OF_DOOR: Final = (
    ("requests_total", "counter", "Requests that came to the door.", "n_requests"),
    ("cpu_seconds_total", "counter", "Time of processors that the door has used.", "cpu_s"),
    ("restarts_total", "counter", "How often the door was started again.", "restarts"),
    ("arena_bytes", "gauge", "Shared memory that the door has reserved for inputs.", "arena_nbytes"),
    ("arena_blocks", "gauge", "Blocks of that memory that are in use.", "arena_blocks"),
)


def connection_families(admission: Admission, doors: Sequence[DoorRow] = ()) -> Iterator[Family]:
    """How many connections are open, were refused, and took too long; and each door."""
    name = "gpuserve_connections"
    yield family(name, "gauge", "Connections that are open.", [({}, admission.n_open)])
    text = "Streams of gRPC that are open; one with a long head counts as several."
    n_streams = admission.streams.n_open + sum(door.counts.n_streams for door in doors)
    yield family("gpuserve_streams", "gauge", text, [({}, n_streams)])
    unsent_nbytes = sum(admission.unsent_nbytes.values()) + sum(door.counts.unsent_nbytes for door in doors)
    text = "Answers that clients have not read."
    yield family(f"{name}_unsent_bytes", "gauge", text, [({}, unsent_nbytes)])
    refused, late, limited = (
        Counter(admission.refused),
        Counter(admission.late),
        Counter(admission.rates.refused),
    )
    for door in doors:
        refused.update(door.counts.refused)
        late.update(door.counts.late)
        limited.update(door.counts.limited)
    for what, text, counts in (
        ("refused", "Connections and streams that were refused, by the limit they met.", refused),
        ("late", "Connections and requests that were ended, by what took too long.", late),
    ):
        yield family(
            f"{name}_{what}_total", "counter", text, [({"reason": key}, n) for key, n in counts.items()]
        )
    text = "Requests that were refused because their client was over max_requests_per_s."
    values = [({"client": kind}, n) for kind, n in limited.items()]
    yield family("gpuserve_requests_rate_limited_total", "counter", text, values)
    yield from _door_families(doors)


def intake_families(intake: Intake, doors: Sequence[DoorRow] = ()) -> Iterator[Family]:
    """What bodies of requests take on the heaps, and how many found no memory there."""
    text = "Memory that bodies of requests take on the heap of the front, beside the arenas."
    nbytes = intake.nbytes + sum(door.counts.intake_nbytes for door in doors)
    yield family("gpuserve_intake_bytes", "gauge", text, [({}, nbytes)])
    text = "Requests that were refused because there was no memory for their bodies."
    refused = intake.refused + sum(door.counts.intake_refused for door in doors)
    yield family("gpuserve_intake_refused_total", "counter", text, [({}, refused)])
    text = "Memory that its owner did not give back and that was reclaimed, by kind: a defect of the server."
    counts = Counter(ORPHANS.reclaimed)
    for door in doors:
        counts.update(door.counts.reclaimed)
    values = [({"kind": kind}, counts[kind]) for kind in KINDS]
    yield family("gpuserve_memory_reclaimed_total", "counter", text, values)


def _door_families(doors: Sequence[DoorRow]) -> Iterator[Family]:
    if not doors:
        return
    values: list[tuple[dict[str, str], float]]
    values = [({"door": str(door.number)}, door.n_connections) for door in doors]
    yield family("gpuserve_door_connections", "gauge", "Connections that the door has.", values)
    for ending, kind, text, field in _OF_DOOR:
        values = [({"door": str(door.number)}, getattr(door.counts, field)) for door in doors]
        yield family(f"gpuserve_door_{ending}", kind, text, values)
