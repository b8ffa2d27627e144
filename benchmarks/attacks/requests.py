"""What clients ask the echo model, right or as an attacker does. Values in, bytes out."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.cli.bench import http2_client as http2
from gpuserve.front.protocols.grpc.infer_encoder import varint

SERVICE: Final = "/inference.GRPCInferenceService/"
MODEL: Final = "echo"
MIB: Final = 1 << 20
_CLAIMED_NBYTES: Final = 1 << 30
_RAW_INPUTS: Final = b"\x3a"
_AT_ONCE: Final = 400


def message(n_values: int, with_data: bool = True, first: float = 0.0) -> bytes:
    """Return a ModelInferRequest of so many floats, of which all but the first are 0."""
    request = pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="x", datatype="FP32", shape=[1, n_values])
    if with_data:
        request.raw_input_contents.append(struct.pack("<f", first) + bytes(4 * (n_values - 1)))
    encoded: bytes = request.SerializeToString()
    return encoded


def framed(body: bytes, compressed: bool = False) -> bytes:
    return bytes((compressed,)) + len(body).to_bytes(4) + body


def claim() -> bytes:
    """The first bytes of a message whose tensor, it says, has a GiB."""
    begun = message(_CLAIMED_NBYTES // 4, with_data=False) + _RAW_INPUTS + varint(_CLAIMED_NBYTES)
    return b"\0" + (len(begun) + _CLAIMED_NBYTES).to_bytes(4) + begun + bytes(16)


def call_headers(method: str = "ModelInfer", more: Iterable[tuple[str, str]] = ()) -> bytes:
    return http2.grpc_headers(SERVICE + method, more=more)


def begin(stream: int, block: bytes, end: bool = False) -> bytes:
    """The HEADERS frame of a request."""
    flags = http2.END_HEADERS | (http2.END_STREAM if end else 0)
    return http2.frame(http2.HEADERS, flags, stream, block)


def data(stream: int, body: bytes, end: bool = False) -> bytes:
    return http2.frame(http2.DATA, http2.END_STREAM if end else 0, stream, body)


def body_frames(stream: int, body: bytes, end: bool = True) -> bytes:
    """Return DATA frames of the largest size that every server takes."""
    parts = [body[at : at + http2.FIRST_FRAME_NBYTES] for at in range(0, len(body), http2.FIRST_FRAME_NBYTES)]
    return b"".join(data(stream, part, end and part is parts[-1]) for part in parts)


def typed_message(datatype: str, n_values: int, contents: bytes) -> bytes:
    """Return a ModelInferRequest whose values are in ``contents``, an encoded InferTensorContents."""
    tensor = field(1, b"x") + field(2, datatype.encode()) + field(3, b"\1" + varint(n_values))
    return field(1, MODEL.encode()) + field(5, tensor + field(5, contents))


def field(number: int, content: bytes) -> bytes:
    """Return a field of bytes, a message or packed numbers, as protobuf encodes it."""
    return bytes((number << 3 | 2,)) + varint(len(content)) + content


def http_post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def together(frames: Iterable[bytes], n: int = _AT_ONCE) -> Iterator[bytes]:
    """The same bytes in larger pieces: an attacker has one call to the kernel for many frames."""
    rest = iter(frames)
    while piece := b"".join(islice(rest, n)):
        yield piece


def http_infer(n_values: int, with_data: bool = True) -> tuple[bytes, bytes]:
    """The head, without its last empty line, and the body of an inference over HTTP."""
    nbytes = 4 * n_values
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, n_values]}
    document = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": nbytes}}]}).encode()
    head = (
        f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: a\r\n"
        f"Inference-Header-Content-Length: {len(document)}\r\nContent-Length: {len(document) + nbytes}\r\n"
    )
    return head.encode(), document + bytes(nbytes if with_data else 0)


def http_claim() -> bytes:
    """The first bytes of such a request whose tensor, it says, has a GiB."""
    head, body = http_infer(_CLAIMED_NBYTES // 4, with_data=False)
    return head + b"\r\n" + body + bytes(16)


def bomb(nbytes: int, start: bytes = b"") -> bytes:
    """A gzip file of some thousandth of ``nbytes``: ``start``, then zeros. Its check sum is wrong, which is
    seen at its end, too late.
    """
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(4 * MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    head = b"\x1f\x8b\x08" + bytes(6) + b"\xff"
    return head + first + block * (nbytes // (4 * MIB)) + packer.flush() + bytes(8)
