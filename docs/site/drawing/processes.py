"""The processes of a server: who starts whom, and what goes between them."""

from __future__ import annotations

from collections.abc import Iterator

from drawing.names import message, port, program
from drawing.svg import Box, Point, arrow, labelled, picture, words

_WIRE = "gpuserve_worker.protocol.wire"
_CONTROL = "gpuserve.supervisor.control.front_messages"

_CLIENTS = Box(Point(280, 44), 520, 46)
_FRONT = Box(Point(200, 176), 360, 92)
_SUPERVISOR = Box(Point(472, 176), 136, 92)
_MEMORY = Box(Point(200, 322), 360, 30)
_WORKERS = tuple(Box(Point(x, 424), 174, 66) for x in (107, 293))


def drawn_processes() -> str:
    """Give the picture of the processes of a server with two instances."""
    return picture(560, 480, "The processes of a server", _parts())


def _parts() -> Iterator[str]:
    yield from _lines()
    clients = "tritonclient, curl, KServe, OpenAI's clients, browsers"
    yield from labelled(_CLIENTS, [("clients", "title"), (clients, "small")])
    front = [
        ("front", "title"), (program("gpuserve.front.process"), "code"),
        ("protocols, queues, batches; one event loop", "small"), ("no code of users, no CUDA", "small"),
    ]  # fmt: skip
    yield from labelled(_FRONT, front, "strong")
    supervisor = [
        ("supervisor", "title"), ("gpuserve serve", "code"), ("owns the ports,", "small"),
        ("holds no tensor", "small"),
    ]  # fmt: skip
    yield from labelled(_SUPERVISOR, supervisor)
    yield from labelled(_MEMORY, [("tensors: sealed memfds, mapped on both sides", "small")], "memory")
    for number, box in enumerate(_WORKERS):
        lines = [(f"worker cpu#{number}", "title"), (program("gpuserve_worker"), "code")]
        yield from labelled(box, [*lines, ("one callable", "small")], "strong")


def _lines() -> Iterator[str]:
    ports = {90: ("gRPC", "grpc_port"), 200: ("HTTP", "http_port"), 310: ("metrics", "metrics_port")}
    for x, (protocol, name) in ports.items():
        above, below = _point(x, _CLIENTS.middle.y, 46), _point(x, _FRONT.middle.y, 92)
        yield from arrow(above, below, f"{protocol} {port(name)}", along=0.45)
    yield from arrow(_SUPERVISOR, _FRONT, both=True)
    told = [message(_CONTROL, name) for name in ("AddModel", "InstanceUp", "Drain")]
    yield words(Point(472, 96), f"{', '.join(told[:2])},", "small")
    yield words(Point(472, 112), f"{told[2]}, and what was done", "small")
    sent, answered = message(_WIRE, "Run"), (message(_WIRE, "Done"), message(_WIRE, "Yield"))
    for box in _WORKERS:
        here = box.middle.x
        yield from arrow(_point(here - 62, 176, 92), _point(here - 62, 424, 66), sent, along=0.22)
        yield from arrow(
            _point(here + 58, 424, 66), _point(here + 58, 176, 92), ", ".join(answered), along=0.78
        )
    last = _WORKERS[-1]
    yield from arrow(_SUPERVISOR, last, "starts, and starts again", bend=45, along=0.36)


def _point(x: float, y: float, height: float) -> Box:
    """Give a place of a box that a line goes straight up or down from."""
    return Box(Point(x, y), 1, height)
