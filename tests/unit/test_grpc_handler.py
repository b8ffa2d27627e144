"""The gRPC handler on a connection: the path and the outcome of a call."""

from __future__ import annotations

import asyncio
import gzip
import logging
import urllib.parse
from typing import Any, Final

import numpy as np
import pytest
from handler_scene import LIMIT_NBYTES, ServiceScene
from http2_peer import POST, Response, data, reset
from http2_scene import Talk
from hypothesis import example, given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from gpuserve.config.settings.server import AccessRule
from gpuserve.front.protocols.access import body_decoding as offload
from gpuserve.front.protocols.access.authorization import AccessPolicy
from gpuserve.front.protocols.grpc import grpc_protocol, model_infer, model_stream_infer, unary_rpcs
from gpuserve.front.protocols.grpc.grpc_handler import GrpcHandler
from gpuserve.front.protocols.grpc.grpc_protocol import MAX_MESSAGE_NBYTES, Unframer, frame, grpc_message
from gpuserve.front.protocols.grpc.reflection import METHODS as REFLECTION

SERVICE: Final = "/inference.GRPCInferenceService/"
TE: Final = ("te", "trailers")
CLOSED: Final = AccessPolicy([AccessRule(("inference", "health"), "right", "token")])


class House(ServiceScene):
    """A gRPC handler with the model "m"."""

    def __init__(self, policy: AccessPolicy | None = None, compression: str = "none") -> None:
        super().__init__()
        self.handler = GrpcHandler(self.service, self.requests, LIMIT_NBYTES, policy, None, compression)
        self.talk = Talk(handler=self.handler.accept)
        self._last_id = -1

    def call(
        self, path: str, body: bytes | None, *fields: tuple[str, str], te: bool = True, end: bool = True
    ) -> Response:
        """Make a call, whose body is in one frame, if there is one."""
        self._last_id += 2
        kept = [one for one in POST if one[0] != ":path" and (te or one != TE)]
        head = [kept[0], kept[1], (":path", path), *kept[2:], *fields]
        sent = self.talk.peer.headers(self._last_id, head, end=end and body is None)
        self.talk.feed(sent + (b"" if body is None else data(self._last_id, body, end=end)))
        return self.talk.peer.response(self._last_id)

    def feed(self, body: bytes, *, end: bool = False) -> None:
        """More of the body of the last call."""
        self.talk.feed(data(self._last_id, body, end=end))

    def leave(self) -> None:
        """The client gives the last call up."""
        self.talk.feed(reset(self._last_id))

    async def settle(self) -> None:
        for _ in range(3):
            await self.scene.settle()
        self.talk.read()

    async def __aenter__(self) -> House:
        return self


def message(rows: int = 1) -> bytes:
    """A request for the model."""
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=[rows, 1])
    request.raw_input_contents.append(np.zeros((rows, 1), np.float32).tobytes())
    encoded: bytes = request.SerializeToString()
    return encoded


def framed(body: bytes) -> bytes:
    return frame(len(body)) + body


def packed(body: bytes) -> bytes:
    small = gzip.compress(body)
    return b"\1" + len(small).to_bytes(4) + small


def status(response: Response) -> int:
    """The status of a call, in its trailers or in its only head."""
    return int(dict(response.heads[-1])["grpc-status"])


def said(response: Response) -> str:
    return dict(response.heads[-1])["grpc-message"]


def answered(response: Response, encoding: str = "") -> Any:
    (body,) = Unframer(LIMIT_NBYTES, encoding).feed(response.body)
    return pb.ModelInferResponse.FromString(body)


# ---- one way of inference -----------------------------------------------------------------------

WAYS: Final[dict[str, Any]] = {
    "open": ((), ()),
    "guarded": ((CLOSED,), (("token", "right"),)),
    "packed": ((), (("grpc-encoding", "gzip"),)),
    "unpackable": ((None, "high"), (("grpc-accept-encoding", "identity"),)),
    "small for those who could unpack it": ((None, "high"), (("grpc-accept-encoding", "gzip"),)),
}


