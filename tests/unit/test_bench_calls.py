"""The protocols of a connection, as bytes: whole, in pieces, and broken."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from gpuserve.cli.bench import http2_client as http2
from gpuserve.cli.bench.call_protocols import GrpcCalls, GrpcRequests, HttpCalls
from gpuserve.cli.bench.load_generator import CallProtocol, Failure, ProtocolError, TimedCall
from gpuserve.cli.bench.request_payloads import grpc_frame

OK_HEAD = http2.header_block([(":status", "200"), ("content-type", "application/grpc")])
OK_END = http2.header_block([("grpc-status", "0")])


@dataclass
class Ends:
    """A sink that keeps what it is told."""

    responses: list[TimedCall] = field(default_factory=list)
    ends: list[tuple[TimedCall, Failure | None]] = field(default_factory=list)

    def on_response(self, call: TimedCall, now: float) -> None:
        call.responses += 1
        self.responses.append(call)

    def on_end(self, call: TimedCall, failure: Failure | None, now: float) -> None:
        self.ends.append((call, failure))


def grpc(requests: list[bytes], *, in_streams: bool = False) -> tuple[GrpcCalls, Ends]:
    ends = Ends()
    calls = GrpcCalls(ends, GrpcRequests(b"head", requests, in_streams), http2.HeaderBlocks())
    assert not calls.has_room
    calls.on_connected()
    calls.receive(http2.frame(http2.SETTINGS, 0, 0, b""), 0.0)
    assert calls.has_room
    calls.out.clear()
    return calls, ends


def begun(calls: CallProtocol, request: int = 0) -> TimedCall:
    call = TimedCall(request, 0.0, 0.0)
    calls.start_call(call)
    return call


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, payload) of each."""
    found = []
    while data:
        nbytes = int.from_bytes(data[:3])
        found.append((data[3], data[4], int.from_bytes(data[5:9]), data[9 : 9 + nbytes]))
        data = data[9 + nbytes :]
    return found


def answer(stream: int, *messages: bytes, end: bytes = OK_END) -> bytes:
    body = b"".join(map(grpc_frame, messages))
    return (
        http2.frame(http2.HEADERS, http2.END_HEADERS, stream, OK_HEAD)
        + http2.frame(http2.DATA, 0, stream, body)
        + http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, end)
    )


def in_pieces(calls: CallProtocol, data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        calls.receive(data[start:end], 1.0)


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_grpc_answers_in_any_pieces(cuts: list[int]) -> None:
    calls, ends = grpc([b"request"])
    first, second = begun(calls), begun(calls)
    assert [(kind, stream) for kind, _, stream, _ in frames(bytes(calls.out))] == [
        (http2.HEADERS, 1), (http2.DATA, 1), (http2.HEADERS, 3), (http2.DATA, 3),
    ]  # fmt: skip
    in_pieces(calls, answer(3, b"b" * 700) + answer(1, b"a"), cuts)
    assert ends.ends == [(second, None), (first, None)]
    assert (first.responses, second.responses, calls.in_flight) == (1, 1, 0)


def test_a_grpc_failure_has_its_status_and_text() -> None:
    calls, ends = grpc([b"request"])
    call = begun(calls)
    end = http2.header_block([(":status", "200"), ("grpc-status", "14"), ("grpc-message", "no%20room")])
    calls.receive(http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, end), 1.0)
    assert ends.ends == [(call, Failure("UNAVAILABLE", "no room"))]


def test_a_call_without_a_message_is_no_success() -> None:
    calls, ends = grpc([b"request"])
    begun(calls)
    calls.receive(answer(1), 1.0)
    assert ends.ends[0][1] == Failure("no response", "the call ended well and without a response")


def test_a_stream_has_any_number_of_responses_and_may_hold_errors() -> None:
    calls, ends = grpc([b"request"], in_streams=True)
    good, empty, bad = begun(calls), begun(calls), begun(calls)
    calls.receive(answer(1, b"\x12\x01x", b"\x12\x01y") + answer(3) + answer(5, b"\x0a\x04oops"), 1.0)
    assert ends.ends == [(good, None), (empty, None), (bad, Failure("stream error", "oops"))]
    assert good.responses == 2


def test_the_text_of_an_error_in_a_stream_ends_before_the_next_field() -> None:
    calls, ends = grpc([b"request"], in_streams=True)
    call = begun(calls)
    text = "no such page. " * 10
    response = pb.ModelInferResponse(model_name="gen")
    message = pb.ModelStreamInferResponse(error_message=text, infer_response=response)
    calls.receive(answer(1, message.SerializeToString()), 1.0)
    assert ends.ends == [(call, Failure("stream error", text))]


def test_large_requests_wait_for_the_flow_control() -> None:
    body = bytes(range(256)) * 600  # 150 kB
    calls, _ = grpc([body])
    begun(calls)
    sent = [one for one in frames(bytes(calls.out)) if one[0] == http2.DATA]
    assert sum(len(payload) for *_, payload in sent) == http2.FIRST_WINDOW_NBYTES
    calls.out.clear()
    calls.receive(http2.window_update(0, 1 << 20), 1.0)
    assert calls.out == b""  # the stream's own window is still closed
    calls.receive(http2.window_update(1, 1 << 20), 1.0)
    sent += frames(bytes(calls.out))
    assert b"".join(payload for *_, payload in sent) == body
    assert [flags for _, flags, *_ in sent] == [0] * (len(sent) - 1) + [http2.END_STREAM]


