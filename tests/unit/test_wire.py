"""Messages survive the wire, and what is no message is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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


Kind = TypeVar("Kind")


def sample(kind: type[Kind], is_wanted: Callable[[Any], object] = lambda _: True) -> Kind:
    """The first such message after it travelled."""
    message = next(one for one in MESSAGES if isinstance(one, kind) and is_wanted(one))
    decoded = wire.WORKER.decode(wire.WORKER.encode(message))
    assert isinstance(decoded, kind)
    return decoded


def test_nested_fields_get_their_names_back() -> None:
    run = sample(wire.Run)
    tensors = wire.tensors(run.inputs)
    assert tensors[0].payload == b"\x00" * 24
    assert isinstance(tensors[1].payload, wire.Ref)
    assert tensors[1].payload.offset == 1 << 40
    assert wire.requests(run.requests)[0].requested_outputs == ("y",)


def test_texts_and_tensors_keep_what_they_are() -> None:
    message = wire.LoadFailed("caf\udce9", "é")
    assert wire.WORKER.decode(wire.WORKER.encode(message)) == wire.LoadFailed("caf\\udce9", "é")
    done = wire.Done(1, None, ((TENSOR, TENSOR),), True, 0, 0, 0)
    decoded = wire.WORKER.decode(wire.WORKER.encode(done))
    assert isinstance(decoded, wire.Done)
    assert wire.responses(decoded.responses or ()) == ((TENSOR, TENSOR),)


def test_the_kinds_of_memory_are_told_apart_and_an_unknown_one_is_refused() -> None:
    payloads = [one.payload for one in wire.tensors(sample(wire.Answer).outputs or ())]
    assert payloads == [wire.Loan(9, 0, 4), wire.Place(3, 8, 4)]
    assert [type(one) for one in payloads] == [wire.Loan, wire.Place]
    for known in (wire.Exported(1, 2, 3), wire.DeviceLoan(1, 2, 3, in_place=True)):
        assert wire.payload(tuple(known)) == known
        assert type(wire.payload(tuple(known))) is type(known)
    with pytest.raises(ValueError, match="a payload of kind 'pigeon'"):
        wire.payload((1, 2, 3, "pigeon"))


def test_responses_and_failures_are_told_apart() -> None:
    done = sample(wire.Done, lambda one: one.responses)
    tensors, failure, nothing = wire.responses(done.responses or ())
    assert tensors == (ELSEWHERE,)
    assert failure == wire.WireFailure("INTERNAL", "no")
    assert isinstance(failure, wire.WireFailure)
    assert nothing == ()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xc1", b"\x93\x01"),
        *map(msgpack.packb, (5, [], [99], [30], [30, 1, 2], [[30], 1], {"tag": 30})),
    ],
    ids=repr,
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(wire.WireError, match="not a message"):
        wire.WORKER.decode(data)
