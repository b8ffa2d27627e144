"""``python -m benchmarks.costs``: milliseconds of the event loop that a MiB of each kind of input takes.

In one process, without a socket: the bytes go to the server's own parsers as the loop hands them over. What
takes long holds up every other client, so ``--ceiling`` ends with 1 where a kind takes more than that.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

import hpack
from hpack.hpack import encode_integer
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from tritonclient.grpc import service_pb2 as pb

from benchmarks.figures import table
from gpuserve.cli.bench import http2_client as http2
from gpuserve.front.ipc.heap_memory import Intake, Share
from gpuserve.front.net.exchange import AnswerHead, ConnectionEndpoints
from gpuserve.front.net.http1_protocol import Http1
from gpuserve.front.net.http2_protocol import Http2
from gpuserve.front.protocols.grpc.request_scanner import GrpcBodyScanner
from gpuserve.front.protocols.http.body_scanner import BodyHead, HttpBodyScanner
from gpuserve.front.protocols.http.infer_codec import parse_infer_request
from gpuserve_worker.memory.arena import Block

MIB: Final = 1 << 20
#: What the loop reads at a time.
READ_NBYTES: Final = 256 << 10
ROUNDS: Final = 5
_OK: Final = AnswerHead(200, (), [(b"grpc-status", b"0")])
_OK_HTTP1: Final = AnswerHead(200, ())
_LIMIT_NBYTES: Final = 1 << 30
_BLOCK: Final = http2.grpc_headers("/inference.GRPCInferenceService/ModelInfer")


class Nowhere:
    """A connection whose client reads at once. What an answer costs counts, not when; all input is fed, and a
    kind of input that is refused has no cost.
    """

    endpoints = ConnectionEndpoints(("127.0.0.1", 5), ("127.0.0.1", 80), tls=False)
    full = False
    unsent_nbytes = 0

    def write(self, data: bytes) -> None:
        pass

    def write_pieces(self, pieces: Sequence[Any], release: Callable[[], None] | None) -> None:
        if release is not None:
            release()

    def defers(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def close(self) -> None:
        raise AssertionError("the input was refused")

    abort = end_writing = close


class BodyReceiver:
    """Uses a body up as it comes, and answers at its end."""

    def __init__(self, exchange: Any, head: AnswerHead) -> None:
        self._exchange = exchange
        self._head = head

    def receive_body(self, data: Any, end: bool) -> None:
        self._exchange.consumed(len(data))
        if end:
            self._exchange.answer(self._head, (b"ok",), 2)

    def abandon(self) -> None:
        pass


def fed(feed: Callable[[memoryview], object], data: bytes) -> None:
    view = memoryview(data)
    for at in range(0, len(data), READ_NBYTES):
        feed(view[at : at + READ_NBYTES])


def http1(data: bytes) -> None:
    fed(Http1(Nowhere(), partial(BodyReceiver, head=_OK_HTTP1)).feed, data)


def http2_frames(data: bytes) -> None:
    """One connection's bytes of HTTP/2, after its preface."""
    fed(Http2(Nowhere(), partial(BodyReceiver, head=_OK)).feed, http2.settings_frame() + data)


def _repeated(make: Callable[[int], bytes], numbers: Iterator[int]) -> bytes:
    made = bytearray()
    while len(made) < MIB:
        made += make(next(numbers))
    return bytes(made)


def large_heads() -> bytes:
    """Heads of 32 KiB, each another."""
    value = b"v" * 1000
    return _repeated(
        lambda n: b"GET / HTTP/1.1\r\nHost: x\r\n" + b"F: %d%b\r\n" % (n, value) * 32 + b"\r\n", count()
    )


def small_requests() -> bytes:
    return _repeated(
        lambda n: b"POST /v2/%08d HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\n" % n + bytes(40), count()
    )


def chunked(nbytes: int) -> bytes:
    chunk = b"%x\r\n" % nbytes + bytes(nbytes) + b"\r\n"
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunk * (MIB // len(chunk)) + b"0\r\n\r\n"


def data_frames(nbytes: int) -> bytes:
    one = http2.frame(http2.DATA, 0, 1, bytes(nbytes))
    start = http2.frame(http2.HEADERS, http2.END_HEADERS, 1, _BLOCK)
    return start + one * (MIB // len(one)) + http2.frame(http2.DATA, http2.END_STREAM, 1)


def header_blocks(huffman: bool) -> bytes:
    """Requests with 4 KiB of metadata, each another, none of them in a table."""
    chance, encoder = random.Random(1), hpack.Encoder()

    def request(stream: int) -> bytes:
        fields = [(f"x-{n}", chance.randbytes(256).hex(), True) for n in range(8)]
        block = _BLOCK + encoder.encode(fields, huffman=huffman)
        return http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, block)

    return _repeated(request, count(1, 2))


def repeated_fields() -> bytes:
    """Requests that name an entry of the table, of 4 KB, 15 times, each another."""
    field = hpack.Encoder().encode([("a", "v" * 4000)], huffman=False)

    def request(stream: int) -> bytes:
        more = field if stream == 1 else b"\xbe" * 15 + b"\0\x01x\x08%08d" % stream
        return http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, _BLOCK + more)

    return _repeated(request, count(1, 2))


