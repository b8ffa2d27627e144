"""gRPC's framing of messages, and the replies of the small RPCs."""

from __future__ import annotations

import gzip
import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from gpuserve.api.server import Server
from gpuserve.core.errors import ConfigError, InvalidArgument, RequestError, ResourceExhausted, Unimplemented
from gpuserve.front.protocols.grpc import unary_rpcs
from gpuserve.front.protocols.grpc.grpc_protocol import (
    COMPRESSED_NBYTES,
    Unframer,
    check_encoding,
    compress_messages,
    frame,
    response_coding,
    unary_message,
)

LIMIT = 1 << 20


def compressed(plain: bytes, encoding: str) -> bytes:
    packed = gzip.compress(plain) if encoding == "gzip" else zlib.compress(plain)
    return struct.pack(">BI", 1, len(packed)) + packed


@given(st.lists(st.tuples(st.binary(max_size=40), st.booleans()), max_size=6), st.data())
def test_messages_come_out_of_any_cut(messages: list[tuple[bytes, bool]], data: st.DataObject) -> None:
    parts = [compressed(one, "gzip") if packed else frame(len(one)) + one for one, packed in messages]
    body = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    unframer = Unframer(LIMIT, "gzip")
    got = []
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        got += unframer.feed(body[start:end])
    unframer.finish()
    assert got == [plain for plain, _ in messages]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_unary_message_is_unpacked(encoding: str) -> None:
    assert unary_message(compressed(b"abc" * 100, encoding), LIMIT, encoding) == b"abc" * 100


def test_an_uncompressed_unary_message_is_taken_as_it_is() -> None:
    assert unary_message(frame(3) + b"abc", LIMIT, "gzip") == b"abc"
    assert unary_message(frame(0), LIMIT) == b""


@pytest.mark.parametrize(
    ("body", "encoding", "error", "sentence"),
    [
        (b"", "", InvalidArgument, "truncated: expected 5 bytes, got 0"),
        (frame(4) + b"abc", "", InvalidArgument, "truncated: expected 9 bytes, got 8"),
        (frame(2) + b"abc", "", InvalidArgument, "goes on after its message"),
        (frame(0) + frame(0), "", InvalidArgument, "goes on after its message"),
        (b"\2\0\0\0\0", "", InvalidArgument, "flag of 0 or 1, got 2"),
        (b"\1\0\0\0\0", "", InvalidArgument, "names no grpc-encoding"),
        (compressed(b"abc", "deflate"), "gzip", InvalidArgument, "it is not gzip data"),
        (
            b"\1\0\0\0\4" + gzip.compress(b"abc")[:4],
            "gzip",
            InvalidArgument,
            "gzip data of the request body is truncated",
        ),
        (frame(LIMIT + 1), "", ResourceExhausted, f"{LIMIT + 1} bytes is over the limit of {LIMIT} bytes"),
        (compressed(bytes(LIMIT + 1), "gzip"), "gzip", ResourceExhausted, "after decompression"),
        (frame(0), "snappy", Unimplemented, "grpc-encoding 'snappy' is not supported"),
    ],
)
def test_wrong_framing(body: bytes, encoding: str, error: type[RequestError], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        unary_message(body, LIMIT, encoding)


def test_decompression_may_reach_the_limit() -> None:
    assert unary_message(compressed(bytes(LIMIT), "gzip"), LIMIT, "gzip") == bytes(LIMIT)


@pytest.mark.parametrize(("body", "expected"), [(b"\0\0", 5), (frame(3) + b"ab", 8)])
def test_a_stream_that_ends_in_a_message_is_refused(body: bytes, expected: int) -> None:
    unframer = Unframer(LIMIT)
    assert unframer.feed(body) == []
    with pytest.raises(InvalidArgument, match=f"expected {expected} bytes, got {len(body)}"):
        unframer.finish()


def test_no_encoding_named_is_identity() -> None:
    assert check_encoding("") == "identity"


@pytest.mark.parametrize("serving", [True, False])
def test_health_is_the_message_of_the_health_protocol(serving: bool) -> None:
    # Field 1, an enum: SERVING is 1 and NOT_SERVING is 2. An int64 field 1 reads the same bytes.
    read = pb.InferParameter.FromString(b"\x10" + unary_rpcs.health_message(serving)[1:])
    assert read.int64_param == (1 if serving else 2)
    assert unary_rpcs.health_message(serving)[0] == 1 << 3


# ---- grpc compression ------------------------------------------------------------------------


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
        ([b"identity,deflate,gzip"], "gzip"), ([b"deflate , identity"], "deflate"),
        ([b"deflate", b"gzip"], "gzip"), ([b"br"], ""), ([b""], ""), ([], ""),
    ],
)  # fmt: skip
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