@pytest.mark.parametrize("way", WAYS)
async def test_inference_needs_no_task_and_is_answered_in_its_turn(way: str) -> None:
    made, fields = WAYS[way]
    async with House(*made) as house:
        body = packed(message()) if way == "packed" else framed(message())
        for _ in range(2):  # the second has a head that is known
            response = house.call(unary_rpcs.MODEL_INFER, body, *fields)
            assert house.requests.tasks == set()
            await house.answer()
            assert status(response) == 0
            assert answered(response).model_name == "m"
            assert "grpc-encoding" not in dict(response.heads[0])
        failed = house.call(unary_rpcs.MODEL_INFER, body, *fields)
        await house.answer(well=False)
        assert (status(failed), failed.body) == (13, b"")


@pytest.mark.parametrize("thread_nbytes", [1, 16 << 10])
@pytest.mark.parametrize("packs", [True, False])
async def test_large_messages_are_packed_and_unpacked_beside_the_loop(
    thread_nbytes: int, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "THREAD_NBYTES", thread_nbytes)
    for module in (grpc_protocol, model_infer):
        monkeypatch.setattr(module, "COMPRESSED_NBYTES", 1)
    async with House(None, "high") as house:
        body = packed(message(4)) if packs else framed(message(4))
        fields = [("grpc-encoding", "gzip")] if packs else []
        response = house.call(
            unary_rpcs.MODEL_INFER, body[:9], *fields, ("grpc-accept-encoding", "deflate, gzip"), end=False
        )
        house.feed(body[9:], end=True)
        while not response.ended:
            await house.answer()
            await asyncio.to_thread(lambda: None)
        assert dict(response.heads[0]).get("grpc-encoding") == "gzip", response.heads
        assert response.body[0] in (0, 1)
        assert list(answered(response, "gzip").outputs[0].shape) == [4, 1]


async def test_a_client_that_leaves_a_full_stream_cancels_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_stream_infer, "MAX_PENDING_NBYTES", 1)
    async with House() as house:
        house.call(unary_rpcs.MODEL_STREAM_INFER, packed(message()) * 3, ("grpc-encoding", "gzip"), end=False)
        await house.settle()
        assert house.scene.driver.unfinished == 1  # the others are not even unpacked
        house.leave()
        await house.settle()
        assert (house.requests.tasks, house.scene.metrics.outcomes.cancellations) == (set(), 1)


# ---- other calls --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "te", "code"),
    [
        (unary_rpcs.MODEL_INFER, False, 3),
        (unary_rpcs.HEALTH_WATCH, False, 3),
        (SERVICE + "NoSuchMethod", True, 12),
        (SERVICE + "NoSuchMethod", False, 12),
    ],
)
async def test_calls_that_cannot_be_served_are_told_why_at_their_end(path: str, te: bool, code: int) -> None:
    async with House() as house:
        response = house.call(path, b"\0\0", te=te, end=False)
        assert not response.heads
        house.feed(b"\0\0\0", end=True)
        assert status(response) == code
        assert ("'te: trailers'" in said(response)) is (code == 3)


@pytest.mark.parametrize(
    "path",
    [
        SERVICE + "ServerLive",
        unary_rpcs.HEALTH_CHECK,
        unary_rpcs.HEALTH_WATCH,
        unary_rpcs.MODEL_STREAM_INFER,
        *REFLECTION,
    ],
)
@pytest.mark.parametrize("body", [None, framed(b"")])
async def test_a_departed_client_is_no_defect(
    path: str, body: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with House() as house:
        house.call(path, body, end=False)
        await house.settle()
        house.leave()
        await house.settle()
        assert house.requests.tasks == set()
    assert caplog.records == []


async def test_a_method_is_named_as_it_is() -> None:
    async with House() as house:
        for path in (SERVICE + "Model%49nfer", SERVICE.replace("/i", "/%69") + "ServerLive"):
            assert status(house.call(path, framed(b""))) == 12


@given(st.sampled_from([1, 100, 2000]), st.text(min_size=1))
@example(1, "x" * 7168)
@example(2000, "x€🙂")
def test_the_text_of_an_error_is_cut_between_characters(times: int, text: str) -> None:
    text *= times
    encoded = grpc_message(text)
    assert len(encoded) <= MAX_MESSAGE_NBYTES
    told = urllib.parse.unquote(encoded.decode(), errors="strict")
    assert text.startswith(told)
    assert told == text or len(encoded) > MAX_MESSAGE_NBYTES / 2
