"""The life of a request, step by step, with the file that each step is in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final, NamedTuple

from drawing.names import file, message
from drawing.svg import Box, Point, arrow, labelled, picture, rectangle, words

_WIRE: Final = "gpuserve_worker.protocol.wire"


class Step(NamedTuple):
    """One step: whose it is, what happens, and where."""

    lane: str
    text: str
    path: str


#: Where the columns are.
_LANES: Final = {"client": 66, "front": 252, "worker": 462}
_WIDTHS: Final = {"client": 92, "front": 236, "worker": 172}
_ROW: Final = 64


def _steps() -> tuple[Step, ...]:
    run, done = message(_WIRE, "Run"), message(_WIRE, "Done")
    return (
        Step("client", "request", ""),
        Step("front", "bytes make an exchange", file("net/connection.py")),
        Step("front", "protocol picked, access judged", file("protocols/router.py")),
        Step("front", "the body becomes an InferRequest", file("protocols/grpc/infer_decoder.py")),
        Step("front", "checked, and queued", file("models/model_driver.py")),
        Step("front", "an instance has room: a batch", file("scheduling/batch_former.py")),
        Step("front", f"tensors side by side, one {run}", file("ipc/gather.py")),
        Step("worker", "the callable is called", file("gpuserve_worker/execution/loop.py")),
        Step("worker", f"outputs, one {done}", file("gpuserve_worker/memory/batch_tensors.py")),
        Step("front", "outputs cut apart, by request", file("ipc/scatter.py")),
        Step("front", "answers encoded and written", file("protocols/grpc/infer_encoder.py")),
        Step("client", "response", ""),
    )


def drawn_request() -> str:
    """Give the picture of the steps, from the top to the bottom."""
    steps = _steps()
    height = 56 + _ROW * len(steps)
    return picture(560, height, "The life of a request", _parts(steps, height))


def _parts(steps: tuple[Step, ...], height: int) -> Iterator[str]:
    for lane, x in _LANES.items():
        yield words(Point(x, 24), lane, "title")
        yield f'<line class="thin" x1="{x}" y1="40" x2="{x}" y2="{height - 14}"/>'
    boxes = [
        Box(Point(_LANES[step.lane], 68 + _ROW * row), _WIDTHS[step.lane], 44)
        for row, step in enumerate(steps)
    ]
    for before, after in itertools.pairwise(boxes):
        yield from arrow(before, after)
    for step, box in zip(steps, boxes, strict=True):
        yield rectangle(box, "ground")
        said = [(step.text, ""), (step.path.removeprefix("gpuserve_worker/"), "small")]
        yield from labelled(
            box, said if step.path else said[:1], "box" if step.lane == "client" else "strong"
        )
