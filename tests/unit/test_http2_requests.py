"""Requests over HTTP/2: what is made of their frames, however the bytes are cut, and what goes back."""

from __future__ import annotations

import itertools

import pytest
from http2_peer import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    NO_ERROR,
    PADDED,
    PING_FRAME,
    POST,
    PREFACE,
    PRIORITIZED,
    PRIORITY,
    REFUSED_STREAM,
    SETTINGS,
    Peer,
    data,
    frame,
    grow,
    reset,
    settings,
    u32,
)
from http2_scene import BodyReceiver, Talk
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.net.exchange import AnswerHead, Head
from gpuserve.front.net.http2_frames import (
    REMEMBERED_HEADS,
    REMEMBERED_NBYTES,
    HeaderBlock,
    HeaderBlockReader,
    MalformedHead,
    request_head,
)
from gpuserve.front.net.http2_hpack import Encoder
from gpuserve.front.net.http2_protocol import CONNECTION_WINDOW, MAX_CONCURRENT_STREAMS
from gpuserve.front.net.http2_streams import RECEIVE_WINDOW

OK = AnswerHead(200, (), [(b"grpc-status", b"0")])
BODIES = st.lists(st.tuples(st.binary(max_size=80), st.booleans(), st.integers(0, 3)), max_size=6)


def answer(sink: BodyReceiver, end: bool) -> None:
    """The body back, at its end."""
    if end:
        sink.exchange.answer(OK, (sink.body,), len(sink.body))


# ---- what is made of the frames -------------------------------------------------------------


def test_a_request_as_it_is_told() -> None:
    talk = Talk()
    talk.feed(talk.peer.request(1, b"body"))
    head = talk.sinks[0].exchange.head
    assert (head.method, head.path, head.query, head.raw_path) == ("POST", "/a", b"b=c", b"/a")
    assert head.headers[0] == (b"host", b"here")
    assert (head.http_version, head.scheme, head.trailers) == ("2", "http", True)
    assert talk.sinks[0].body == b"body"
    assert talk.sinks[0].ended


def test_equal_blocks_share_a_head_until_the_table_changes() -> None:
    talk = Talk(answer)
    talk.feed(b"".join(talk.peer.request(stream_id) for stream_id in (1, 3, 5, 7)))
    heads = [sink.exchange.head for sink in talk.sinks]
    assert heads[2] is heads[3]  # the first block filled the table, the second was seen for the first time
    other = (*POST, ("x", "y"))
    talk.feed(talk.peer.headers(9, other, end=True) + talk.peer.request(11))
    assert talk.sinks[4].exchange.head.headers[-1] == (b"x", b"y")
    assert talk.sinks[5].exchange.head.headers == heads[0].headers


@given(
    st.lists(st.tuples(BODIES, st.booleans()), min_size=1, max_size=5),
    st.lists(st.integers(0, 2500), max_size=40),
    st.randoms(use_true_random=False),
)
def test_any_cut_of_the_bytes_gives_the_same(
    requests: list[tuple[list[tuple[bytes, bool, int]], bool]], cuts: list[int], chance: object
) -> None:
    """Bodies in frames of all kinds, interleaved with frames that say nothing, and trailers."""
    peer = Peer()
    bodies, sent = [], [peer.first_settings()]
    for stream_id, (parts, trailers) in enumerate(requests):
        stream_id = 2 * stream_id + 1
        bodies.append(b"".join(part for part, _, _ in parts))
        sent.append(peer.headers(stream_id))
        for part, padded, extra in parts:
            payload = bytes([extra]) + part + bytes(extra) if padded else part
            sent += [frame(DATA, PADDED if padded else 0, stream_id, payload)]
            sent += [(b"", PING_FRAME, frame(200, 255, 9, part), frame(PRIORITY, 0, 77, bytes(5)))[extra]]
        ending = peer.headers(stream_id, [("x", "y")], end=True) if trailers else b""
        sent.append(ending or data(stream_id, b"", end=True))
    talk = Talk(answer, peer=peer, greet=False)
    talk.feed(b"".join(sent), cuts)
    assert [sink.body for sink in talk.sinks] == bodies
    assert all(sink.ended and not sink.n_abandoned for sink in talk.sinks)
    responses = [peer.responses[2 * n + 1] for n in range(len(requests))]
    assert [response.body for response in responses] == bodies
    assert all(response.trailers == {"grpc-status": "0"} for response in responses)
    assert not talk.http2.unanswered


@given(st.lists(st.integers(0, 300_000), max_size=12), st.integers(3_000, 256 << 10))
def test_a_large_body_comes_whole_from_any_cut(cuts: list[int], frame_nbytes: int) -> None:
    body = bytes(range(256)) * 1000
    starts = range(0, len(body), frame_nbytes)
    frames = [data(1, body[at : at + frame_nbytes], end=at == starts[-1]) for at in starts]
    talk = Talk()
    talk.feed(talk.peer.headers(1) + b"".join(frames), cuts)
    assert talk.sinks[0].body == body
    assert talk.sinks[0].ended


