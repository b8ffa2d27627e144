"""``ModelInfer``. Only zlib's work and typed contents of large messages leave the event loop."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from gpuserve.core.errors import Internal, RequestError
from gpuserve.front.ipc.gather import heap_nbytes
from gpuserve.front.ipc.heap_memory import Share
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.net.exchange import AnswerHead, Exchange, Piece
from gpuserve.front.protocols.access.body_decoding import (
    WINDOW_BITS,
    Inflater,
    Slice,
    inflate_off_loop,
    parse_off_loop,
    run_off_loop,
)
from gpuserve.front.protocols.access.inference_call import InferenceCall, InferenceContext
from gpuserve.front.protocols.grpc import grpc_protocol as protocol
from gpuserve.front.protocols.grpc.grpc_protocol import COMPRESSED_NBYTES, OK, PREFIX, PREFIX_NBYTES, CallHead
from gpuserve.front.protocols.grpc.infer_decoder import (
    SHORT_NBYTES,
    parse_infer_request,
    request_by_template,
)
from gpuserve.front.protocols.grpc.infer_encoder import encode_infer_response
from gpuserve.front.protocols.grpc.request_scanner import GrpcBodyScanner
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.requests.validation import has_long_strings
from gpuserve_worker.memory.arena import Block

#: Messages of at least this size are scanned: they may be long to parse.
INGEST_NBYTES: Final = 64 << 10
#: Messages of at least this size are copied into the arena part by part. Smaller ones are collected, because
#: to copy them once more takes less time than to scan each part.
COLLECTED_NBYTES: Final = 256 << 10
#: A complete body up to this size is credited to the client together with its answer: thousands of such
#: bodies do not fill the connection's window.
_UNCREDITED_NBYTES: Final = 8 << 10
_OK_CODED: Final = {coding: protocol.ok_head(coding) for coding in WINDOW_BITS}


class InferCall(InferenceCall):
    """One call of ``ModelInfer``."""

    __slots__ = ("_call", "_is_parsed_elsewhere", "_parts", "_scanner")

    _IS_GRPC = True

    def __init__(self, context: InferenceContext, call: CallHead, exchange: Exchange) -> None:
        self._context = context
        self._call = call
        self._exchange = exchange
        self._parts: bytearray | None = None
        self._scanner: GrpcBodyScanner | None = None
        self._share = None
        self._is_parsed_elsewhere = False
        self._pending = None
        self._timeout_s = call.timeout_s
        self._since = None
        self._started_ns = 0 if context.receptions.deliver is None else time.monotonic_ns()
        self._reception = None
        self.is_done = False

    # ---- the request ----------------------------------------------------------------------

    def receive_body(self, data: Piece, end: bool) -> None:
        nbytes = len(data)
        try:
            if nbytes > _UNCREDITED_NBYTES or not end:
                self._exchange.consumed(nbytes)
            if self._scanner is not None:
                self._scanner.feed(data)
            elif end and nbytes < INGEST_NBYTES and self._parts is None:
                body, is_plain = bytes(data), nbytes >= PREFIX_NBYTES and not self._call.encoding
                # Fast path of _receive_whole for small uncompressed messages, which are nearly all messages.
                if is_plain and body[:PREFIX_NBYTES] == PREFIX.pack(0, nbytes - PREFIX_NBYTES):
                    self._submit(parse_infer_request(body[PREFIX_NBYTES:]))
                else:
                    self._receive_whole(body)
                return
            elif not self.is_done:
                self._collect(data)
            if end:
                if self._scanner is None:
                    whole, self._parts = self._parts or b"", None
                    self._receive_whole(whole)
                else:
                    self._parse_scanned(self._scanner)
        except Exception as error:
            self.refuse(error)

    def _collect(self, data: Piece) -> None:
        """Buffer a small or compressed message, or start to scan a large one."""
        parts = self._parts
        if parts is None:
            parts, self._since = bytearray(data), time.monotonic()
            self._parts = parts
        else:
            parts += data
        share = self._share = self._share or self._new_share()
        if len(parts) >= PREFIX_NBYTES:
            encoding, limit = self._call.encoding, self._context.max_request_nbytes
            _, nbytes = protocol.read_prefix(parts, limit, encoding or protocol.IDENTITY)
            if len(parts) > PREFIX_NBYTES + nbytes:
                raise protocol.oversized_body_error()
            if nbytes >= COLLECTED_NBYTES and not encoding:
                self._scanner = GrpcBodyScanner(self._claim, limit, share)
                self._scanner.feed(parts)
                self._parts = None
                return
        share.hold(len(parts))

    def _parse_scanned(self, scanner: GrpcBodyScanner) -> None:
        nbytes = len(scanner.header) if len(scanner.header) > SHORT_NBYTES else 0
        self._is_parsed_elsewhere = True
        parse_off_loop(nbytes, scanner.parse, self._on_parsed, self._context.executor)

    def _on_parsed(self, found: InferRequest | RequestError) -> None:
        scanner = self._scanner
        assert scanner is not None
        self._is_parsed_elsewhere = False
        if self.is_done:
            self._release_memory()
            return
        if isinstance(found, RequestError):
            self.refuse(found)
            return
        self._scanner = None
        try:
            if len(scanner.header) > SHORT_NBYTES and self._share is not None:
                self._share.hold(self._share.nbytes + heap_nbytes(found))
            scanner.transfer_blocks()
            self._submit(found)
        except Exception as error:
            self._scanner = scanner  # the scanner owns the blocks, unless it has transferred them
            self.refuse(error)

    def _receive_whole(self, body: bytes | bytearray) -> None:
        limit, encoding = self._context.max_request_nbytes, self._call.encoding
        compressed, message = protocol.unary_part(body, limit, encoding)
        if not compressed:
            message = bytes(message)
            if len(message) < INGEST_NBYTES:
                self._submit(parse_infer_request(message))
            elif (request := read_by_template(message)) is not None:
                self._submit(request)
            else:
                share = self._share = self._share or self._new_share()
                self._scanner = GrpcBodyScanner(self._claim, limit, share, framed=False)
                self._scanner.feed(message)
                self._parse_scanned(self._scanner)
            return
        share = self._share = self._share or self._new_share()
        slices = Inflater(encoding, self._context.inflation).slices(message, end=True)
        inflate_off_loop(len(message), slices, partial(self._receive_slice, share, len(body)))

    def _receive_slice(self, share: Share, body_nbytes: int, found: Slice | RequestError) -> bool:
        """Scan one inflated slice of a compressed message. Returns whether more slices are wanted."""
        if isinstance(found, RequestError):
            self.refuse(found)
            return False
        if self.is_done:
            return False
        try:
            scanner = self._scanner
            if scanner is None and not found.more:
                self._submit(parse_infer_request(found.data))
                return True
            if scanner is None:
                limit = self._context.max_request_nbytes
                scanner = GrpcBodyScanner(self._claim, limit, share, framed=False, kept_nbytes=body_nbytes)
                self._scanner = scanner
            scanner.feed(found.data)
            if not found.more:
                self._parse_scanned(scanner)
        except Exception as error:
            self.refuse(error)
            return False
        return True

    def _claim(self, model_name: str, nbytes: int) -> Block | None:
        version = "" if self._scanner is None else self._scanner.model_version
        return self._context.service.inference.claim(model_name, nbytes, version)

    # ---- the answer -----------------------------------------------------------------------

    def _on_answer(self, pending: PendingRequest, answer: Answer) -> None:
        if not isinstance(answer, InferResponse):
            self.refuse(answer or Internal("a stream ended that was no stream"))
            return
        context = self._context
        try:
            if pending.request.class_counts:
                context.service.inference.classify(answer, pending)
            pieces = encode_infer_response(answer, framed=True)
        except Exception as error:
            answer.close()
            self.refuse(error)
            return
        self._pending = None  # breaks a reference cycle with this call
        if self._share is not None:
            self._share.hold(0)
        nbytes = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        if context.level and nbytes >= COMPRESSED_NBYTES and self._call.coding:
            work = partial(_compressed, self._call.coding, context.level, pieces)
            run_off_loop(nbytes, work, partial(self._send_compressed, answer))
        elif self._reception is None:
            self.is_done = True
            self._exchange.answer(OK, pieces, nbytes, answer.on_close and answer.close)
        else:
            self._send(OK, pieces, nbytes, answer)

    def _send_error(self, error: RequestError) -> None:
        protocol.refuse_call(self._exchange, error)

    def _release_memory(self) -> None:
        if self._share is not None:
            self._share.hold(0)
        if self._is_parsed_elsewhere:  # a thread still reads the blocks
            return
        scanner, self._scanner = self._scanner, None
        if scanner is not None:
            for block in scanner.abort():
                block.free()


def read_by_template(message: bytes) -> InferRequest | None:
    """Return the request of a message if it takes little time to read, whatever its size; else None."""
    request = request_by_template(message)
    return None if request is None or has_long_strings(request) else request


def _compressed(coding: str, level: int, pieces: list[Piece]) -> tuple[AnswerHead, tuple[bytes]]:
    return _OK_CODED[coding], (protocol.compress_messages(coding, level, pieces),)
