"""What the benchmarks read off the load generators, which rows are for which server, and what one copies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from benchmarks import payloads, processes
from benchmarks.load import LoadFailed, LoadResult, api_between, parse_h2load, parse_wrk
from benchmarks.payloads import EchoPayload
from benchmarks.peers import PeerCache
from benchmarks.request_section import options_of
from benchmarks.rounds import copy
from benchmarks.rows import ROWS, WITHOUT
from benchmarks.servers import SERVERS
from benchmarks.servers.server import ECHO, Api, Kind, Option, Ports, Server
from benchmarks.stream_client import ClientFailed, Stream

H2LOAD = """\
finished in 2.00s, 852.00 req/s, 115.78KB/s
requests: 1704 total, 1705 started, 1704 done, {succeeded} succeeded, {failed} failed, 0 errored, 0 timeout
status codes: 1704 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 231.56KB (237119) total, 5.07KB (5187) headers (space savings 96.24%), 158.09KB ({nbytes}) data
"""
WRK = """\
  Requests/sec:   8135.86
{{"requests": 8153, "duration_us": 1002107, "median_us": 7627.0, "p99_us": 9100.0, \
"errors": {{"connect": 0, "read": 0, "write": 0, "status": {status}, "timeout": 0}}}}
"""


def h2load(succeeded: int = 1704, failed: int = 0, nbytes: int = 1704 * 95) -> str:
    return H2LOAD.format(succeeded=succeeded, failed=failed, nbytes=nbytes)


ONE, MANY = {"answer_nbytes": 95}, {"answer_nbytes": 1900, "messages": 20}
NONE_ENDED = h2load(nbytes=950).replace("1704", "0").replace("852.00", "0.00").replace("2.00s", "500.00ms")


@pytest.mark.parametrize(
    ("output", "options", "answers", "answers_per_s"),
    [
        (h2load(), ONE, 1704, 852.0),
        (h2load(nbytes=1704 * 95 + 40), ONE, 1704, 852.0),  # a part of the last answers may be counted
        (h2load(nbytes=1704 * 1900 + 95), MANY, 1704 * 20 + 1, 852 * 20),  # so are streams under way
        (NONE_ENDED, MANY, 10, 20.0),
    ],
    ids=["requests", "a part", "streams", "no stream has ended"],
)
def test_h2load_count_and_rate(
    output: str, options: dict[str, int], answers: int, answers_per_s: float
) -> None:
    result = parse_h2load(output, in_flight=1, **options)
    assert (result.answers, result.answers_per_s) == (answers, pytest.approx(answers_per_s, rel=1e-4))


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (h2load(succeeded=1703, failed=1), "of 1704 requests 1 failed"),
        (h2load(nbytes=1703 * 95), "1704 answers have 161785 bytes together"),  # an error is in grpc-status
        (h2load(nbytes=0).replace("1704", "0").replace("852.00", "0.00"), "no request was answered"),
    ],
)
def test_h2load_with_a_failed_request_is_no_result(output: str, text: str) -> None:
    with pytest.raises(LoadFailed, match=text):
        parse_h2load(output, in_flight=1, **ONE)


def test_the_99th_percentile_is_a_latency_that_was_seen() -> None:
    result = LoadResult.of_times(200, 1.0, [float(number) for number in range(200, 0, -1)])
    assert (result.median_latency_s, result.p99_latency_s) == (100.5, 198.0)
    assert LoadResult.of_times(1, 1.0, [3.0]).p99_latency_s == 3.0


def test_wrk_gives_rate_and_latency_unless_a_request_failed() -> None:
    result = parse_wrk(WRK.format(status=0))
    assert result.answers_per_s == pytest.approx(8135.86, abs=0.01)
    assert (result.median_latency_s, result.p99_latency_s) == pytest.approx((7.627e-3, 9.1e-3))
    with pytest.raises(LoadFailed, match="'status': 3"):
        parse_wrk(WRK.format(status=3))


DATA, HEADERS, RESET, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
ACK = END_STREAM = 1


def http2(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def in_stream(window: int = 65_535) -> Stream:
    stream = Stream("/a.Service/Method", b"request", b"answer")
    assert stream.open()[3:5] == bytes((HEADERS, 4))
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
    with pytest.raises(ClientFailed, match=text):
        stream.take(received)


def rows_of(server: type[Server]) -> set[str]:
    prepared = server(PeerCache(Path("/nowhere")))
    return {row.name for row in ROWS if api_between(row.load, prepared) is not None}


HTTP_ROWS = {"http-64-64", "http-64-64-close", "json-16", "json-1000", "json-150528"}


def test_which_servers_run_every_row_and_which_run_http_rows_only() -> None:
    everything = {row.name for row in ROWS}
    assert [rows_of(SERVERS[name]) for name in ("gpuserve", "triton")] == [everything] * 2
    assert [rows_of(SERVERS[name]) for name in ("mosec", "litserve")] == [HTTP_ROWS] * 2


def test_a_server_runs_no_row_that_its_protocol_or_its_limits_leave_out() -> None:
    unary = {"grpc-64-1", "grpc-64-8x16", "grpc-64-1x128", "grpc-1m-1", "grpc-1m-8", "bytes-64x32"}
    unary |= {"grpc-4k", "grpc-16k", "grpc-64k", "grpc-128k", "grpc-256k", "rows-32"}
    assert rows_of(SERVERS["mlserver"]) == unary | HTTP_ROWS
    assert rows_of(SERVERS["nghttpd"]) == unary | {"grpc-64m-1"}
    plain = {row.name for row in ROWS if row.load.option is None}
    assert rows_of(SERVERS["pytriton"]) == {name for name in plain if not name.startswith("shm")}


def test_only_rows_that_move_a_large_tensor_have_the_copy_as_a_floor() -> None:
    copied = {row.name: row.copied_nbytes for row in ROWS if row.copied_nbytes}
    assert copied["grpc-64m-1"] == 1 << 26
    assert all(name.startswith(("grpc-1m", "grpc-64m", "shm")) for name in copied)


def test_a_copy_is_timed_at_least_once() -> None:
    result = copy(1 << 16, seconds=0.0)
    assert result.answers == 1
    assert result.answers_per_s > 0


def test_a_server_is_started_once_for_each_option_of_its_rows() -> None:
    def options(server: str, *names: str) -> list[Option | None]:
        rows = [row for row in ROWS if row.name in names]
        return options_of(SERVERS[server](PeerCache(Path("/nowhere"))), rows)

    assert options("triton", "token", "tls") == [Option.TLS, Option.TOKEN]
    assert options("gpuserve", "tls") == [Option.TLS]
    assert options("gpuserve", "token") == [Option.TOKEN, None]
    assert options("triton", "grpc-64-1", "token") == [None, Option.TOKEN]
    assert options("mosec", "grpc-64-1", "token") == []


def test_a_server_with_an_option_is_told_so_and_has_a_log_of_its_own() -> None:
    ports = Ports(1, 2, 3)
    for name, mark in (("gpuserve", "--access-token"), ("triton", "--grpc-restricted-protocol")):
        plain = SERVERS[name](PeerCache(Path("/nowhere")))
        with_token = plain.started_with(Option.TOKEN)
        assert mark in " ".join(with_token.command(ports, (ECHO,)))
        assert mark not in " ".join(plain.command(ports, (ECHO,)))
        assert with_token.log_name == f"{name}-token"


def test_a_process_is_told_by_its_command_line() -> None:
    ours = SERVERS["gpuserve"](PeerCache(Path("/nowhere")))
    commands = (
        "/venv/bin/python -m gpuserve_worker 7",
        "/venv/bin/python -m gpuserve.front.process 5",
        "/venv/bin/gpuserve serve x",
    )
    assert [ours.role(command) for command in commands] == ["worker", "front", "supervisor"]
    assert ours.role("/usr/bin/something -x") == "something"


def test_the_names_of_rows_and_servers() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert {name for row in ROWS for name, _ in row.goals.named} <= {*SERVERS, WITHOUT}
    assert {name for name, server in SERVERS.items() if server.kind is Kind.FLOOR} == {"nghttpd"}


@pytest.mark.parametrize("api", [Api.HTTP_BINARY, Api.HTTP_JSON, Api.BYTES, Api.PLAIN_JSON])
def test_an_http_request_holds_the_tensor_as_the_server_takes_it(api: Api) -> None:
    request = EchoPayload(8).http_request(api)
    tensor = np.array([0.0, 1.0], np.float32)
    if api in {Api.HTTP_BINARY, Api.BYTES}:
        assert request.body.endswith(tensor.tobytes())
    else:
        assert b"[0.0, 1.0]" in request.body
        assert request.headers == {"Content-Type": "application/json"}


def test_strings_are_sent_with_their_lengths() -> None:
    payload = payloads.strings(2, 5)
    request = service_pb2.ModelInferRequest.FromString(payload.grpc_message())
    length = (5).to_bytes(4, "little")
    assert list(request.raw_input_contents) == [length + b"00000" + length + b"00001"]
    assert payload.nbytes == 18


def test_eight_inputs_have_names_and_values_of_their_own() -> None:
    payload = payloads.eight_inputs(8)
    request = service_pb2.ModelInferRequest.FromString(payload.grpc_message())
    assert [one.name for one in request.inputs] == list("abcdefgh")
    assert {tuple(one.shape) for one in request.inputs} == {(1, 2)}
    assert len(set(request.raw_input_contents)) == 8
    assert payload.nbytes == 64


def test_a_batch_of_the_client_is_one_tensor() -> None:
    payload = payloads.echo_rows(32, 64)
    request = service_pb2.ModelInferRequest.FromString(payload.grpc_message())
    assert [tuple(one.shape) for one in request.inputs] == [(32, 16)]
    assert payload.nbytes == 2048


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