def test_the_servers_limits_are_kept() -> None:
    calls, _ = grpc([b"x"])
    settings = (http2.MAX_STREAMS).to_bytes(2) + (1).to_bytes(4)
    calls.receive(http2.frame(http2.SETTINGS, 0, 0, settings), 0.0)
    begun(calls)
    assert not calls.has_room
    calls.receive(answer(1, b"x"), 1.0)
    assert calls.has_room


def test_go_away_ends_what_the_server_has_not_seen() -> None:
    calls, ends = grpc([b"x"])
    seen, unseen = begun(calls), begun(calls)
    calls.receive(http2.frame(http2.GOAWAY, 0, 0, (1).to_bytes(4) + bytes(4)), 1.0)
    assert [call for call, _ in ends.ends] == [unseen]
    assert (calls.has_room, calls.is_usable) == (False, False)
    calls.receive(answer(1, b"x"), 1.0)
    assert ends.ends[1] == (seen, None)


def test_a_reset_and_a_cancelled_call() -> None:
    calls, ends = grpc([b"x"])
    first, second = begun(calls), begun(calls)
    calls.out.clear()
    assert calls.cancel(second)
    assert frames(bytes(calls.out)) == [(http2.RESET, 0, 3, http2.CANCELLED)]
    calls.receive(http2.frame(http2.RESET, 0, 1, (7).to_bytes(4)) + answer(3, b"late"), 1.0)
    assert ends.ends == [(first, Failure("stream reset", "RST_STREAM with error code 7"))]


def test_padded_and_continued_headers() -> None:
    calls, ends = grpc([b"x"])
    call = begun(calls)
    half = len(OK_HEAD) // 2
    padded = bytes((3,)) + OK_HEAD[:half] + bytes(3)
    data = http2.frame(http2.HEADERS, http2.PADDED, 1, padded)
    data += http2.frame(http2.CONTINUATION, http2.END_HEADERS, 1, OK_HEAD[half:])
    data += http2.frame(http2.DATA, http2.PADDED, 1, bytes((2,)) + grpc_frame(b"m") + bytes(2))
    data += http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, OK_END)
    calls.receive(data, 1.0)
    assert ends.ends == [(call, None)]


def test_a_server_that_uses_the_table_is_told_apart() -> None:
    calls, _ = grpc([b"x"])
    begun(calls)
    with pytest.raises(ProtocolError, match="cannot be read"):
        calls.receive(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"\xbe"), 1.0)


@pytest.mark.parametrize("length", [0, 126, 127, 128, 300, 20_000])
def test_header_blocks_of_any_length(length: int) -> None:
    block = http2.header_block([("x", "v" * length)])
    assert http2.HeaderBlocks().read(block) == {"x": "v" * length}


def http(*, in_streams: bool = False) -> tuple[HttpCalls, Ends]:
    ends = Ends()
    calls = HttpCalls(ends, [b"POST"], in_streams=in_streams)
    calls.on_connected()
    return calls, ends


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_http_answers_in_any_pieces(cuts: list[int]) -> None:
    calls, ends = http()
    call = begun(calls)
    assert (bytes(calls.out), calls.has_room) == (b"POST", False)
    in_pieces(calls, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", cuts)
    assert ends.ends == [(call, None)]
    assert (calls.has_room, call.responses) == (True, 1)


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_events_in_any_pieces(cuts: list[int]) -> None:
    calls, ends = http(in_streams=True)
    call = begun(calls)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (b"data: {}\n\nda", b"ta: {}\n\n"))
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    in_pieces(calls, head + chunks + b"0\r\nx: y\r\n\r\n", cuts)
    assert ends.ends == [(call, None)]
    assert call.responses == 2


def test_http_failures() -> None:
    calls, ends = http()
    call = begun(calls)
    calls.receive(b"HTTP/1.1 503 No\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfull", 1.0)
    assert ends.ends == [(call, Failure("HTTP 503", "full"))]
    assert not calls.is_usable
    streaming, told = http(in_streams=True)
    begun(streaming)
    streaming.receive(b'HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\ndata: {"error": "no"}\n', 1.0)
    assert told.ends[0][1] == Failure("stream error", '{"error": "no"}')


@pytest.mark.parametrize("data", [b"what\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"])
def test_what_is_no_http(data: bytes) -> None:
    calls, _ = http()
    begun(calls)
    with pytest.raises(ProtocolError, match="does not speak HTTP"):
        calls.receive(data, 1.0)


def test_http_cannot_cancel() -> None:
    calls, ends = http()
    call = begun(calls)
    assert not calls.cancel(call)
    calls.receive(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 1.0)
    assert (ends.ends, calls.is_usable) == ([], False)
