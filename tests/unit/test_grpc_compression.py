"""Messages compressed for the clients that can read it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.api.server import Server
from gpuserve.core.errors import ConfigError
from gpuserve.front.protocols.grpc.grpc_protocol import (
    COMPRESSED_NBYTES,
    Unframer,
    compress_messages,
    frame,
    response_coding,
)

LONG = b"a" * 10_000


def framed(*messages: bytes) -> bytes:
    return b"".join(frame(len(one)) + one for one in messages)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_message_is_compressed_whole(coding: str) -> None:
    packed = compress_messages(coding, 9, [framed(LONG)])
    assert len(packed) < 200
    assert packed[0] == 1
    assert Unframer(1 << 20, coding).feed(packed) == [LONG]


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
    assert response_coding([(b"grpc-accept-encoding", one) for one in accepted]) == coding


@given(st.lists(st.binary(max_size=300) | st.just(LONG), max_size=5))
def test_any_number_of_messages(messages: list[bytes]) -> None:
    packed = compress_messages("gzip", 6, [framed(*messages)])
    assert Unframer(1 << 20, "gzip").feed(packed) == messages


def test_what_does_not_get_smaller_goes_as_it_is() -> None:
    noise = random.Random(1).randbytes(COMPRESSED_NBYTES)
    assert compress_messages("gzip", 9, [framed(noise)]) == framed(noise)


def test_what_is_one_packet_either_way_goes_as_it_is() -> None:
    under, least = LONG[: COMPRESSED_NBYTES - 1], LONG[:COMPRESSED_NBYTES]
    packed = compress_messages("gzip", 1, [framed(under, least)])
    assert packed.startswith(framed(under))
    assert len(packed) < len(framed(under)) + 100


def test_a_level_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="grpc_response_compression must be one of 'none', 'low'"):
        Server(grpc_response_compression="most")