@given(
    st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=8), st.integers(0, 40), st.booleans()
)
def test_a_header_block_in_many_frames(parts: list[bytes], padding: int, priority: bool) -> None:
    fields = [*POST, *(("x-bin", part.hex()) for part in parts)]
    talk = Talk(answer)
    block = talk.peer.encoder.encode(fields)
    edges = [0, 1, len(block) // 2, len(block) // 2 + 2, len(block)]
    pieces = [block[start:end] for start, end in itertools.pairwise(edges)]
    first = (u32(0) + b"\x0f" if priority else b"") + pieces[0] + bytes(padding)
    flags = END_STREAM | PADDED | (PRIORITIZED if priority else 0)
    sent = frame(HEADERS, flags, 1, bytes([padding]) + first)
    sent += b"".join(frame(CONTINUATION, 0, 1, piece) for piece in pieces[1:-1])
    talk.feed(sent + frame(CONTINUATION, END_HEADERS, 1, pieces[-1]))
    assert talk.sinks[0].exchange.head.headers[3:] == [(b"x-bin", part.hex().encode()) for part in parts]
    assert talk.peer.responses[1].ended


def test_the_reserved_bit_of_a_stream_and_flags_without_a_meaning_are_passed_over() -> None:
    talk = Talk(answer)
    reserved = 1 << 31
    block = talk.peer.encoder.encode([(*field, True) for field in POST])
    for stream_id, more_of_head, more_of_data in ((1, 0, 0), (3, 0xD2, 0xF6), (5, 0, 0)):
        talk.feed(frame(HEADERS, END_HEADERS | more_of_head, stream_id | reserved, block))
        talk.feed(frame(DATA, END_STREAM | more_of_data, stream_id | reserved, b"body"))
        talk.feed(grow(reserved, 1) + grow(stream_id | reserved, 1))
    assert [talk.peer.responses[stream_id].body for stream_id in (1, 3, 5)] == [b"body"] * 3


# ---- heads that are none --------------------------------------------------------------------


FIELDS = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), (b"te", b"trailers")]


@pytest.mark.parametrize("missing", range(3))
def test_heads_without_what_is_needed(missing: int) -> None:
    with pytest.raises(MalformedHead, match="needs"):
        request_head(FIELDS[:missing] + FIELDS[missing + 1 :])


@pytest.mark.parametrize(
    "field",
    [
        (b":status", b"200"), (b":method", b"GET"), (b":unknown", b""), (b":authority", b"late"),
        (b"", b"value"), (b"Upper", b"case"), (b"sp ace", b""), (b"col:on", b""),
        (b"connection", b"close"), (b"keep-alive", b"1"), (b"proxy-connection", b"1"),
        (b"transfer-encoding", b"chunked"), (b"upgrade", b"h2c"), (b"te", b"gzip"), (b"x", b"a\nb"),
        (b"x", b"a\rb"), (b"x", b"a\0b"), (b"x", b" a"), (b"x", b"a\t"), (b"content-length", b"-1"),
        (b"content-length", b"1x"), (b"content-length", b""),
    ],
)  # fmt: skip
def test_heads_with_what_cannot_be(field: tuple[bytes, bytes]) -> None:
    with pytest.raises(MalformedHead):
        request_head([*FIELDS, field])


def test_heads_of_special_kinds() -> None:
    assert request_head([FIELDS[0], FIELDS[1], (b":path", b"*")]).path == "*"
    for path in (b"", b"a", b"http://x/"):
        with pytest.raises(MalformedHead):
            request_head([FIELDS[0], FIELDS[1], (b":path", path)])
    with pytest.raises(MalformedHead, match="several"):
        request_head([*FIELDS, (b"content-length", b"1"), (b"content-length", b"2")])
    assert request_head([*FIELDS, (b"content-length", b"7")]).content_length == 7
    assert request_head([(b":authority", b"a"), *FIELDS, (b"host", b"A")]).headers[-1] == (b"host", b"A")


@pytest.mark.parametrize(
    "changed",
    [
        {b":path": b"/a b"}, {b":path": b"/a\x01"}, {b":path": b"/a\x7f"}, {b":path": b"*x"},
        {b":method": b"PO ST"}, {b":method": b"P\x01"}, {b":scheme": b"ht tp"},
        {b":authority": b"user@a"}, {b":authority": b"a b"}, {b"host": b"b"}, {b"host": b""},
        {b":authority": b"", b"host": b"user:word@a"},
    ],
)  # fmt: skip
def test_heads_that_say_two_things_or_what_no_head_says(changed: dict[bytes, bytes]) -> None:
    fields = {b":authority": b"a", **dict(FIELDS)}
    request_head(list(fields.items()))
    with pytest.raises(MalformedHead):
        request_head(list((fields | changed).items()))
    with pytest.raises(MalformedHead, match="several hosts"):
        request_head([*FIELDS, (b"host", b"a"), (b"host", b"a")])


