"""Messages between the front and its workers: what is none is refused, what is one comes back as it was."""

from __future__ import annotations

import msgpack
from hypothesis import strategies as st

from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.datagram import joined

TENSOR = wire.WireTensor("x", "FP32", (2, 3), b"\x00" * 24)
ELSEWHERE = wire.WireTensor("y", "BYTES", (0,), wire.Ref(3, 1 << 40, 5))
PLACED = wire.WireTensor("z", "INT8", (4,), wire.Place(3, 8, 4))
BORROWED = wire.WireTensor("w", "INT8", (4,), wire.Loan(9, 0, 4))
REQUEST = wire.WireRequest(1, {}, ("z",), (("z", wire.Place(3, 8, 4)),), ("s", True, False))
MESSAGES: list[wire.Message] = [
    wire.Init(
        2,
        "m",
        2,
        "cpu#0",
        "cpu",
        {"path": "a.py:b", "kwargs": {}},
        (),
        (),
        8,
        (4,),
        True,
        2,
        True,
        False,
        False,
        (),
    ),
    wire.Stop(),
    wire.Sleep(),
    wire.Wake(),
    wire.Slept(),
    wire.Phase("loading"),
    wire.Ready(0.25, 4, True, False),
    wire.WantWeights("encoder/1"),
    wire.LoadWeights("encoder/1"),
    wire.Weights("encoder/1", ((0, 64), (64, 4096))),
    wire.Weights("encoder/1", ((0, 64),), "00000000-0000-4000-8000-00000000000a", 1 << 33),
    wire.WeightsFailed("encoder/1"),
    wire.ReleaseWeights("encoder/1"),
    wire.LoadFailed("no", "Traceback"),
    wire.Log(40, "text", ""),
    wire.Imported(("/models/linear.py", "/models/weights.py")),
    wire.Ending("rank 1 raised an exception, and rank 0 did not"),
    wire.Agreed(7),
    wire.Unrecoverable("the device fell off the bus"),
    wire.Segment(1, 1 << 24),
    wire.DropSegment(1),
    wire.Attach(4),
    wire.Run(7, (wire.WireRequest(2, {"k": 1, "s": "é"}, ("y",)),), (TENSOR, ELSEWHERE)),
    wire.Run(8, (1, 2, 1), (TENSOR,)),
    wire.Run(8, (REQUEST,), (TENSOR, PLACED), (wire.Fill(0, "FP32", 2, 0, 64, wire.Place(3, 0, 8)),)),
    wire.Cancel(7, 1),
    wire.Credit(((7, 32), (8, 1))),
    wire.Free(((0, 64), (1, 0))),
    wire.Shrink(),
    wire.Attached(4),
    wire.Done(7, (TENSOR,), None, True, 1, 2, 3),
    wire.Done(7, None, ((ELSEWHERE,), wire.WireFailure("INTERNAL", "no"), ()), False, 1, 2, 3),
    wire.Failed(7, wire.WireFailure("INTERNAL", "no"), True),
    wire.Released((7, 8)),
    wire.Computed((7, 8)),
    wire.Split(7),
    wire.Stepped(3, 1_000, 12),
    wire.Stepped(1, 1_000, 2, (7, 8), (TENSOR,), None, (), (1,)),
    wire.Stepped(1, 1_000, 1, (7,), None, ((TENSOR,),), ({"tokens": 1},)),
    wire.Requeue(7, None, True),
    wire.Requeue(7, wire.WireFailure("INTERNAL", "no"), False),
    wire.Yield(7, (TENSOR,), None),
    wire.Yield(7, None, ((ELSEWHERE,), None), (), (0, 1)),
    wire.Yield(7, None, ((ELSEWHERE,), wire.WireFailure("INTERNAL", "no"), None)),
    wire.Region(3, 4096, 64),
    wire.CudaRegion(4, 1, 64, b"h" * 64),
    wire.DropRegion(3),
    wire.RegionOpened(4, "no such device"),
    wire.Lend(9, 1 << 24),
    wire.Unlend(9),
    wire.Call(1, "m", "", (TENSOR,), ("y",), {"k": 1}, 0.5, False, True),
    wire.Call(1, "m", "", (), (), {}, 0.5, False, True, "id", ("s", True, False)),
    wire.Command(1, "load", "m", {"config": "{}"}),
    wire.CancelCall(1),
    wire.Answer(1, 5, (BORROWED, PLACED), {}, None, True),
    wire.Return((1, 2)),
    wire.Metrics((("c", "counter", "Text.", {"k": "v"}, (), False, (1.0,)),)),
    wire.DeviceMemory(1 << 33),
    wire.StartExports(),
    wire.ExportSegment(0, 1 << 25, b"h" * 64),
    wire.FreeExports(((0, 512),)),
    wire.LendExport(2, 1 << 25, b"h" * 64),
    wire.ExportOpened(2, "no such memory"),
    wire.UnlendExport(2),
]

_TEXTS = st.sampled_from(["", "a", "FP32", "é", "device"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 31), 1 << 63) | _TEXTS | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=12,
)


@st.composite
def _spoilt(draw: st.DrawFn) -> bytes:
    body = bytearray(wire.WORKER.encode(draw(st.sampled_from(MESSAGES))))
    for _ in range(draw(st.integers(0, 3))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body[: len(body) - draw(st.sampled_from([0, 0, 0, 1, 5]))])


INPUTS = st.one_of(
    _spoilt(),
    st.lists(_spoilt(), min_size=1, max_size=3).map(joined),
    st.tuples(st.integers(0, 60), st.lists(_VALUES, max_size=12)).map(
        lambda one: msgpack.packb([one[0], *one[1]])
    ),
    _VALUES.map(msgpack.packb),
    st.binary(max_size=40),
)


def check(data: bytes) -> None:
    """Refused by the one error, or the same again after a journey."""
    try:
        messages = wire.WORKER.decode_all(data)
    except wire.WireError:
        return
    encoded = joined([wire.WORKER.encode(one) for one in messages])
    assert joined([wire.WORKER.encode(one) for one in wire.WORKER.decode_all(encoded)]) == encoded
