"""Notice to a callable of sequences that are not continued."""

from __future__ import annotations

from typing import Any

from gpuserve_worker.execution.execution import track_sequences
from gpuserve_worker.execution.lifecycle import Reporter
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.protocol.payloads import WireRequest


class Log(Reporter):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def error(self, text: str, traceback: str = "") -> None:
        self.lines.append(text)


class Told:
    """A callable that is told; it does not know what to do with one id."""

    def __init__(self) -> None:
        self.dropped: list[int | str] = []

    def __call__(self, requests: Any) -> Any:
        return requests

    def sequence_dropped(self, sequence_id: int | str) -> None:
        self.dropped.append(sequence_id)
        if sequence_id == "bad":
            raise KeyError(sequence_id)


def request(*sequence: Any) -> WireRequest:
    return WireRequest(1, {}, (), (), sequence or None)


def test_a_callable_is_told_once() -> None:
    told = Told()
    known = track_sequences(told, Log())
    assert known is not None
    known.before([request("a", True, False), request("b", True, False), request()], ())
    known.before([request("a", False, True)], ("b",))
    assert told.dropped == ["b"]
    known.forget()
    assert told.dropped == ["b"]


def test_without_its_front_it_forgets_all_that_had_begun() -> None:
    told = Told()
    known = track_sequences(told, Log())
    assert known is not None
    known.before([request(2, True, False), request("x", True, False), request(1, True, True)], ())
    known.forget()
    known.forget()
    assert told.dropped == [2, "x"]


def test_what_it_raises_is_logged_and_nothing_else() -> None:
    told, log = Told(), Log()
    known = track_sequences(told, log)
    assert known is not None
    known.before([], ("bad", "good"))
    assert told.dropped == ["bad", "good"]
    assert log.lines == ["sequence_dropped raised KeyError: 'bad' for sequence 'bad'"]


def test_who_does_not_ask_is_not_told() -> None:
    assert track_sequences(lambda requests: requests, Log()) is None


def test_a_request_says_which_sequence_it_belongs_to() -> None:
    batch = Batch({}, [request("a", True, False), request()], (), False)
    first, second = batch.as_list()
    assert (first.sequence, second.sequence) == (("a", True, False), None)
    assert first.sequence is not None
    assert first.sequence.start
    assert first.with_data({}).sequence == first.sequence
