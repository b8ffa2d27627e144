"""The metrics of the connections, over all that have some: the front, and doors that are processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from gpuserve.front.exchange.limits import Admission
from gpuserve.front.exchange.transport import DoorRow
from gpuserve.front.observe.triton_metrics import Family, family

#: Of each door: the end of the name, its kind, what it is, and the field of its row.
_OF_DOOR: Final = (
    ("connections", "gauge", "Connections that the door has.", "n_connections"),
    ("requests_total", "counter", "Requests that came to the door.", "n_requests"),
    ("cpu_seconds_total", "counter", "Time of processors that the door has used.", "cpu_s"),
    ("restarts_total", "counter", "How often the door was started again.", "restarts"),
)


def connection_families(admission: Admission, doors: Sequence[DoorRow] = ()) -> Iterator[Family]:
    """How many connections are open, were refused, and took too long; and each door."""
    name = "gpuserve_connections"
    yield family(name, "gauge", "Connections that are open.", [({}, admission.n_open)])
    text = "Streams of gRPC that are open; one with a long head counts as several."
    n_streams = admission.streams.n_open + sum(door.n_streams for door in doors)
    yield family("gpuserve_streams", "gauge", text, [({}, n_streams)])
    unsent_nbytes = sum(admission.unsent_nbytes.values()) + sum(door.unsent_nbytes for door in doors)
    text = "Answers that clients have not read."
    yield family(f"{name}_unsent_bytes", "gauge", text, [({}, unsent_nbytes)])
    refused, late = Counter(admission.refused), Counter(admission.late)
    for door in doors:
        refused.update(door.refused)
        late.update(door.late)
    for what, text, counts in (
        ("refused", "Connections and streams that were refused, by the limit they met.", refused),
        ("late", "Connections and requests that were ended, by what took too long.", late),
    ):
        yield family(
            f"{name}_{what}_total", "counter", text, [({"reason": key}, n) for key, n in counts.items()]
        )
    for ending, kind, text, field in _OF_DOOR if doors else ():
        values = [({"door": str(door.number)}, getattr(door, field)) for door in doors]
        yield family(f"gpuserve_door_{ending}", kind, text, values)
