"""``ModelInfer`` without task or coroutine: each call is a body receiver that the connection calls with the
message and the model with its answer.

Only zlib's work and typed contents of large messages leave the event loop.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from gpuserve.core.errors import Internal, RequestError
from gpuserve.front.ipc.gather import heap_nbytes
from gpuserve.front.ipc.heap_memory import REQUEST_NBYTES, Share
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.net.exchange import AnswerHead, Exchange, Piece
from gpuserve.front.observability.tracing.request_trace import Reception
from gpuserve.front.protocols.access.body_decoding import (
    WINDOW_BITS,
    Inflater,
    Slice,
    client_error,
    inflate_off_loop,
    run_off_loop,
)
from gpuserve.front.protocols.access.header_forwarding import HeaderForwarding
from gpuserve.front.protocols.grpc.grpc_protocol import (
    COMPRESSED_NBYTES,
    IDENTITY,
    OK,
    PREFIX,
    PREFIX_NBYTES,
    CallHead,
    compress_messages,
    ok_head,
    oversized_body_error,
    read_prefix,
    refuse_call,
    unary_part,
)
from gpuserve.front.protocols.grpc.infer_decoder import SHORT_NBYTES, parse_infer_request
from gpuserve.front.protocols.grpc.infer_encoder import encode_infer_response
from gpuserve.front.protocols.grpc.request_scanner import GrpcBodyScanner
from gpuserve.front.requests import validation
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.requests.validation import check_strings, has_long_strings
from gpuserve.front.service.inference_service import InferenceService
from gpuserve_worker.memory.arena import Block

#: Messages of at least this size are copied into the arena part by part.
INGEST_NBYTES: Final = 64 << 10
#: A complete body up to this size is credited to the client together with its answer: thousands of such
#: bodies do not fill the connection's window.
_UNCREDITED_NBYTES: Final = 8 << 10
_OK_CODED: Final = {coding: ok_head(coding) for coding in WINDOW_BITS}


class GrpcInference:
    """State shared by all calls of ``ModelInfer``. ``level`` is zlib's for responses, 0 for none."""

    def __init__(
        self,
        service: InferenceService,
        max_request_nbytes: int,
        forwarding: HeaderForwarding | None = None,
        level: int = 0,
    ) -> None:
        self.inference = service.inference
        self.intake = service.intake
        self.executor = service.json_executor
        self.receptions = service.control.trace.receptions
        self.max_request_nbytes = max_request_nbytes
        self.inflation = service.inflation.within(max_request_nbytes)
        self.forwarding = forwarding
        self.level = level


