"""Messages survive the wire, and what is no message is refused."""

from __future__ import annotations

import msgpack
import pytest
from fuzzing.worker_messages import ELSEWHERE, MESSAGES, TENSOR

from gpuserve_worker.protocol import wire


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