# ---- what goes back -------------------------------------------------------------------------


def test_the_first_words_of_a_connection() -> None:
    talk = Talk(greet=False)
    talk.feed(b"")
    assert (talk.peer.settings[0][3], talk.peer.send_window) == (MAX_CONCURRENT_STREAMS, 64 << 20)
    assert talk.feed(settings())[0] == (SETTINGS, ACK, 0, b"")
    assert PREFACE.startswith(b"PRI")


def test_settings_and_pings_are_answered_in_order() -> None:
    talk = Talk()
    frames = talk.feed(PING_FRAME + settings() + frame(6, ACK, 0, bytes(8)) + frame(SETTINGS, ACK))
    assert [(one.kind, one.flags) for one in frames] == [(6, ACK), (SETTINGS, ACK)]
    assert talk.peer.pongs == [b"12345678"]


def test_a_small_response_is_one_write() -> None:
    talk = Talk(answer)
    frames = talk.feed(talk.peer.request(1, b"body"))
    assert [(one.kind, one.flags) for one in frames] == [(HEADERS, END_HEADERS), (DATA, 0), (HEADERS, 5)]
    assert talk.peer.responses[1].body == b"body"


def test_a_response_of_a_head_alone() -> None:
    talk = Talk(lambda sink, end: sink.exchange.start(200, [(b"grpc-status", b"5")], end=True))
    frames = talk.feed(talk.peer.request(1))
    assert [(one.kind, one.flags) for one in frames] == [(HEADERS, END_HEADERS | END_STREAM)]
    assert not talk.http2.unanswered


def test_a_response_in_parts() -> None:
    def parts(sink: BodyReceiver, end: bool) -> None:
        sink.exchange.start(200, [])
        sink.exchange.send(b"")
        sink.exchange.send(b"a")
        sink.exchange.send(b"b")
        sink.exchange.finish([(b"x", b"y")])
        sink.exchange.send(b"late")
        sink.exchange.finish()

    talk = Talk(parts)
    talk.feed(talk.peer.request(1))
    response = talk.peer.responses[1]
    assert (response.status, response.body, response.trailers) == ("200", b"ab", {"x": "y"})
    assert response.ended


@pytest.mark.parametrize(("method", "last"), [("POST", b""), ("POST", b"x"), ("HEAD", b"x")])
def test_a_response_without_trailers_ends_with_its_data_if_any(method: str, last: bytes) -> None:
    def parts(sink: BodyReceiver, end: bool) -> None:
        sink.exchange.start(200, [])
        sink.exchange.send(b"a")
        sink.exchange.send(last, end=True)

    talk = Talk(parts)
    frames = talk.feed(talk.peer.headers(1, [(":method", method), *POST[1:]], end=True))
    assert talk.peer.responses[1].ended
    if method == "HEAD":
        assert talk.peer.responses[1].body == b""
    else:
        assert frames[-1] == (DATA, END_STREAM, 1, last)


def test_a_head_that_is_larger_than_a_frame() -> None:
    talk = Talk(lambda sink, end: sink.exchange.start(200, [(b"x", b"v" * 50_000)], end=True))
    frames = talk.feed(talk.peer.request(1))
    assert [one.kind for one in frames] == [HEADERS, CONTINUATION, CONTINUATION, CONTINUATION]
    assert dict(talk.peer.responses[1].heads[0])["x"] == "v" * 50_000


@pytest.mark.parametrize("small", [True, False])
def test_a_client_with_a_smaller_table_is_told_that_it_is_not_used(small: bool) -> None:
    talk = Talk(answer)
    talk.peer.decoder.max_allowed_table_size = 0
    talk.feed(settings({1: 0}))
    body = b"x" * (10 if small else 20_000)
    talk.feed(talk.peer.request(1, body) + talk.peer.request(3, body))
    assert (talk.peer.responses[3].body, talk.peer.decoder.header_table_size) == (body, 0)


# ---- responses before the end of the request ------------------------------------------------


