"""What answers repeat goes over a connection once, whatever lies between the parts of an answer."""

from __future__ import annotations

from http2_peer import CANCEL, HEADERS, Peer, reset
from http2_scene import Talk

from gpuserve.front.net.exchange import AnswerHead

TRAILERS = [(b"grpc-status", b"0")]
OK = AnswerHead(200, [(b"content-type", b"application/grpc")], TRAILERS)


def blocks(talk: Talk) -> list[bytes]:
    return [one.payload for one in talk.read() if one.kind == HEADERS]


def asked(talk: Talk, *stream_ids: int) -> None:
    talk.feed(b"".join(talk.peer.request(one, b"x") for one in stream_ids))


def test_the_second_answer_is_referred_to() -> None:
    talk = Talk()
    asked(talk, 1, 3, 5)
    for one in (1, 3, 5):
        talk.sink(one).exchange.answer(OK, (b"x",), 1)
    sizes = [len(one) for one in blocks(talk)]
    assert sizes == [19, 15, 2, 1, 2, 1]
    assert all(
        dict(one.heads[0])["content-type"] == "application/grpc" for one in talk.peer.responses.values()
    )
    assert all(one.trailers == {"grpc-status": "0"} for one in talk.peer.responses.values())


def test_trailers_wait_with_their_body_and_are_encoded_when_they_are_sent() -> None:
    """Meanwhile others are answered, a stream is reset, and the client's table changes."""
    talk = Talk(peer=Peer(window=10))
    asked(talk, 1, 3, 5, 7)
    talk.sink(1).exchange.answer(OK, (bytes(20),), 20)
    talk.sink(3).exchange.start(200, OK.headers)
    talk.sink(3).exchange.send(bytes(20))
    talk.sink(3).exchange.finish(TRAILERS)
    talk.sink(5).exchange.answer(OK, (b"x",), 1)
    talk.feed(reset(3, CANCEL))
    talk.feed(talk.peer.resize_table(0))
    talk.feed(talk.peer.grow(1, 100))
    talk.feed(talk.peer.resize_table(4096))
    asked(talk, 9, 11)
    for one in (7, 9, 11):
        talk.sink(one).exchange.answer(OK, (b"x",), 1)
    assert [len(one) for one in blocks(talk)][-2:] == [2, 1]
    for one in (1, 5, 7, 9, 11):
        assert talk.peer.responses[one].trailers == {"grpc-status": "0"}


def test_an_answer_to_nobody_is_not_counted_as_sent() -> None:
    talk = Talk()
    asked(talk, 1, 3)
    talk.feed(reset(1, CANCEL))
    talk.sinks[0].exchange.answer(OK, (b"x",), 1)
    talk.sinks[1].exchange.answer(OK, (b"x",), 1)
    assert [len(one) for one in blocks(talk)] == [19, 15]