class InferCall:
    """One call: it collects the message, submits the request, and sends the driver's answer."""

    __slots__ = (
        "_call",
        "_exchange",
        "_is_done",
        "_is_parsed_elsewhere",
        "_parts",
        "_pending",
        "_reception",
        "_scanner",
        "_share",
        "_shared",
        "_since",
        "_started_ns",
    )

    def __init__(self, shared: GrpcInference, call: CallHead, exchange: Exchange) -> None:
        self._shared = shared
        self._call = call
        self._exchange = exchange
        self._parts: bytearray | None = None
        self._scanner: GrpcBodyScanner | None = None
        #: The intake share of the body. A message that arrives in one small part is not counted.
        self._share: Share | None = None
        self._is_parsed_elsewhere = False
        self._pending: PendingRequest | None = None
        #: Arrival time of the first part, if the message arrives in several.
        self._since: float | None = None
        #: Start time, if any request is traced, and the trace record of this one.
        self._started_ns = 0 if shared.receptions.deliver is None else time.monotonic_ns()
        self._reception: Reception | None = None
        #: True once the call was answered or abandoned.
        self._is_done = False

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
            elif not self._is_done:
                self._collect(data)
            if end:
                self._parse_collected()
        except Exception as error:
            self._refuse(error)

    def abandon(self) -> None:
        self._is_done = True
        self._release()
        if self._pending is not None:
            self._pending.cancel()
        if self._reception is not None:
            self._reception.close()

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
            encoding, limit = self._call.encoding, self._shared.max_request_nbytes
            _, nbytes = read_prefix(parts, limit, encoding or IDENTITY)
            if len(parts) > PREFIX_NBYTES + nbytes:
                raise oversized_body_error()
            if nbytes >= INGEST_NBYTES and not encoding:
                self._scanner = GrpcBodyScanner(self._claim, limit, share)
                self._scanner.feed(parts)
                self._parts = None
                return
        share.hold(len(parts))

    def _new_share(self) -> Share:
        return Share(self._shared.intake, self._exchange.endpoints.source, REQUEST_NBYTES)

    def _parse_collected(self) -> None:
        """Parse the message after its last part."""
        scanner = self._scanner
        if scanner is None:
            body, self._parts = bytes(self._parts or b""), None
            self._receive_whole(body)
        else:
            self._parse_scanned(scanner)

    def _parse_scanned(self, scanner: GrpcBodyScanner) -> None:
        """Parse a scanned message, in a thread if it is long beside its raw contents."""
        nbytes = len(scanner.header) if len(scanner.header) > SHORT_NBYTES else 0
        self._is_parsed_elsewhere = True
        run_off_loop(nbytes, scanner.parse, self._on_parsed, self._shared.executor)

    def _on_parsed(self, found: InferRequest | RequestError) -> None:
        scanner = self._scanner
        assert scanner is not None
        if isinstance(found, InferRequest) and not self._is_done and has_long_strings(found):
            work = partial(check_strings, found)
            run_off_loop(validation.SHORT_NBYTES, work, self._on_parsed, self._shared.executor)
            return
        self._is_parsed_elsewhere = False
        if self._is_done:
            self._release()
            return
        if isinstance(found, RequestError):
            self._refuse(found)
            return
        self._scanner = None
        try:
            if len(scanner.header) > SHORT_NBYTES and self._share is not None:
                self._share.hold(self._share.nbytes + heap_nbytes(found))
            scanner.transfer_blocks()
            self._submit(found)
        except Exception as error:
            self._scanner = scanner  # the scanner owns the blocks, unless it has transferred them
            self._refuse(error)

    def _receive_whole(self, body: bytes) -> None:
        """Parse a complete body with its prefix."""
        compressed, message = unary_part(body, self._shared.max_request_nbytes, self._call.encoding)
        if not compressed:
            self._submit(parse_infer_request(message))
            return
        share = self._share = self._share or self._new_share()
        slices = Inflater(self._call.encoding, self._shared.inflation).slices(message, end=True)
        inflate_off_loop(len(message), slices, partial(self._receive_slice, share, len(body)))

    def _receive_slice(self, share: Share, body_nbytes: int, found: Slice | RequestError) -> bool:
        """Scan one inflated slice of a compressed message. Returns whether more slices are wanted."""
        if self._is_done or isinstance(found, RequestError):
            if isinstance(found, RequestError):
                self._refuse(found)
            return False
        try:
            scanner = self._scanner
            if scanner is None and not found.more:
                self._submit(parse_infer_request(found.data))
                return True
            if scanner is None:
                limit = self._shared.max_request_nbytes
                scanner = GrpcBodyScanner(self._claim, limit, share, framed=False, kept_nbytes=body_nbytes)
                self._scanner = scanner
            scanner.feed(found.data)
            if not found.more:
                self._parse_scanned(scanner)
        except Exception as error:
            self._refuse(error)
            return False
        return True

    def _claim(self, model_name: str, nbytes: int) -> Block | None:
        version = "" if self._scanner is None else self._scanner.model_version
        return self._shared.inference.claim(model_name, nbytes, version)

    def _submit(self, request: InferRequest) -> None:
        shared = self._shared
        if shared.forwarding is not None:
            shared.forwarding.add_to(request, self._exchange.head)
        if self._call.timeout_s is not None:
            self._call.limit(request, self._since)
        if self._started_ns:
            request.receiver = self
        request.sender = self._exchange
        pending = shared.inference.submit(request, None, self._answer)
        if not self._is_done:
            self._pending = pending

    def receive(self) -> Reception | None:
        """Return the trace record for the rest of this request, which was read and is traced."""
        self._reception = self._shared.receptions.of(
            self._exchange.head.headers, grpc=True, began_ns=self._started_ns
        )
        return self._reception

    # ---- the answer -----------------------------------------------------------------------

    def _answer(self, pending: PendingRequest, answer: Answer) -> None:
        if not isinstance(answer, InferResponse):
            self._refuse(answer or Internal("a stream ended that was no stream"))
            return
        try:
            if pending.request.class_counts:
                self._shared.inference.classify(answer, pending)
            pieces = encode_infer_response(answer, framed=True)
        except Exception as error:
            answer.close()
            self._refuse(error)
            return
        self._pending = (
            None  # breaks a reference cycle with this call, so that the garbage collector has nothing to do
        )
        if self._share is not None:
            self._share.hold(0)
        nbytes = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        if self._shared.level and nbytes >= COMPRESSED_NBYTES and self._call.coding:
            work = partial(compress_messages, self._call.coding, self._shared.level, b"".join(pieces))
            run_off_loop(nbytes, work, partial(self._send_compressed, answer))
        elif self._reception is None:
            self._is_done = True
            self._exchange.answer(OK, pieces, nbytes, answer.on_close and answer.close)
        else:
            self._send(OK, pieces, nbytes, answer)

    def _send_compressed(self, response: InferResponse, message: bytes | RequestError) -> None:
        if isinstance(message, RequestError):
            response.close()
            self._refuse(message)
        else:
            self._send(_OK_CODED[self._call.coding], (message,), len(message), response)

    def _send(
        self, head: AnswerHead, pieces: list[Piece] | tuple[Piece], nbytes: int, response: InferResponse
    ) -> None:
        self._is_done = True
        reception = self._reception
        if reception is None:
            self._exchange.answer(head, pieces, nbytes, response.close)
            return
        reception.sending()
        self._exchange.answer(head, pieces, nbytes, response.close)
        reception.sent()
        reception.close()

    def _refuse(self, error: Exception) -> None:
        """Answer with an error status, unless the call was answered."""
        refusal = client_error(error, f"serving {self._exchange.head.path}")
        if self._is_done:
            return
        self._is_done = True
        self._pending = None
        self._release()
        if self._reception is not None:
            self._reception.sending()
        refuse_call(self._exchange, refusal)
        if self._reception is not None:
            self._reception.sent()
            self._reception.close()

    def _release(self) -> None:
        """Release the intake share, and free the blocks of a message that did not become a request."""
        if self._share is not None:
            self._share.hold(0)
        if self._is_parsed_elsewhere:  # a thread still reads the blocks
            return
        scanner, self._scanner = self._scanner, None
        if scanner is not None:
            for block in scanner.abort():
                block.free()
