"""Responses compressed for the clients that can read it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.errors import ConfigError
from gpuserve.front.endpoint.asgi import MODEL_INFER
from gpuserve.front.endpoint.grpc_compression import CompressedInference, FrameCompressor, coding_for
from gpuserve.front.endpoint.grpc_framing import Unframer, frame
from gpuserve.server import Server

LONG = b"a" * 10_000


def framed(*messages: bytes) -> bytes:
    return b"".join(frame(len(one)) + one for one in messages)


def answer(accepted: bytes, events: list[dict[str, Any]], path: str = MODEL_INFER) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def door(scope: Any, receive: Any, send: Any) -> None:
        for event in events:
            await send(event)

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing is read here")

    scope = {"path": path, "headers": [(b"grpc-accept-encoding", accepted)]}
    asyncio.run(CompressedInference(door, "high")(scope, receive, send))
    return sent


EVENTS: list[dict[str, Any]] = [
    {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")], "trailers": True},
    {"type": "http.response.body", "body": framed(LONG)[:7000], "more_body": True},
    {"type": "http.response.body", "body": memoryview(framed(LONG))[7000:], "more_body": True},
    {"type": "http.response.body", "body": b"", "more_body": False},
    {"type": "http.response.trailers", "headers": [(b"grpc-status", b"0")]},
]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_response_is_compressed_whole(coding: str) -> None:
    sent = answer(f"identity,{coding}".encode(), EVENTS)
    assert sent[0]["headers"] == [(b"a", b"b"), (b"grpc-encoding", coding.encode())]
    body = b"".join(event["body"] for event in sent[1:4])
    assert len(body) < 200
    assert body[0] == 1
    assert Unframer(1 << 20, coding).feed(body) == [LONG]
    assert sent[4] == EVENTS[4]


def test_an_error_without_a_message_names_no_coding() -> None:
    refused = {"type": "http.response.start", "status": 200, "headers": [(b"grpc-status", b"3")]}
    assert answer(b"gzip", [refused]) == [refused]


@pytest.mark.parametrize(("accepted", "path"), [(b"identity, br", MODEL_INFER), (b"gzip", "/x.Health/Check")])
def test_who_cannot_read_it_and_other_methods(accepted: bytes, path: str) -> None:
    assert answer(accepted, EVENTS, path) == EVENTS


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ([b"identity,deflate,gzip"], "gzip"),
        ([b"deflate , identity"], "deflate"),
        ([b"deflate", b"gzip"], "gzip"),
        ([b"br"], ""),
        ([b""], ""),
        ([], ""),
    ],
)
def test_gzip_goes_before_deflate(accepted: list[bytes], coding: str) -> None:
    assert coding_for([(b"grpc-accept-encoding", one) for one in accepted]) == coding


@given(
    st.lists(st.binary(max_size=300) | st.just(LONG), max_size=5), st.lists(st.integers(1, 400), max_size=40)
)
def test_messages_survive_any_cut(messages: list[bytes], cuts: list[int]) -> None:
    data, compressor, out = framed(*messages), FrameCompressor("gzip", 6), b""
    for cut in cuts:
        out += compressor.feed(data[:cut])
        data = data[cut:]
    out += compressor.feed(data)
    assert Unframer(1 << 20, "gzip").feed(out) == messages


def test_what_does_not_get_smaller_goes_as_it_is() -> None:
    short, noise = b"short", bytes(range(256))
    assert FrameCompressor("gzip", 9).feed(framed(short, noise)) == framed(short, noise)


def test_a_level_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="grpc_response_compression must be one of none, low"):
        Server(grpc_response_compression="most")
