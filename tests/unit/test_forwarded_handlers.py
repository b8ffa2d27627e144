"""The front's HTTP and gRPC handlers behind an ingress process that forwards every request: a client gets the
same bytes as without the forwarding.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

import http1_talk
import http2_scene
import pytest
from handler_scene import LIMIT_NBYTES, ServiceScene
from http1_talk import CHUNKED, post
from http2_peer import POST, data, reset
from ipc_scene import FrontSink, Way

from gpuserve.config.settings.values import header_pattern
from gpuserve.core.errors import InvalidArgument
from gpuserve.front.net.exchange import AnswerHead, Exchange, Head, RequestHandler
from gpuserve.front.net.http1_protocol import UNCONSUMED_NBYTES
from gpuserve.front.net.http2_streams import RECEIVE_WINDOW
from gpuserve.front.protocols.access.authorization import AccessPolicy
from gpuserve.front.protocols.access.header_forwarding import HeaderForwarding, header_forwarding
from gpuserve.front.protocols.grpc import unary_rpcs
from gpuserve.front.protocols.grpc.grpc_handler import GrpcHandler
from gpuserve.front.protocols.grpc.grpc_protocol import frame
from gpuserve.front.protocols.http.http_handler import HttpHandler
from gpuserve.front.protocols.router import RequestRouter
from gpuserve.front.requests.inference import InferRequest

MIB: Final = 1 << 20
INFER: Final = b"POST /v2/models/m/infer HTTP/1.1"
BODY: Final = b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[1]}]}'
GENERATE: Final = b"POST /v2/models/m/generate_stream HTTP/1.1"
SERVICE: Final = "/inference.GRPCInferenceService/"
DATE: Final = re.compile(rb"date: [^\r]*\r\n")
WAYS: Final = ("direct", "forwarded")


class House(ServiceScene):
    """The HTTP and gRPC handlers of a front with the model "m", and the IPC channel to the front."""

    def __init__(self) -> None:
        super().__init__()
        http = HttpHandler(self.service, self.requests, LIMIT_NBYTES, AccessPolicy())
        self.accept: RequestHandler = RequestRouter(
            GrpcHandler(self.service, self.requests, LIMIT_NBYTES), http
        ).accept
        self.way = Way(self.accept)

    def accept_by(self, way: str) -> RequestHandler:
        return self.way.forwarding.accept if way == "forwarded" else self.accept

    async def settle(self) -> None:
        """Run everything that is due, also in the threads that write pages."""
        for _ in range(4):
            await self.way.settle()
            await self.scene.settle()
            for worker in self.scene.workers:
                while worker.runs:
                    worker.answer([True])
            await asyncio.to_thread(lambda: None)

    async def __aenter__(self) -> House:
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                await self.settle()
                assert (self.way.forwarding.n_open, self.way.forwarded.n_open) == (0, 0)
        finally:
            await self.requests.stop()
            self.way.close()
            self.scene.close()


# ---- the same as without ------------------------------------------------------------------------


def get(path: bytes, fields: bytes = b"", method: bytes = b"GET") -> bytes:
    return b"%b %b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (method, path, fields)


HTTP1: Final = {
    "ready": get(b"/v2/health/ready"),
    "metadata": get(b"/v2"),
    "model": get(b"/v2/models/m"),
    "config": get(b"/v2/models/%6d/config?q"),
    "page": get(b"/docs"),
    "large": get(b"/openapi.json"),
    "closes": get(b"/v2", b"Connection: close\r\n"),
    "1.0": b"GET /v2 HTTP/1.0\r\n\r\n",
    "not found": get(b"/nothing"),
    "method": get(b"/v2", method=b"DELETE"),
    "head": get(b"/v2/health/live", method=b"HEAD"),
    "foreign": b"GET /v2 HTTP/1.1\r\nHost: elsewhere.org\r\n\r\n",
    "proxied": post(b"{}", b"X-Forwarded-For: 1.2.3.4\r\n", b"POST /v2/logging HTTP/1.1"),
    "logging": post(b"{}", line=b"POST /v2/logging HTTP/1.1"),
    "index": post(b"", line=b"POST /v2/repository/index HTTP/1.1"),
    "region": post(b"{}", line=b"POST /v2/systemsharedmemory/region/r/register HTTP/1.1"),
    "infer": post(BODY, line=INFER),
    "no infer": post(b"{", line=INFER),
    "chunks": CHUNKED.replace(b"/b", b"/v2/models/m/infer") + b"44\r\n" + BODY + b"\r\n0\r\n\r\n",
    "too large": post(bytes(LIMIT_NBYTES + 1), line=INFER),
    "coding": post(BODY, b"Content-Encoding: br\r\n", INFER),
    "generate": post(b"{}", line=GENERATE),
    "none": b"no request\r\n\r\n",
}


@pytest.mark.parametrize("name", HTTP1)
@pytest.mark.parametrize("cuts", [(), (30, 90, 110)], ids=["whole", "cut"])
async def test_a_client_of_http1_sees_no_difference(name: str, cuts: tuple[int, ...]) -> None:
    async with House() as house:
        seen = {}
        for way in WAYS:
            talk = http1_talk.Talk(handler=house.accept_by(way))
            for _ in range(2):  # the second has a head that is known
                if not talk.way.said:
                    talk.feed(HTTP1[name], (*cuts, *range(0, len(HTTP1[name]), 256 << 10)))
                await house.settle()
            seen[way] = DATE.sub(b"", talk.way.raw), talk.way.said
        assert seen["forwarded"] == seen["direct"]
        assert seen["direct"][0]


GRPC: Final = {
    "live": (SERVICE + "ServerLive", b""),
    "metadata": (SERVICE + "ModelMetadata", b"\x0a\x01m"),
    "config": (SERVICE + "ModelConfig", b"\x0a\x01m"),
    "no model": (SERVICE + "ModelMetadata", b"\x0a\x01n"),
    "no message": (SERVICE + "ModelMetadata", b"\xff"),
    "unknown": (SERVICE + "Nothing", b""),
    "region": (unary_rpcs.SYSTEM_REGISTER, b""),
    "infer": (unary_rpcs.MODEL_INFER, b"\x0a\x01m"),
    "stream": (unary_rpcs.MODEL_STREAM_INFER, b"\x0a\x01m"),
    "health": ("/grpc.health.v1.Health/Check", b""),
    "reflection": ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", b"\x3a\x00"),
}


@pytest.mark.parametrize("name", GRPC)
async def test_a_client_of_grpc_sees_no_difference(name: str) -> None:
    path, message = GRPC[name]
    fields = [field for field in POST if field[0] != ":path"]
    async with House() as house:
        seen = {}
        for way in WAYS:
            talk = http2_scene.Talk(handler=house.accept_by(way))
            for stream_id in (1, 3):
                head = talk.peer.headers(stream_id, [*fields[:1], (":path", path), *fields[1:]])
                talk.feed(head + data(stream_id, frame(len(message)) + message, end=True))
                await house.settle()
            talk.read()
            answers = [talk.peer.response(one) for one in (1, 3)]
            assert all(one.ended for one in answers)
            seen[way] = [(one.heads, one.body, one.reset) for one in answers]
        assert seen["forwarded"] == seen["direct"]


@pytest.mark.parametrize("name", ["live", "region", "infer", "stream"])
async def test_a_cancelled_call_leaves_nothing(name: str) -> None:
    path, message = GRPC[name]
    fields = [field for field in POST if field[0] != ":path"]
    async with House() as house:
        talk = http2_scene.Talk(handler=house.accept_by("forwarded"))
        for stream_id in (1, 3):
            head = talk.peer.headers(stream_id, [*fields[:1], (":path", path), *fields[1:]])
            talk.feed(head + data(stream_id, (frame(len(message)) + message)[:-1]))
            await house.settle()
        talk.feed(b"".join(reset(one) for one in (1, 3)))
        await house.settle()
        assert house.requests.tasks == set()


# ---- large bodies -------------------------------------------------------------------------------


class Upload:
    """A body of 64 MiB for a receiver that consumes data when a test says so."""

    def __init__(self) -> None:
        self.sinks: list[FrontSink] = []
        self.way = Way(self._accept)
        self.n_sent = 0
        self._n_consumed = 0

    def _accept(self, exchange: Exchange) -> FrontSink:
        self.sinks.append(FrontSink(exchange))
        return self.sinks[-1]

    async def goes(self, feed: Callable[[bytes], object], may_send: Callable[[], int]) -> int:
        """Send as much as flow control permits; return the most bytes sent before any was consumed."""
        most = 0
        while self.n_sent < 64 * MIB:
            before = self.n_sent
            while (room := min(may_send(), 256 << 10, 64 * MIB - self.n_sent)) > 0:
                feed(bytes(room))
                self.n_sent += room
            most = max(most, self.n_sent - before)
            await self.way.settle()
            (sink,) = self.sinks
            assert len(sink.body) == self.n_sent, "it has stopped before its time"
            sink.exchange.consumed(self.n_sent - self._n_consumed)
            self._n_consumed = self.n_sent
            await self.way.settle()
        return most


async def test_a_large_body_of_http1_waits_at_its_client() -> None:
    upload = Upload()
    talk = http1_talk.Talk(handler=upload.way.forwarding.accept)
    talk.feed(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (64 * MIB))
    most = await upload.goes(talk.feed, lambda: MIB if talk.way.reading else 0)
    assert most <= UNCONSUMED_NBYTES + (256 << 10)
    upload.sinks[0].exchange.answer(AnswerHead(200, ()), (b"ok",), 2)
    await upload.way.settle()
    assert talk.way.sent.endswith(b"ok")
    upload.way.close()


async def test_a_large_body_of_http2_waits_at_its_client() -> None:
    upload = Upload()
    talk = http2_scene.Talk(handler=upload.way.forwarding.accept)
    talk.feed(talk.peer.headers(1))
    await upload.way.settle()

    def may_send() -> int:
        talk.read()
        return RECEIVE_WINDOW + talk.peer.send_windows.get(1, 0) - upload.n_sent

    most = await upload.goes(lambda body: talk.feed(data(1, body)), may_send)
    assert most <= RECEIVE_WINDOW
    talk.feed(data(1, b"", end=True))
    upload.sinks[0].exchange.start(200, (), end=True)
    await upload.way.settle()
    talk.read()
    assert talk.peer.response(1).status == "200"
    upload.way.close()


# ---- forwarding ------------------------------------------------------------------------------


def forwarded(pattern: str, *headers: tuple[bytes, bytes]) -> dict[str, str]:
    return HeaderForwarding(pattern).parameters(headers)


def head(*headers: tuple[bytes, bytes]) -> Head:
    return Head("POST", b"/", headers, "2", None)


def test_without_a_pattern_nobody_looks() -> None:
    assert header_forwarding("") is None
    assert isinstance(header_forwarding("x"), HeaderForwarding)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("user", ["user", "x-user-id"]), ("^user$", ["user"]), ("X-USER", ["x-user-id"]),
        ("(?-i)X-USER", []), ("(?-i)x-user", ["x-user-id"]), ("a|tag", ["tag"]),
        (".*", ["user", "x-user-id", "tag"]),
    ],
)  # fmt: skip
def test_the_pattern_is_searched_in_lower_case_names(pattern: str, names: list[str]) -> None:
    headers = [(b"user", b"1"), (b"X-User-Id", b"2"), (b"tag", b"3")]
    assert list(forwarded(pattern, *headers)) == names


def test_values_are_text_and_repeated_headers_are_joined() -> None:
    headers = [(b"x-a", b"1"), (b"x-b", b"caf\xe9"), (b"x-a", b"2")]
    assert forwarded("x-", *headers) == {"x-a": "1, 2", "x-b": "café"}


@pytest.mark.parametrize(
    "name",
    [
        *("te", "host", "content-type", "content-length", "grpc-timeout", ":path", "trace-bin"),
        *("triton-access-token", "triton-grpc-protocol-triton-access-token", "x" * 257),
    ],
)
def test_headers_that_are_never_forwarded(name: str) -> None:
    assert forwarded(".*", (name.encode(), b"v"), (b"x", b"1")) == {"x": "1"}


@pytest.mark.parametrize("name", ["timeout", "priority", "Sequence_Id", "binary_data_output", "triton_x"])
def test_reserved_names_are_refused_only_where_they_match(name: str) -> None:
    header = (name.encode(), b"v")
    with pytest.raises(
        InvalidArgument,
        match=f"^header '{name.lower()}' has the name of a parameter and cannot be forwarded$",
    ):
        forwarded(".*", header)
    assert forwarded("^other$", header) == {}


def test_a_header_stands_over_a_parameter_of_the_body() -> None:
    request = InferRequest("m", "", "", {"user": "forged", "n": 1}, [], (), None)
    HeaderForwarding("user").add_to(request, head((b"user", b"ann")))
    assert request.parameters == {"user": "ann", "n": 1}


def test_requests_of_one_head_share_its_parameters_unless_they_have_their_own() -> None:
    shared, forwarding = head((b"user", b"ann")), HeaderForwarding("user")
    first, second, third = (InferRequest("m", "", "", own, [], (), None) for own in ({}, {}, {"n": 1}))
    for one in (first, second, third):
        forwarding.add_to(one, shared)
    assert first.parameters is second.parameters
    assert (second.parameters, third.parameters) == ({"user": "ann"}, {"n": 1, "user": "ann"})


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"expected a regular expression, given '\('"):
        header_pattern("(")
