"""How HTTP/2 connections end: told to, lost, or late."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
from http2_peer import (
    ACK,
    END_HEADERS,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    NO_ERROR,
    PING,
    PING_FRAME,
    POST,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    data,
    frame,
    grow,
)
from http2_scene import RecordingWay, Talk

from gpuserve.front.net.admission import Limits
from gpuserve.front.net.async_requests import AsyncRequest, AsyncRequests
from gpuserve.front.net.exchange import AnswerHead
from gpuserve.front.net.http2_control import (
    ECHO_TIMEOUT_S,
    LAST_OUTPUT_S,
    LINGER_S,
    SENDING_S,
    WINDOW_S,
    ConnectionTimeouts,
)
from gpuserve.front.net.http2_streams import STUCK_S

#: The last stream of a GOAWAY that does not know it yet.
NO_LAST = (1 << 31) - 1
OK = AnswerHead(200, (), [(b"x", b"y")])


def test_a_shut_down_answers_what_is_there_and_refuses_the_rest() -> None:
    talk = Talk()
    talk.feed(talk.peer.request(1) + talk.peer.headers(3))
    talk.http2.shut_down()
    talk.http2.shut_down()
    talk.read()
    assert talk.peer.goaways == [(NO_LAST, NO_ERROR)]
    talk.feed(talk.peer.echo() + talk.peer.request(5))
    assert (talk.peer.goaways[1:], talk.peer.responses[5].reset) == ([(3, NO_ERROR)], REFUSED_STREAM)
    talk.sinks[0].exchange.answer(OK, (b"a",), 1)
    assert not talk.is_over
    talk.feed(data(3, b"x", end=True))
    talk.sinks[1].exchange.start(200, [], end=True)
    talk.read()
    assert talk.way.said == ["end"]
    assert talk.peer.responses[1].ended
    assert talk.peer.responses[3].ended


def test_a_request_that_crosses_the_leave_is_served() -> None:
    """The client had not read that it is to open no stream."""
    talk = Talk()
    talk.http2.announce()
    talk.http2.announce()
    talk.read()
    assert (talk.peer.goaways, talk.peer.error, talk.http2.aware) == ([(NO_LAST, NO_ERROR)], NO_ERROR, False)
    talk.feed(talk.peer.request(1))
    talk.feed(frame(PING, ACK, 0, b"of ours?") + talk.peer.echo())
    assert (talk.peer.goaways[1:], talk.http2.aware) == ([(1, NO_ERROR)], True)
    talk.sinks[0].exchange.answer(OK, (b"a",), 1)
    talk.read()
    assert (talk.peer.responses[1].ended, talk.way.said) == (True, ["end"])


def test_a_client_that_does_not_echo_is_not_waited_for() -> None:
    talk = Talk()
    talk.http2.check(0.0)
    talk.http2.announce()
    talk.http2.check(5.0)
    talk.http2.check(5.0 + ECHO_TIMEOUT_S)
    assert talk.way.said == []
    talk.http2.check(5.1 + ECHO_TIMEOUT_S)
    talk.read()
    assert (talk.peer.goaways, talk.way.said) == ([(NO_LAST, NO_ERROR), (0, NO_ERROR)], ["end"])
    talk.feed(talk.peer.echo())
    talk.http2.announce()
    assert len(talk.peer.goaways) == 2


def test_a_client_that_goes_on_after_the_end_is_cut_off() -> None:
    talk = Talk()
    talk.feed(grow(0, 0) + bytes(3 << 20))
    assert talk.way.said == ["end"]
    talk.feed(bytes(2 << 20))
    assert "abort" in talk.way.said


@pytest.mark.parametrize(("tls", "said"), [(False, ["end"]), (True, ["close"])])
def test_a_shut_down_of_a_connection_without_requests(tls: bool, said: list[str]) -> None:
    talk = Talk(way=RecordingWay(tls=tls))
    talk.http2.shut_down()
    assert [one.kind for one in talk.read()] == [GOAWAY, PING]
    assert talk.way.said == []
    assert [one.kind for one in talk.feed(talk.peer.echo())] == [GOAWAY]
    assert talk.way.said == said
    talk.http2.shut_down()
    talk.http2.lost()
    assert talk.way.said == said


def test_what_was_promised_stays_promised() -> None:
    """A second GOAWAY names no later stream than the first."""
    talk = Talk()
    talk.feed(talk.peer.headers(1))
    talk.http2.shut_down()
    talk.read()
    talk.feed(talk.peer.echo() + talk.peer.headers(3) + grow(0, 0))
    assert talk.peer.goaways[1:] == [(1, NO_ERROR), (1, PROTOCOL_ERROR)]


def test_a_lost_connection_abandons_every_request() -> None:
    talk = Talk()
    talk.feed(talk.peer.request(1) + talk.peer.headers(3))
    talk.http2.lost()
    talk.http2.lost()
    assert [sink.n_abandoned for sink in talk.sinks] == [1, 1]
    talk.sinks[0].exchange.answer(OK, (b"a",), 1)
    talk.sinks[1].exchange.start(200, [])
    talk.sinks[1].exchange.reset()
    assert talk.read() == []


def test_a_header_block_must_come_in_time() -> None:
    for begun in (frame(HEADERS, 0, 1, b"\x83"), frame(HEADERS, END_HEADERS, 1, b"\x83\x83")[:-1], b"\0\0"):
        talk = Talk()
        talk.feed(begun)
        talk.http2.check(0)
        talk.http2.check(10)
        assert not talk.is_over
        talk.http2.check(10.1)
        talk.read()
        assert (talk.peer.error, talk.way.late) == (PROTOCOL_ERROR, ["head"])


def test_a_client_that_asks_for_nothing_is_taken_leave_of() -> None:
    talk = Talk()
    talk.feed(talk.peer.request(1))
    talk.http2.check(0)
    talk.http2.check(1000)  # it waits for its answer
    talk.sinks[0].exchange.answer(OK, (b"a",), 1)
    talk.http2.check(1001)
    talk.feed(PING_FRAME)
    talk.http2.check(1302)
    talk.read()
    assert (talk.peer.goaways, talk.way.late) == ([(NO_LAST, NO_ERROR)], ["idle"])
    talk.http2.check(1304)
    talk.read()
    assert (talk.peer.goaways[1:], talk.is_over, talk.way.late) == ([(1, NO_ERROR)], True, ["idle"])


@pytest.mark.parametrize(("part_nbytes", "late"), [(0, True), (499, True), (501, False)])
def test_a_body_must_come_in_time(part_nbytes: int, late: bool) -> None:
    talk = Talk()
    talk.feed(talk.peer.headers(1) + data(1, bytes(5)))
    for now in range(50):
        talk.http2.check(now)
        if part_nbytes and not talk.way.late:
            talk.feed(data(1, bytes(part_nbytes)))
    talk.read()
    assert (talk.way.late == ["body"], talk.sinks[0].n_abandoned == 1) == (late, late)
    if late:
        response = talk.peer.responses[1]
        assert (dict(response.heads[0])["grpc-status"], response.reset) == ("4", NO_ERROR)
        assert talk.http2.unanswered == []
    assert not talk.is_over


def test_a_call_ends_in_its_own_time_though_its_body_does_not() -> None:
    talk = Talk()
    talk.feed(talk.peer.headers(1, [*POST, ("grpc-timeout", "3S")]))
    for now in (0, 2.9):
        talk.http2.check(now)
        assert talk.http2.unanswered
    talk.http2.check(3)
    talk.read()
    assert dict(talk.peer.responses[1].heads[0])["grpc-status"] == "4"


async def test_a_stream_of_requests_may_be_open_for_long() -> None:
    requests = AsyncRequests()
    talk = Talk(handler=lambda one: requests.start(one, AsyncRequest.wait_until_gone, is_stream=True))
    talk.feed(talk.peer.headers(1))
    for now in (0, 100, 200):
        talk.http2.check(now)
    assert talk.http2.unanswered
    talk.http2.lost()
    await requests.stop()


@pytest.mark.parametrize(
    ("looks", "finished"),
    [
        # A client that reads nothing of a response is given up in the end.
        (
            [(0, 0), (SENDING_S * 9, 0), (SENDING_S * 10, 5), (SENDING_S * 10.9, 5), (SENDING_S * 11 + 1, 5)],
            False,
        ),
        # So is a client that does not go when all is said.
        ([(0, 5), (LAST_OUTPUT_S, 4), (2 * LAST_OUTPUT_S + 0.1, 4)], True),
        ([(now, 1000 - now) for now in range(int(LINGER_S) + 2)], True),
    ],
    ids=["does not read", "does not go", "goes slowly"],
)
def test_which_clients_are_late(looks: list[tuple[float, int]], finished: bool) -> None:
    """The last look at the bytes that are unsent at a time finds the client late, and those before do not."""
    ending = ConnectionTimeouts()
    late = [ending.is_late(now, unsent, finished=finished) for now, unsent in looks]
    assert late == [False] * (len(looks) - 1) + [True]
    if not finished:
        assert not ending.is_late(SENDING_S * 11 + 2, 4, finished=False), "it reads again"


def test_answers_that_no_window_lets_through_are_given_up_in_the_end() -> None:
    talk, released = Talk(), list[int]()
    talk.feed(talk.peer.request(1))
    body = bytes(1 << 20)
    talk.sinks[0].exchange.answer(OK, (body,), len(body), lambda: released.append(1))
    talk.http2.check(0)
    talk.http2.check(WINDOW_S)
    talk.feed(talk.peer.grow(0, 5) + talk.peer.grow(1, 5))
    talk.http2.check(WINDOW_S + 1)  # it took something
    talk.http2.check(2 * WINDOW_S)
    assert (talk.way.said, released) == ([], [])
    talk.http2.check(2 * WINDOW_S + 2)
    talk.read()
    assert talk.peer.error == ENHANCE_YOUR_CALM
    assert (talk.way.said, released) == (["end"], [1])
    assert not talk.http2.unanswered


def test_what_several_connections_do_not_read_has_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    body = bytes(1 << 20)
    talks = [Talk() for _ in range(3)]
    for talk in talks:
        talk.way.limits = Limits(max_unsent_nbytes=3 << 20)
        talk.way.admission = talks[0].way.admission
        for n, stream_id in enumerate((1, 3, 5)):
            talk.feed(talk.peer.request(stream_id))
            if n < 2:
                talk.sinks[n].exchange.answer(OK, (body,), len(body))
    now += STUCK_S
    last = talks[2]
    last.sinks[2].exchange.answer(OK, (body,), len(body))
    last.read()
    assert dict(last.peer.responses[5].heads[0])["grpc-status"] == "8"
    for talk in talks[:2]:
        talk.http2.lost()
    last.feed(last.peer.request(7))
    last.sinks[3].exchange.answer(OK, (body,), len(body))
    last.read()
    assert "grpc-status" not in dict(last.peer.responses[7].heads[0]), "the others have gone"
    last.http2.lost()
    assert last.way.admission.held_nbytes == 0


def test_a_client_that_reads_nothing_is_answered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    talk, body, released = Talk(), bytes(1 << 20), list[int]()
    talk.way.limits = Limits(max_unsent_nbytes=3 << 20)
    for stream_id in (1, 3, 5, 7, 9):
        talk.feed(talk.peer.request(stream_id))

    def answer(n: int) -> None:
        talk.sinks[n].exchange.answer(OK, (body,), len(body), lambda: released.append(n))

    for n in range(4):
        answer(n)  # it has had no time to read
    assert (released, talk.http2.sent[1] > 3 << 20) == ([], True)
    now += STUCK_S
    answer(4)
    talk.read()
    assert released == [4]
    refused = dict(talk.peer.responses[9].heads[0])
    assert (refused["grpc-status"], "are not read" in refused["grpc-message"]) == ("8", True)
    talk.http2.lost()
    assert (sorted(released), talk.http2.sent[1]) == ([0, 1, 2, 3, 4], 0)


def test_a_connection_that_is_lost_is_not_left_to_the_garbage_collector() -> None:
    talk = Talk()
    for stream_id in (1, 3):
        talk.feed(talk.peer.request(stream_id))
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(talk.http2)
        talk.http2.lost()
        talk.way.drained = lambda: None
        talk.sinks.clear()
        del talk.http2
        assert gone() is None
    finally:
        gc.enable()
