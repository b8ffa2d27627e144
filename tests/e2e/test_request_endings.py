"""Every way a request can end, over every protocol: afterwards no memory for requests is held, and none had
to be reclaimed from an owner that lost it.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import signal
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from commands import ingress_pids
from config_file import tensor, write_config
from http2_peer import Peer, data, reset
from http2_wire import GRPC, TIMEOUT_S, Wire
from models.endings import ASKS, DIES, ECHOED, KEPT, MISFITS, RAISES, SLOW
from operated import OperatedServer
from processes import wait_until
from sending import entry, frame, message, sized

pytestmark = pytest.mark.thorough

MIB: Final = 1 << 20
LIMIT_NBYTES: Final = 4 * MIB
#: A tensor of so many FP32 lies in an arena.
FLOATS: Final = 64 << 10
MODELS: Final = Path(__file__).resolve().parent.parent / "models" / "endings.py"
STREAM: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
EXPIRED: Final = ("grpc-timeout", "1n")
FORWARDED: Final = ("priority", "1")
HELD: Final = (
    "gpuserve_arena_blocks",
    "gpuserve_intake_bytes",
    "gpuserve_queue_requests",
    "gpuserve_running_requests",
)
#: What is cut off a body: in its first bytes, around what comes before the tensor, and in the tensor.
CUTS: Final = (0, 1, 4, 5, 6, 20, 40, 60, 80, 100, 16384, 65535, 65536, 65541, 200_000, -2, -1)


def model(name: str, attribute: str, **more: Any) -> dict[str, Any]:
    tensors = {"inputs": [tensor("x", "FP32", -1)], "outputs": [tensor("y", "FP32", -1)]}
    return {"name": name, "callable": f"{MODELS}:{attribute}", **tensors, "max_batch_size": 8, **more}


def entries() -> list[dict[str, Any]]:
    steps = [{"model": "act", "inputs": {"x": "x"}, "outputs": {"y": "y"}}]
    tensors = {"inputs": [tensor("x", "FP32", -1)], "outputs": [tensor("y", "FP32", -1)]}
    waits = {"max_queue_delay_us": 60_000_000, "preferred_batch_sizes": [8]}
    return [
        model("act", "act"),
        model("other", "act"),
        model("many", "many", decoupled=True),
        model("patient", "act", batching=waits, queue={"max_requests": 2}),
        {"name": "chain", **tensors, "max_batch_size": 8, "ensemble": {"steps": steps}},
    ]


@pytest.fixture(scope="module", params=["1", pytest.param("2", marks=pytest.mark.thorough)])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatedServer]:
    settings = {
        "host": "127.0.0.1",
        "max_request_nbytes": LIMIT_NBYTES,
        "max_inflated_nbytes": LIMIT_NBYTES,
        "grpc_header_forward_pattern": "priority",
        "http_header_forward_pattern": "priority",
        "model_control": "explicit",
        "min_ready_instances": 0,
    }
    config = write_config(tmp_path_factory.mktemp("endings"), entries(), **settings)
    with OperatedServer(config, "--ingress-processes", request.param).until_ended() as started:
        yield started


@pytest.fixture(autouse=True)
def _nothing_is_held(server: OperatedServer) -> Iterator[None]:
    yield
    settle(server)
    for gauge in HELD:
        wait_until(lambda gauge=gauge: server.metric(gauge) == 0, gauge, TIMEOUT_S)
    assert server.metric("gpuserve_memory_reclaimed_total") == 0


def settle(server: OperatedServer) -> None:
    """Have the workers let go of what they keep until the next call."""
    for name in ("act", "other"):
        infer(server, name, ECHOED)


# ---- what is sent ---------------------------------------------------------------------------


def raw(how: int, floats: int = FLOATS) -> bytes:
    return np.full(floats, how, np.float32).tobytes()


def call(name: str = "act", how: int = ECHOED, **changes: Any) -> bytes:
    made = message(name, 1, FLOATS, raw=raw(how))
    for field, value in changes.items():
        setattr(made, field, value)
    return bytes(made.SerializeToString())


def changed(change: Any) -> bytes:
    made = message("act", 1, FLOATS, raw=raw(ECHOED))
    change(made)
    return bytes(made.SerializeToString())


def messages() -> dict[str, bytes]:
    """Messages of ModelInfer, right and wrong."""
    good = call()
    return {
        **{f"act {how}": call(how=how) for how in (ECHOED, RAISES, MISFITS, KEPT, SLOW, ASKS)},
        **{f"chain {how}": call("chain", how) for how in (ECHOED, RAISES, MISFITS, KEPT)},
        "small": bytes(message("act", 1, 4).SerializeToString()),
        "many": call("many"),
        "model": call("nobody"),
        "version": call(model_version="99"),
        "malformed version": call(model_version="x"),
        "shape": changed(lambda made: made.inputs[0].shape.__setitem__(1, FLOATS + 1)),
        "negative shape": changed(lambda made: made.inputs[0].shape.__setitem__(1, -1)),
        "rank": changed(lambda made: made.inputs[0].shape.append(1)),
        "rows": changed(lambda made: made.inputs[0].shape.__setitem__(slice(0, 2), [64, FLOATS // 64])),
        "datatype": changed(lambda made: setattr(made.inputs[0], "datatype", "INT32")),
        "unknown datatype": changed(lambda made: setattr(made.inputs[0], "datatype", "FLOAT")),
        "name": changed(lambda made: setattr(made.inputs[0], "name", "w")),
        "twice": changed(lambda made: (made.inputs.append(made.inputs[0]), twice_raw(made))),
        "more tensors": changed(twice_raw),
        "fewer tensors": changed(lambda made: made.inputs.append(made.inputs[0])),
        "output": changed(lambda made: made.outputs.add(name="nothing")),
        "classes": changed(classes),
        "region": changed(region),
        "priority": changed(lambda made: setattr(made.parameters["priority"], "int64_param", -1)),
        "sequence": changed(lambda made: setattr(made.parameters["sequence_id"], "int64_param", 7)),
        "timeout": changed(lambda made: setattr(made.parameters["timeout"], "int64_param", 1)),
        "two models": good + b"\x0a\x06nobody",
        "wire type": good + b"\x0e",
        "group": good + b"\x0b",
        "varint": good + b"\x08" + b"\xff" * 11,
        "field": good + b"\x3a\x7f",
        "text": good + b"\x0a\x02\xff\xff",
    }


def twice_raw(made: Any) -> None:
    made.raw_input_contents.append(raw(ECHOED))


def classes(made: Any) -> None:
    made.outputs.add(name="y").parameters["classification"].int64_param = 3


def region(made: Any) -> None:
    parameters = made.inputs.add(name="w", datatype="FP32", shape=[1, 4]).parameters
    parameters["shared_memory_region"].string_param = "nowhere"
    parameters["shared_memory_byte_size"].int64_param = 16


def framed() -> dict[str, tuple[bytes, tuple[Any, ...]]]:
    """Bodies of calls with headers of their own."""
    good = call()
    bomb = gzip.compress(call()[:-1] + bytes(8 * LIMIT_NBYTES), 1)
    coded = (("grpc-encoding", "gzip"),)
    return {
        **{name: (frame(body), ()) for name, body in messages().items()},
        "surplus": (frame(good) + b"x", ()),
        "two messages": (frame(good) * 2, ()),
        "flag": (frame(good, 1), ()),
        "bad flag": (frame(good, 7), ()),
        "longer": (struct.pack(">BI", 0, len(good) + 9) + good, ()),
        "too large": (struct.pack(">BI", 0, 16 * LIMIT_NBYTES) + good, ()),
        "nothing": (b"", ()),
        "forwarded": (frame(good), (FORWARDED,)),
        "coding": (frame(good), (("grpc-encoding", "br"),)),
        "gzip": (frame(gzip.compress(good), 1), coded),
        "gzip, wrong": (frame(gzip.compress(call("nobody")), 1), coded),
        "gzip, forwarded": (frame(gzip.compress(good), 1), (*coded, FORWARDED)),
        "gzip, bomb": (frame(bomb, 1), coded),
        "gzip, broken": (frame(gzip.compress(good)[:-20] + bytes(20), 1), coded),
        "gzip, cut": (frame(gzip.compress(os.urandom(MIB))[:-9], 1), coded),
    }


class Calls(Wire):
    """Calls on one connection, none of whose answers is waited for by itself."""

    def __init__(self, server: OperatedServer) -> None:
        super().__init__(server.addresses["gRPC"], Peer(window=16 * MIB))
        self.send(self.peer.grow(0, 1 << 30))
        self.last = -1

    def begin(self, headers: tuple[Any, ...] = (), path: str | None = None) -> int:
        self.last += 2
        fields = [one for one in GRPC if path is None or one[0] != ":path"]
        named = fields if path is None else [*fields[:2], (":path", path), *fields[2:]]
        self.send(self.peer.headers(self.last, (*named, *headers)))
        return self.last

    def body(self, number: int, body: bytes, *, end: bool) -> None:
        """Send a body as far as the windows let it; the rest once they have grown."""
        parts = [body[at : at + 16384] for at in range(0, len(body), 16384)] or [b""]
        response = self.peer.response(number)
        for n, part in enumerate(parts):
            self.read_until(lambda: self.peer.send_window > 65536 or response.ended)
            self.peer.send_window -= len(part)
            if response.ended or response.reset is not None:
                return
            self.send(data(number, part, end=end and n == len(parts) - 1))
            if n == len(parts) // 2:
                self.ping()  # the rest comes later

    def ended(self, *numbers: int) -> None:
        responses = [self.peer.response(one) for one in numbers]
        self.read_until(lambda: all(one.ended or one.reset is not None for one in responses))


# ---- unary calls of gRPC --------------------------------------------------------------------


@pytest.mark.parametrize("expired", [(), (EXPIRED,)], ids=["in time", "expired"])
def test_calls_that_come_whole(server: OperatedServer, expired: tuple[Any, ...]) -> None:
    for body, headers in framed().values():
        with Calls(server) as calls:
            number = calls.begin((*headers, *expired))
            calls.body(number, body, end=True)
            calls.ended(number)


@pytest.mark.parametrize("headers", [(), (EXPIRED,), (FORWARDED,)], ids=["plain", "expired", "forwarded"])
@pytest.mark.parametrize("how", ["end", "reset", "leave"])
def test_calls_that_are_cut(server: OperatedServer, how: str, headers: tuple[Any, ...]) -> None:
    body = frame(call())
    for cut in CUTS:
        with Calls(server) as calls:
            number = calls.begin(headers)
            calls.body(number, body[:cut] if cut else b"", end=how == "end")
            if how == "reset":
                calls.send(reset(number))
                calls.ping()
            elif how == "end":
                calls.ended(number)


@pytest.mark.parametrize("how", ["reset", "leave"])
def test_calls_that_nobody_waits_for(server: OperatedServer, how: str) -> None:
    """Whole requests that are cancelled at once, while they wait, or while they run."""
    for name, (body, headers) in framed().items():
        with Calls(server) as calls:
            for is_late in (False, True):
                number = calls.begin(headers)
                calls.body(number, body, end=True)
                if is_late:
                    calls.ping()
                if how == "reset":
                    calls.send(reset(number))
        assert name


def test_calls_whose_answers_are_not_read(server: OperatedServer) -> None:
    with Wire(server.addresses["gRPC"], Peer(window=0)) as wire:
        for number in range(1, 17, 2):
            wire.send(wire.peer.headers(number, GRPC))
            body = frame(message("act", 1, 12_000, raw=raw(ECHOED, 12_000)).SerializeToString())
            wire.read_until(lambda: wire.peer.send_window > 131072 or wire.peer.send_window == 65535)
            for at in range(0, len(body), 16384):
                wire.send(data(number, body[at : at + 16384], end=at + 16384 >= len(body)))
            wire.ping()
        wire.read_until(lambda: len(wire.peer.responses) == 8)
        wire.send(reset(1))


def test_calls_that_the_queue_has_no_room_for(server: OperatedServer) -> None:
    with Calls(server) as calls:
        numbers = [calls.begin() for _ in range(4)]
        for number in numbers:
            calls.body(number, frame(call("patient")), end=True)
        calls.ended(*numbers[2:])
        assert server.metric("gpuserve_queue_requests", model="patient") == 2
        calls.send(reset(numbers[0]))
        calls.ping()


def test_calls_that_expire_in_the_queue(server: OperatedServer) -> None:
    with Calls(server) as calls:
        numbers = [calls.begin((("grpc-timeout", "40m"),)) for _ in range(2)]
        for number in numbers:
            calls.body(number, frame(call("patient")), end=True)
        calls.ended(*numbers)


def test_calls_that_kill_their_worker(server: OperatedServer) -> None:
    with Calls(server) as calls:
        numbers = [calls.begin() for _ in range(3)]
        for number in numbers:
            calls.body(number, frame(call(how=DIES)), end=True)
        calls.ended(*numbers)
    server.wait_model_ready("act")


def test_calls_whose_model_is_unloaded_meanwhile(server: OperatedServer) -> None:
    with Calls(server) as calls, connected(server) as sock:
        half = calls.begin()
        body = frame(call("patient"))
        calls.body(half, body[:-1], end=False)
        queued = calls.begin((("grpc-timeout", "500m"),))
        calls.body(queued, body, end=True)
        head, rest = binary("patient")
        sock.sendall(head + rest[:-1])
        wait_until(lambda: server.metric("gpuserve_arena_blocks") == 3, "two halves, and one", TIMEOUT_S)
        for verb in ("unload", "load"):
            assert http_status(server, f"/v2/repository/models/patient/{verb}") == 200
            if verb == "unload":
                calls.ended(queued)
                calls.send(data(half, body[-1:], end=True))
                calls.ended(half)
                sock.sendall(rest[-1:])
                assert sock.recv(65536)
    server.wait_model_ready("patient")


def test_an_ingress_process_that_dies(server: OperatedServer) -> None:
    if not (before := ingress_pids(server)):
        pytest.skip("there is none: one process has all connections")
    with contextlib.ExitStack() as stack:
        for how in (SLOW, KEPT, ECHOED) * 2:
            calls = stack.enter_context(Calls(server))
            calls.body(calls.begin(), frame(call(how=how)), end=True)
        half = stack.enter_context(Calls(server))
        half.body(half.begin(), frame(call())[:-1], end=False)
        os.kill(before[0], signal.SIGKILL)

    def is_replaced() -> bool:
        now = ingress_pids(server)
        return len(now) == len(before) and before[0] not in now

    wait_until(is_replaced, "another ingress process", TIMEOUT_S)


# ---- streams of gRPC ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["end", "reset", "leave", "cut"])
def test_streams(server: OperatedServer, how: str) -> None:
    for body, headers in framed().values():
        with Calls(server) as calls:
            number = calls.begin(headers, STREAM)
            if how == "cut":
                calls.body(number, body + body[:-1], end=False)
            else:
                calls.body(number, body * 2, end=how == "end")
            if how == "end":
                calls.ended(number)
            elif how == "reset":
                calls.send(reset(number))
                calls.ping()


def test_streams_that_end_before_a_later_answer_is_due(server: OperatedServer) -> None:
    answered = server.metric("gpuserve_requests_success_total", model="act")
    with Calls(server) as calls:
        number = calls.begin((), STREAM)
        calls.body(number, frame(call("patient")) + frame(call()), end=False)
        wait_until(
            lambda: server.metric("gpuserve_requests_success_total", model="act") > answered,
            "an answer that waits for an earlier one",
            TIMEOUT_S,
        )
        calls.send(reset(number))
        calls.ping()


@pytest.mark.parametrize("how", ["reset", "leave"])
def test_streams_whose_responses_are_not_read(server: OperatedServer, how: str) -> None:
    for name in ("many", "act", "chain"):
        with Wire(server.addresses["gRPC"], Peer(window=0)) as wire:
            head = [(":path", STREAM) if one[0] == ":path" else one for one in GRPC]
            wire.send(wire.peer.headers(1, head))
            body = frame(message(name, 1, 12_000, raw=raw(ECHOED, 12_000)).SerializeToString())
            for at in range(0, len(body), 16384):
                wire.send(data(1, body[at : at + 16384]))
            wire.read_until(lambda: 1 in wire.peer.responses)
            if how == "reset":
                wire.send(reset(1))
                wire.ping()


# ---- HTTP -----------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(server: OperatedServer) -> Iterator[socket.socket]:
    host, port = server.addresses["HTTP"].split(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as sock:
        yield sock


def binary(name: str = "act", how: int = ECHOED, /, tail: bytes = b"", **changes: Any) -> tuple[bytes, bytes]:
    """The head of a request and its body, with a tensor in binary."""
    described = {**sized(4 * FLOATS, shape=[1, FLOATS]), **changes}
    text = json.dumps({"inputs": [described]}).encode()
    length = {"Inference-Header-Content-Length": str(len(text))}
    return post(f"/v2/models/{name}/infer", text + raw(how) + tail, length)


def plain(name: str = "act", how: int = ECHOED, **changes: Any) -> tuple[bytes, bytes]:
    """The same as JSON."""
    described = entry(**{"shape": [1, FLOATS], "data": [float(how)] * FLOATS, **changes})
    return post(f"/v2/models/{name}/infer", json.dumps({"inputs": [described]}).encode(), {})


def post(path: str, body: bytes, headers: dict[str, str]) -> tuple[bytes, bytes]:
    named = {"Host": "x", "Content-Length": str(len(body)), **headers}
    lines = [f"POST {path} HTTP/1.1", *[f"{name}: {value}" for name, value in named.items()]]
    return "\r\n".join([*lines, "", ""]).encode(), body


def headed(request: tuple[bytes, bytes], line: str) -> tuple[bytes, bytes]:
    """A request with one header more."""
    return request[0][:-2] + line.encode() + b"\r\n\r\n", request[1]


def coded(request: tuple[bytes, bytes], body: bytes, coding: str) -> tuple[bytes, bytes]:
    """A request with another body, in this coding."""
    head = [one for one in request[0].split(b"\r\n") if not one.startswith(b"Content-Length")]
    more = [f"Content-Length: {len(body)}".encode(), b"Content-Encoding: " + coding.encode()]
    return b"\r\n".join([*head[:-2], *more, b"", b""]), body


def chunked(request: tuple[bytes, bytes], end: bytes = b"0\r\n\r\n") -> tuple[bytes, bytes]:
    head = [one for one in request[0].split(b"\r\n") if not one.startswith(b"Content-Length")]
    parts = [request[1][at : at + 50_000] for at in range(0, len(request[1]), 50_000)]
    body = b"".join([b"%x\r\n%s\r\n" % (len(part), part) for part in parts]) + end
    return b"\r\n".join([*head[:-2], b"Transfer-Encoding: chunked", b"", b""]), body


def http_requests() -> dict[str, tuple[bytes, bytes]]:
    """Requests, right and wrong."""
    good = binary()
    generated = json.dumps({"x": [[0.0] * 4]}).encode()
    return {
        **{f"binary {how}": binary("act", how) for how in (ECHOED, RAISES, MISFITS, KEPT, SLOW, ASKS)},
        **{f"plain {how}": plain("act", how) for how in (ECHOED, RAISES, MISFITS, KEPT)},
        **{f"chain {how}": binary("chain", how) for how in (ECHOED, RAISES)},
        "model": binary("nobody"),
        "version": binary("act/versions/9"),
        "decoupled": binary("many"),
        "shape": binary(shape=[1, FLOATS + 1]),
        "rank": binary(shape=[FLOATS]),
        "rows": binary(shape=[64, FLOATS // 64]),
        "datatype": binary(datatype="INT32"),
        "name": binary(name="w"),
        "surplus": binary(tail=b"x"),
        "forwarded": headed(good, "priority: 1"),
        "plain, forwarded": headed(plain(), "priority: 1"),
        "plain, shape": plain(shape=[1, 3]),
        "plain, broken": post("/v2/models/act/infer", plain()[1][:-2] + b"!!", {}),
        "header length": headed(good, "Inference-Header-Content-Length: 9"),
        "chunked": chunked(good),
        "chunked, forwarded": headed(chunked(good), "priority: 1"),
        "chunked, broken": chunked(good, b"zz\r\n"),
        "chunked, surplus": chunked(binary(tail=bytes(9))),
        "too large": post("/v2/models/act/infer", bytes(LIMIT_NBYTES + 1), {}),
        "gzip": coded(good, gzip.compress(good[1]), "gzip"),
        "deflate": coded(plain(), zlib.compress(plain()[1]), "deflate"),
        "gzip, forwarded": headed(coded(good, gzip.compress(good[1]), "gzip"), "priority: 1"),
        "gzip, broken": coded(good, gzip.compress(good[1])[:-20] + bytes(20), "gzip"),
        "gzip, cut": coded(good, gzip.compress(os.urandom(MIB))[:-9], "gzip"),
        "gzip, bomb": coded(good, gzip.compress(good[1] + bytes(8 * LIMIT_NBYTES), 1), "gzip"),
        "coding": coded(good, good[1], "br"),
        "compressed answer": headed(good, "Accept-Encoding: gzip"),
        "generate": post("/v2/models/act/generate", generated, {}),
        "generate, large": post("/v2/models/act/generate", json.dumps({"x": [[0.0] * FLOATS]}).encode(), {}),
        "generate, broken": post("/v2/models/act/generate", b"{" * 70_000, {}),
        "generate_stream": post("/v2/models/many/generate_stream", generated, {}),
    }


def infer(server: OperatedServer, name: str, how: int) -> None:
    head, body = binary(name, how)
    with connected(server) as sock:
        sock.sendall(head + body)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")


def http_status(server: OperatedServer, path: str) -> int:
    connection = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
    connection.request("POST", path, b"{}")
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("how", ["read", "leave", "abort"])
def test_http_requests_that_come_whole(server: OperatedServer, how: str) -> None:
    for head, body in http_requests().values():
        with connected(server) as sock:
            if how == "abort":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(ConnectionError):
                sock.sendall(head + body)
                if how == "read":
                    assert sock.recv(65536).startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize("request_", [binary(), plain(), chunked(binary()), headed(binary(), "priority: 1")])
@pytest.mark.parametrize("how", ["leave", "abort"])
def test_http_requests_that_are_cut(server: OperatedServer, how: str, request_: tuple[bytes, bytes]) -> None:
    head, body = request_
    for cut in CUTS:
        with connected(server) as sock:
            if how == "abort":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(head + body[:cut])


def test_http_answers_that_are_not_read(server: OperatedServer) -> None:
    """Of requests one after the other on one connection."""
    for head, body in (binary(), plain(), post("/v2/models/many/generate_stream", b'{"x": [[0.0]]}', {})):
        with connected(server) as sock:
            sock.settimeout(0.3)
            with contextlib.suppress(TimeoutError):
                for _ in range(40):
                    sock.sendall(head + body)
