"""Messages survive the wire, and what is no message is refused."""

from __future__ import annotations

import msgpack
import pytest

from gpuserve_worker.protocol import wire

TENSOR = wire.WireTensor("x", "FP32", (2, 3), b"\x00" * 24)
ELSEWHERE = wire.WireTensor("y", "BYTES", (0,), wire.Ref(3, 1 << 40, 5))
PLACED = wire.WireTensor("z", "INT8", (4,), wire.Place(3, 8, 4))
BORROWED = wire.WireTensor("w", "INT8", (4,), wire.Loan(9, 0, 4))
REQUEST = wire.WireRequest(1, {}, ("z",), (("z", wire.Place(3, 8, 4)),), ("s", True, False))
MESSAGES: list[wire.Message] = [
    wire.Init(
        2, "m", 2, "cpu#0", "cpu", {"path": "a.py:b", "kwargs": {}}, (), (), 8, (4,), True, 2, True, False, ()
    ),
    wire.Stop(),
    wire.Phase("loading"),
    wire.Ready(0.25, 4),
    wire.LoadFailed("no", "Traceback"),
    wire.Log(40, "text", ""),
    wire.Unrecoverable("the device fell off the bus"),
    wire.Segment(1, 1 << 24),
    wire.DropSegment(1),
    wire.Attach(4),
    wire.Run(7, (wire.WireRequest(2, {"k": 1, "s": "é"}, ("y",)),), (TENSOR, ELSEWHERE)),
    wire.Run(8, (1, 2, 1), (TENSOR,)),
    wire.Run(8, (REQUEST,), (TENSOR, PLACED), (wire.Fill(0, "FP32", 2, 0, 64, wire.Place(3, 0, 8)),)),
    wire.Cancel(7, 1),
    wire.Credit(7, 32),
    wire.Free(((0, 64), (1, 0))),
    wire.Attached(4),
    wire.Done(7, (TENSOR,), None, True, 1, 2, 3),
    wire.Done(7, None, ((ELSEWHERE,), wire.WireFailure("INTERNAL", "no"), ()), False, 1, 2, 3),
    wire.Failed(7, wire.WireFailure("INTERNAL", "no"), True),
    wire.Released((7, 8)),
    wire.Computed((7, 8)),
    wire.Split(7),
    wire.Yield(7, (TENSOR,), None),
    wire.Yield(7, None, ((ELSEWHERE,), wire.WireFailure("INTERNAL", "no"), None)),
    wire.Region(3, 4096, 64),
    wire.CudaRegion(4, 1, 64, b"h" * 64),
    wire.DropRegion(3),
    wire.RegionOpened(4, "no such device"),
    wire.Lend(9, 1 << 24),
    wire.Unlend(9),
    wire.Call(1, "m", "", (TENSOR,), ("y",), {"k": 1}, 0.5, False, True),
    wire.CallOff(1),
    wire.Answer(1, 5, (BORROWED, PLACED), {}, None, True),
    wire.Return((1, 2)),
    wire.StartExports(),
    wire.ExportSegment(0, 1 << 25, b"h" * 64),
    wire.FreeExports(((0, 512),)),
    wire.LendExport(2, 1 << 25, b"h" * 64),
    wire.ExportOpened(2, "no such memory"),
    wire.UnlendExport(2),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_a_message_comes_back_as_it_was(message: wire.Message) -> None:
    decoded = wire.WORKER.decode(wire.WORKER.encode(message))
    assert type(decoded) is type(message)
    assert decoded == message


def test_every_message_has_a_sample_here() -> None:
    assert {type(one) for one in MESSAGES} == set(wire.Message.__args__)


def test_nested_fields_get_their_names_back() -> None:
    run = wire.WORKER.decode(wire.WORKER.encode(next(one for one in MESSAGES if isinstance(one, wire.Run))))
    assert isinstance(run, wire.Run)
    tensors = wire.tensors(run.inputs)
    assert tensors[0].payload == b"\x00" * 24
    assert isinstance(tensors[1].payload, wire.Ref)
    assert tensors[1].payload.offset == 1 << 40
    assert wire.requests(run.requests)[0].requested_outputs == ("y",)


def test_text_that_is_not_unicode_travels_all_the_same() -> None:
    message = wire.LoadFailed("caf\udce9", "é")
    assert wire.WORKER.decode(wire.WORKER.encode(message)) == wire.LoadFailed("caf\\udce9", "é")


def test_the_kinds_of_memory_are_told_apart() -> None:
    answer = wire.WORKER.decode(
        wire.WORKER.encode(next(one for one in MESSAGES if isinstance(one, wire.Answer)))
    )
    assert isinstance(answer, wire.Answer)
    payloads = [one.payload for one in wire.tensors(answer.outputs or ())]
    assert payloads == [wire.Loan(9, 0, 4), wire.Place(3, 8, 4)]
    assert [type(one) for one in payloads] == [wire.Loan, wire.Place]


def test_memory_of_an_unknown_kind_is_refused() -> None:
    for known in (wire.Exported(1, 2, 3), wire.DeviceLoan(1, 2, 3, in_place=True)):
        assert wire.payload(tuple(known)) == known
        assert type(wire.payload(tuple(known))) is type(known)
    with pytest.raises(ValueError, match="a payload of kind 'pigeon'"):
        wire.payload((1, 2, 3, "pigeon"))


def test_responses_and_failures_are_told_apart() -> None:
    done = wire.WORKER.decode(
        wire.WORKER.encode(next(one for one in MESSAGES if isinstance(one, wire.Done) and one.responses))
    )
    assert isinstance(done, wire.Done)
    tensors, failure, nothing = wire.responses(done.responses or ())
    assert tensors == (ELSEWHERE,)
    assert failure == wire.WireFailure("INTERNAL", "no")
    assert isinstance(failure, wire.WireFailure)
    assert nothing == ()


def test_two_tensors_are_no_failure() -> None:
    done = wire.Done(1, None, ((TENSOR, TENSOR),), True, 0, 0, 0)
    decoded = wire.WORKER.decode(wire.WORKER.encode(done))
    assert isinstance(decoded, wire.Done)
    assert wire.responses(decoded.responses or ()) == ((TENSOR, TENSOR),)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        msgpack.packb(5),
        msgpack.packb([]),
        msgpack.packb([99]),
        msgpack.packb([30]),
        msgpack.packb([30, 1, 2]),
        msgpack.packb([[30], 1]),
        msgpack.packb({"tag": 30}),
    ],
    ids=repr,
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(wire.WireError, match="not a message"):
        wire.WORKER.decode(data)