def huffman_text(symbols: bytes) -> bytes:
    """Requests with one long value in the code of HPACK, of these symbols by chance."""
    encoder = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)
    value = encoder.encode(bytes(random.Random(1).choices(symbols, k=16_000)))
    length = encode_integer(len(value), 7)
    length[0] |= 0x80  # which says that it is in the code
    block = _BLOCK + b"\x00\x01x" + length + value

    def request(stream: int) -> bytes:
        return http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, block)

    return _repeated(request, count(1, 2))


def json_floats() -> bytes:
    chance = random.Random(1)
    values = [chance.uniform(-1, 1) for _ in range(MIB // 22)]
    return json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(values)], "data": values}]}
    ).encode()


def grpc_raw() -> bytes:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(MIB)])
    request.inputs.add(name="x", datatype="FP32", shape=[MIB // 4])
    body: bytes = request.SerializeToString()
    return struct.pack(">BI", 0, len(body)) + body


def http_binary() -> bytes:
    """An inference over HTTP whose values are bytes; the length of its JSON comes first."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [MIB // 4], "parameters": {"binary_data_size": MIB}}
    text = json.dumps({"inputs": [tensor]}).encode()
    return text + bytes(MIB)


def _read(scanner: Any, body: bytes) -> None:
    fed(scanner.feed, body)
    scanner.finish()


def _block(*request: Any) -> Block:
    return Block(0, 0, request[-1], memoryview(bytearray(request[-1])))


def _bounds() -> tuple[Any, int, Share]:
    """Return where a scanner puts tensors, the limit of a body, and the share of its memory."""
    return _block, _LIMIT_NBYTES, Share(Intake(_LIMIT_NBYTES, lambda: None))


def read_grpc(body: bytes) -> None:
    _read(GrpcBodyScanner(*_bounds()), body)


def read_http(body: bytes) -> None:
    _read(HttpBodyScanner(BodyHead("m", "", str(len(body) - MIB), len(body), None), *_bounds()), body)


#: Each kind of input: what makes about a MiB of it, and what reads that.
KINDS: Final[dict[str, tuple[Callable[[], bytes], Callable[[bytes], object]]]] = {
    "HTTP/1, heads of 32 KiB": (large_heads, http1),
    "HTTP/1, requests of 100 bytes": (small_requests, http1),
    "HTTP/1, chunks of 1 byte": (partial(chunked, 1), http1),
    "HTTP/1, chunks of 16 KiB": (partial(chunked, 16 << 10), http1),
    "HTTP/2, DATA of 1 byte": (partial(data_frames, 1), http2_frames),
    "HTTP/2, DATA of 16 KiB": (partial(data_frames, 16 << 10), http2_frames),
    "HTTP/2, header blocks of 4 KiB": (partial(header_blocks, False), http2_frames),
    "HTTP/2, header blocks of 4 KiB with Huffman": (partial(header_blocks, True), http2_frames),
    "HTTP/2, header blocks that stand for 60 KB": (repeated_fields, http2_frames),
    "HTTP/2, Huffman text with the shortest codes": (partial(huffman_text, b"012aceiost"), http2_frames),
    "HTTP/2, Huffman text of any bytes": (partial(huffman_text, bytes(range(32, 256))), http2_frames),
    "JSON, floats": (json_floats, lambda body: parse_infer_request("m", "", body, None)),
    "HTTP, binary tensor": (http_binary, read_http),
    "gRPC, raw tensor": (grpc_raw, read_grpc),
}


def cost_ms(kind: str, rounds: int = ROUNDS) -> float:
    """Milliseconds of CPU for a MiB, the least of some rounds."""
    make, read = KINDS[kind]
    data = make()
    taken_s = []
    for _ in range(rounds):
        began_s = time.process_time()
        read(data)
        taken_s.append(time.process_time() - began_s)
    return min(taken_s) * 1e3 * MIB / len(data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and say whether all kinds are under the ceiling."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=__doc__)
    parser.add_argument("--ceiling", type=float, metavar="MS", help="exit 1 where a MiB takes more")
    ceiling = parser.parse_args(arguments).ceiling
    costs = {kind: cost_ms(kind) for kind in KINDS}
    print(
        table(("a MiB of", "ms", "MiB/s"), [(k, f"{ms:.2f}", f"{1e3 / ms:.0f}") for k, ms in costs.items()])
    )
    over = [kind for kind, ms in costs.items() if ceiling is not None and ms > ceiling]
    for kind in over:
        print(f"over the ceiling of {ceiling:g} ms: {kind}", file=sys.stderr)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
