"""What the benchmarks read off the load generators, and how runs become ratios."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks import processes
from benchmarks.in_stream_client import InStreamFailed, Stream
from benchmarks.load import LoadFailed, parse_h2load, parse_wrk
from benchmarks.report import Ratio
from benchmarks.rows import ROWS, Target
from benchmarks.servers import Api
from benchmarks.stream_client import StreamFailed, Streams

H2LOAD = """\
finished in 2.00s, 852.00 req/s, 115.78KB/s
requests: 1704 total, 1705 started, 1704 done, {succeeded} succeeded, {failed} failed, 0 errored, 0 timeout
status codes: 1704 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 231.56KB (237119) total, 5.07KB (5187) headers (space savings 96.24%), 158.09KB ({nbytes}) data
"""
WRK = """\
  Requests/sec:   8135.86
{{"requests": 8153, "duration_us": 1002107, "mean_us": 7792.1, "median_us": 7627.0, \
"errors": {{"connect": 0, "read": 0, "write": 0, "status": {status}, "timeout": 0}}}}
"""


def h2load(succeeded: int = 1704, failed: int = 0, nbytes: int = 1704 * 95) -> str:
    return H2LOAD.format(succeeded=succeeded, failed=failed, nbytes=nbytes)


def test_h2load_gives_count_and_rate() -> None:
    result = parse_h2load(h2load(), answer_nbytes=95, in_flight=1)
    assert (result.answers, result.answers_per_s) == (1704, 852.0)


def test_h2load_with_a_failed_request_is_no_result() -> None:
    with pytest.raises(LoadFailed, match="of 1704 requests 1 failed"):
        parse_h2load(h2load(succeeded=1703, failed=1), answer_nbytes=95, in_flight=1)


def test_h2load_with_errors_in_grpc_status_is_no_result() -> None:
    with pytest.raises(LoadFailed, match="1704 answers have 161785 bytes together"):
        parse_h2load(h2load(nbytes=1703 * 95), answer_nbytes=95, in_flight=1)


def test_h2load_may_count_a_part_of_the_last_answers() -> None:
    assert parse_h2load(h2load(nbytes=1704 * 95 + 40), answer_nbytes=95, in_flight=1).answers == 1704


def test_h2load_counts_the_messages_of_streams_also_of_those_under_way() -> None:
    output = h2load(nbytes=1704 * 1900 + 95)
    result = parse_h2load(output, answer_nbytes=1900, in_flight=1, messages=20)
    assert result.answers == 1704 * 20 + 1
    assert result.answers_per_s == pytest.approx(852 * 20, rel=1e-4)


def test_wrk_gives_rate_and_latency() -> None:
    result = parse_wrk(WRK.format(status=0))
    assert result.answers_per_s == pytest.approx(8135.86, abs=0.01)
    assert result.median_latency_s == pytest.approx(7.627e-3)


def test_wrk_with_a_failed_request_is_no_result() -> None:
    with pytest.raises(LoadFailed, match="'status': 3"):
        parse_wrk(WRK.format(status=3))


DATA, HEADERS, RESET, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
ACK = END_STREAM = 1


def http2(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def opened(calls: int) -> Streams:
    streams = Streams("/a.Service/Method", b"request", b"the answer")
    assert streams.open(calls, now=10.0).count(b"request") == calls
    return streams


def test_the_stream_client_times_the_first_message_of_each_call() -> None:
    streams = opened(2)
    streams.take(http2(HEADERS, 1) + http2(HEADERS, 3), now=10.1)
    streams.take(http2(DATA, 3, b"the "), now=10.25)
    streams.take(http2(DATA, 3, b"answer") + http2(DATA, 1, b"the answer"), now=10.5)
    assert (streams.first_s, streams.ended, streams.under_way) == ([0.25, 0.5], 0, 2)
    streams.take(http2(HEADERS, 1, flags=END_STREAM) + http2(DATA, 3, flags=END_STREAM), now=10.75)
    assert (len(streams.first_s), streams.ended, streams.under_way) == (2, 2, 0)


def test_the_stream_client_takes_frames_in_any_pieces() -> None:
    streams = opened(1)
    received = (
        http2(PING, 0, b"12345678") + http2(DATA, 1, b"the answer") + http2(HEADERS, 1, flags=END_STREAM)
    )
    owed = b"".join(streams.take(received[at : at + 1], now=11.0) for at in range(len(received)))
    assert owed == http2(PING, 0, b"12345678", flags=ACK)
    assert (streams.first_s, streams.ended) == ([1.0], 1)


@pytest.mark.parametrize(
    ("received", "text"),
    [
        (http2(HEADERS, 1, flags=END_STREAM), "an answer of 0 bytes is not the right one of 10"),
        (http2(DATA, 1, b"another an", END_STREAM), "an answer of 10 bytes is not the right one of 10"),
        (http2(RESET, 1, b"\0\0\0\1"), "the server sent RST_STREAM"),
    ],
)
def test_the_stream_client_takes_no_wrong_answer(received: bytes, text: str) -> None:
    with pytest.raises(StreamFailed, match=text):
        opened(1).take(received, now=11.0)


def in_stream(window: int = 65_535) -> Stream:
    stream = Stream("/a.Service/Method", b"request", b"answer")
    assert stream.open()[:3] == b"PRI"
    setting = b"\0\4" + window.to_bytes(4)
    assert stream.take(http2(SETTINGS, 0, setting)) == http2(SETTINGS, 0, flags=ACK)
    return stream


def test_the_in_stream_client_counts_answers_in_any_pieces() -> None:
    stream = in_stream()
    assert stream.ask(3) == http2(DATA, 1, b"request") * 3
    received = http2(DATA, 1, b"answerans") + http2(PING, 0, b"12345678") + http2(DATA, 1, b"wer")
    owed = b"".join(stream.take(received[at : at + 1]) for at in range(len(received)))
    assert owed == http2(PING, 0, b"12345678", flags=ACK)
    assert (stream.answers, stream.in_flight, stream.ended) == (2, 1, False)
    stream.take(http2(DATA, 1, b"answer") + http2(HEADERS, 1, flags=END_STREAM))
    assert (stream.answers, stream.in_flight, stream.ended) == (3, 0, True)


def test_the_in_stream_client_keeps_to_the_flow_control() -> None:
    stream = in_stream(window=15)
    assert stream.ask(4) == http2(DATA, 1, b"request") * 2
    stream.take(http2(WINDOW_UPDATE, 1, (13).to_bytes(4)))
    assert stream.ask(0) == http2(DATA, 1, b"request") * 2
    assert stream.in_flight == 4


@pytest.mark.parametrize(
    ("received", "text"),
    [
        (http2(DATA, 1, b"anothe"), "answer 1 or one of the 1 from there on is wrong"),
        (http2(DATA, 1, b"answer" * 3), "answer 1 or one of the 3 from there on is wrong"),
        (http2(HEADERS, 1, flags=END_STREAM), "the stream ended before 2 of its answers"),
        (http2(RESET, 1, b"\0\0\0\1"), "the server sent RST_STREAM"),
    ],
)
def test_the_in_stream_client_takes_no_wrong_answer(received: bytes, text: str) -> None:
    stream = in_stream()
    stream.ask(2)
    with pytest.raises(InStreamFailed, match=text):
        stream.take(received)


def test_only_http_rows_are_for_servers_without_v2() -> None:
    assert [row.name for row in ROWS if Api.RAW in row.load.apis] == ["http-64-64"]


def test_a_ratio_is_taken_inside_each_round() -> None:
    ratio = Ratio.of([10.0, 30.0, 40.0], [10.0, 10.0, 20.0])
    assert (ratio.median, ratio.lowest, ratio.highest) == (2.0, 1.0, 3.0)


def test_a_latency_target_is_met_from_below() -> None:
    assert Target(0.3, at_most=True).met_by(0.2)
    assert not Target(0.9).met_by(0.8)


def test_row_names_are_told_apart() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_tree_holds_the_process_and_its_children() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        tree = processes.tree(os.getpid())
        assert tree[0].pid == os.getpid()
        assert child.pid in {one.pid for one in tree}
        assert 0 < tree[0].memory.pss_nbytes <= tree[0].memory.rss_nbytes
    finally:
        child.communicate(b"\n")
    assert processes.tree(child.pid) == []