def test_a_response_before_the_end_of_the_request() -> None:
    """The rest is not wanted, is dropped as it comes, and is given back to the window."""
    talk = Talk(lambda sink, end: sink.exchange.start(200, [(b"grpc-status", b"8")], end=True))
    frames = talk.feed(talk.peer.headers(1) + data(1, b"a"))
    assert [one.kind for one in frames] == [HEADERS, 3]
    assert (talk.peer.responses[1].reset, talk.sinks[0].n_abandoned) == (NO_ERROR, 1)
    late = data(1, bytes(16384)) * 3000 + talk.peer.headers(1, [("x", "y")], end=True)
    assert {one.kind for one in talk.feed(late)} == {8}
    assert talk.peer.send_window >= (64 << 20) + 3000 * 16384 - (32 << 20)
    talk.feed(reset(1) + grow(1, 1) + talk.peer.request(3))
    assert not talk.is_over


@pytest.mark.parametrize("end", [data(1, b"bc", end=True), data(1, b"bc") + reset(1)])
def test_a_response_before_the_end_of_a_request_that_is_nearly_there(end: bytes) -> None:
    """Some clients that send on lose the answer when they are told to stop."""
    talk = Talk(lambda sink, end: sink.exchange.start(403, [], end=True))
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("content-length", "3")]
    talk.feed(talk.peer.headers(1, fields) + data(1, b"a"))
    assert (talk.peer.responses[1].ended, talk.peer.responses[1].reset) == (True, None)
    assert talk.sinks[0].n_abandoned == 1
    talk.feed(end)
    assert talk.peer.responses[1].reset is None
    assert (talk.sinks[0].n_abandoned, talk.sinks[0].body) == (1, b"a")
    assert not talk.http2.unanswered
    talk.feed(talk.peer.request(3))
    assert talk.peer.responses[3].ended


@pytest.mark.parametrize("left_nbytes", [RECEIVE_WINDOW, RECEIVE_WINDOW + 1])
def test_only_what_the_client_may_send_is_let_come(left_nbytes: int) -> None:
    talk = Talk()
    length = ("content-length", str(left_nbytes))
    talk.feed(talk.peer.headers(1, [(":method", "POST"), (":scheme", "http"), (":path", "/"), length]))
    talk.sinks[0].exchange.start(403, [], end=True)
    talk.feed(b"")
    assert talk.peer.responses[1].reset == (None if left_nbytes == RECEIVE_WINDOW else NO_ERROR)


def test_what_came_of_requests_that_are_nearly_there_is_given_back() -> None:
    talk = Talk(consume=False)
    length = ("content-length", str(RECEIVE_WINDOW))
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/"), length]
    n_requests = 2 * CONNECTION_WINDOW // RECEIVE_WINDOW
    for n in range(n_requests):
        stream_id = 2 * n + 1
        talk.feed(talk.peer.headers(stream_id, fields) + data(stream_id, bytes(256 << 10)) * 15)
        talk.sink(stream_id).exchange.start(403, [], end=True)
        talk.feed(b"")
    assert not talk.is_over
    assert talk.http2.unanswered


def test_an_early_response_in_the_middle_of_a_frame() -> None:
    talk = Talk(lambda sink, end: sink.exchange.start(200, [], end=True))
    body = data(1, bytes(100_000), end=True)
    talk.feed(talk.peer.headers(1) + body + talk.peer.request(3), [200, 40_000, 90_000])
    assert talk.peer.responses[1].reset == NO_ERROR
    assert talk.peer.responses[3].reset is None
    assert talk.peer.responses[3].ended


def test_streams_over_the_limit_are_refused() -> None:
    talk = Talk()
    ids = range(1, 2 * MAX_CONCURRENT_STREAMS + 3, 2)
    talk.feed(b"".join(talk.peer.headers(stream_id) for stream_id in ids))
    assert len(talk.sinks) == MAX_CONCURRENT_STREAMS
    assert talk.peer.responses[ids[-1]].reset == REFUSED_STREAM
    talk.sinks[0].exchange.reset()
    talk.feed(talk.peer.request(ids[-1] + 2))
    assert len(talk.sinks) == MAX_CONCURRENT_STREAMS + 1


# ---- http2 heads -----------------------------------------------------------------------------


PLAIN = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"a")]


def read(reader: HeaderBlockReader, number: int, nbytes: int) -> Head:
    told = [(b"x-number", b"%d" % number), (b"x-long", b"x" * nbytes)]
    return reader.head(HeaderBlock(1, END_HEADERS, Encoder(0).encode([*PLAIN, *told])))


@pytest.mark.parametrize("nbytes", [1, 200, 1800, REMEMBERED_NBYTES])
def test_a_connection_holds_few_heads_however_many_come(nbytes: int) -> None:
    reader = HeaderBlockReader()
    for number in range(100):
        head = read(reader, number, nbytes)
        assert dict(head.headers)[b"x-number"] == b"%d" % number
        assert len(reader.heads) <= REMEMBERED_HEADS
        assert sum(map(len, reader.heads)) <= REMEMBERED_NBYTES
        assert head in reader.heads.values() or nbytes == REMEMBERED_NBYTES
