"""Inference over HTTP. Only work on large bodies leaves the event loop."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Final, NamedTuple

from gpuserve.core.errors import Internal, RequestError, Unimplemented
from gpuserve.front.ipc.gather import free_body
from gpuserve.front.ipc.heap_memory import REQUEST_NBYTES, Intake, Share
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.models.model_driver import Driver
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.net.exchange import BodyReceiver, Exchange, Head, Piece
from gpuserve.front.protocols.access.body_decoding import (
    THREAD_NBYTES,
    Inflater,
    Slice,
    inflate_off_loop,
    parse_off_loop,
    run_off_loop,
)
from gpuserve.front.protocols.access.endpoints import Endpoint, Route, match_route
from gpuserve.front.protocols.access.inference_call import InferenceCall, InferenceContext
from gpuserve.front.protocols.http import http_responses as encoding
from gpuserve.front.protocols.http import infer_codec as codec
from gpuserve.front.protocols.http.async_inference import trace_unread
from gpuserve.front.protocols.http.body_scanner import BodyHead, HttpBodyScanner
from gpuserve.front.protocols.http.http_responses import (
    IDENTITY,
    ImmediateReceiver,
    body_too_large,
    error_answer,
)
from gpuserve.front.protocols.http.infer_json import OutputForm
from gpuserve.front.protocols.http.multipart import FORM, binary_body, boundary_of
from gpuserve.front.requests import validation
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.requests.json_arrays import SHORT_NBYTES
from gpuserve_worker.protocol.tensor import BYTES

#: A whole body up to this size is credited to the client with its response, as in gRPC.
_UNCREDITED_NBYTES: Final = 8 << 10
_JSON_STARTS: Final = (b"{", b" ", b"\t", b"\r", b"\n")
_NO_STREAM: Final = "HTTP end point doesn't support models with decoupled transaction policy"


#: Content types of bodies that are the only tensor of a model, as a file: a raw binary request.
_FILE_TYPES: Final = ("image/", "audio/", "video/", "application/pdf")
#: Content type of a body that is a file or, as some clients send, JSON.
_OCTETS: Final = "application/octet-stream"
_WHOLE_BODY: Final = "0"
#: The part of a converted form that one turn of the event loop copies.
_PIECE_NBYTES: Final = 1 << 20


class InferHead(NamedTuple):
    """The parts of a head for inference. ``coding``: the client's, ``response_coding``: negotiated.
    ``media_type``: the type of the only output's bytes if the client accepts nothing else. ``is_octets``: the
    first byte of the body shows whether the body is a file or JSON. ``boundary``: of a multipart form.
    """

    model_name: str
    model_version: str
    header_length: str | None = None
    coding: str = ""
    response_coding: str = IDENTITY
    media_type: str = ""
    is_octets: bool = False
    boundary: str | None = None


def read_infer_head(head: Head) -> InferHead | None:
    """Return what a head says about inference, or None if the request is for another endpoint."""
    route = match_route(head.method, head.raw_path)
    if not isinstance(route, Route) or route.endpoint is not Endpoint.MODEL_INFER:
        return None
    headers = {name: value.decode("latin-1") for name, value in head.headers}
    length = headers.get(b"inference-header-content-length")
    sent = headers.get(b"content-type", "").partition(";")[0].strip().lower() if length is None else ""
    if sent.startswith(_FILE_TYPES):
        length = _WHOLE_BODY
    accepted = headers.get(b"accept", "").partition(";")[0].strip().lower()
    is_file = accepted.startswith(_FILE_TYPES) or (accepted == _OCTETS and length == _WHOLE_BODY)
    return InferHead(
        route.model_name,
        route.model_version,
        length,
        headers.get(b"content-encoding", ""),
        encoding.negotiate_coding(headers.get(b"accept-encoding")),
        accepted if is_file and not accepted.endswith("*") and "," not in accepted else "",
        sent == _OCTETS,
        boundary_of(headers[b"content-type"]) if sent == FORM else None,
    )


class InferHandler(InferenceContext):
    """The handler of HTTP inference requests."""

    def accept(self, exchange: Exchange, head: InferHead) -> BodyReceiver:
        """Return the body receiver of a request, or of its refusal if the head alone shows that."""
        name, version, _, coding_header, *_ = head
        try:
            driver = self.service.models.find(name, version)
            if driver.spec.decoupled:
                name = driver.spec.name
                raise Unimplemented(f"{_NO_STREAM}: model '{name}' gives any number of responses")
            coding = encoding.request_coding(coding_header) if coding_header else IDENTITY
            nbytes = exchange.head.content_length or 0
            if nbytes > self.max_request_nbytes:
                raise body_too_large(nbytes, self.max_request_nbytes)
        except RequestError as error:
            trace_unread(self.service, name, error, exchange)
            return ImmediateReceiver(exchange, partial(error_answer, error))
        kind = OctetsReceiver if head.is_octets else InferReceiver
        receiver = (kind if head.boundary is None else FormReceiver)(self, exchange, driver, head)
        if coding == IDENTITY:
            return receiver
        return CompressedReceiver(exchange, Inflater(coding, self.inflation), receiver, self.service.intake)


class InferReceiver(InferenceCall):
    """One request: reads the body, submits the request, and sends the response when called back."""

    __slots__ = ("_driver", "_form", "_head", "_scanner")

    _IS_GRPC = False
    _form: OutputForm

    def __init__(self, context: InferHandler, exchange: Exchange, driver: Driver, head: InferHead) -> None:
        self._context = context
        self._exchange = exchange
        self._driver = driver
        self._head = head
        self._scanner: HttpBodyScanner | None = None
        self._share = None
        self._pending = None
        self._timeout_s = self._since = None
        self._started_ns = 0 if context.receptions.deliver is None else time.monotonic_ns()
        self._reception = None
        self.is_done = False

    def _traced_name(self) -> str:
        return self._head.model_name

    # ---- the request ----------------------------------------------------------------------

    def receive_body(self, data: Piece, end: bool) -> None:
        nbytes = len(data)
        if end and nbytes <= _UNCREDITED_NBYTES and self._scanner is None and not self.is_done:
            try:  # as in ``read``, inlined: this is every small request
                self._read_whole(bytes(data))
            except Exception as error:
                self.refuse(error)
            return
        self.read(data, end, self._exchange.head.content_length)
        if nbytes > _UNCREDITED_NBYTES or not end:
            self._exchange.consumed(nbytes)

    def read(self, data: Piece, end: bool, content_length: int | None) -> None:
        """Read the next part of the body. ``content_length``: the size of the whole body if known."""
        if self.is_done:
            return
        try:
            if end and self._scanner is None and len(data) < codec.LARGE_NBYTES:
                self._read_whole(bytes(data))
            else:
                self._read_part(data, end, content_length)
        except Exception as error:
            self.refuse(error)

    def _read_whole(self, body: bytes) -> None:
        most = self._context.max_request_nbytes
        if len(body) > most:
            raise body_too_large(len(body), most)
        name, version, length, *_ = self._head
        request, self._form = codec.parse_infer_request(name, version, body, length, self._driver.spec)
        self._submit(request)

    def _read_part(self, data: Piece, end: bool, content_length: int | None) -> None:
        scanner, most = self._scanner, self._context.max_request_nbytes
        if scanner is None:
            if end and len(data) > most:
                raise body_too_large(len(data), most)
            name, version, length, *_ = self._head
            head = BodyHead(name, version, length, content_length, self._driver.spec)
            self._share = self._new_share()
            scanner = self._scanner = HttpBodyScanner(head, self._driver.claim, most, self._share)
        scanner.feed(data)
        if end:
            takes_long = scanner.json_nbytes > SHORT_NBYTES or scanner.has_many_objects
            nbytes = scanner.json_nbytes if takes_long else 0
            parse_off_loop(nbytes, partial(self._finish, scanner), self._on_request, self._context.executor)

    def _finish(self, scanner: HttpBodyScanner) -> InferRequest:
        request, self._form = scanner.finish()
        return request

    def _on_request(self, found: InferRequest | RequestError) -> None:
        if isinstance(found, RequestError):
            self.refuse(found)  # frees the scanner's blocks
            return
        self._scanner = None
        if self.is_done:
            free_body(found)
            return
        try:
            self._submit(found)
        except Exception as error:
            self.refuse(error)

    # ---- the answer -----------------------------------------------------------------------

    def _on_answer(self, pending: PendingRequest, answer: Answer) -> None:
        if not isinstance(answer, InferResponse):
            self.refuse(answer or Internal("a stream ended that was no stream"))
            return
        form = self._form
        try:
            if pending.request.class_counts:
                self._context.service.inference.classify(answer, pending)
            if self._head.media_type:
                self._send_encoded(answer, codec.encode_file(answer, self._head.media_type))
                return
            if not form.everything and _is_long(answer):
                work = partial(codec.encode_infer_response, answer, form)
                run_off_loop(SHORT_NBYTES, work, partial(self._on_encoded, answer), self._context.executor)
                return
            encoded = codec.encode_infer_response(answer, form)
        except Exception as error:
            answer.close()
            self.refuse(error)
        else:
            self._send_encoded(answer, encoded)

    def _on_encoded(self, answer: InferResponse, found: codec.Encoded | RequestError) -> None:
        if self.is_done:
            answer.close()
        elif isinstance(found, RequestError):
            answer.close()
            self.refuse(found)
        else:
            self._send_encoded(answer, found)

    def _send_encoded(self, answer: InferResponse, encoded: codec.Encoded) -> None:
        head, pieces, nbytes = encoded
        self._pending = None
        if self._share is not None:
            self._share.hold(0)
        coding = self._head.response_coding
        if coding != IDENTITY:
            work = partial(encoding.compress_response, coding, head, pieces)
            run_off_loop(nbytes, work, partial(self._send_compressed, answer))
            return
        if self._reception is None:
            self.is_done = True
            self._exchange.answer(head, pieces, nbytes, answer.on_close and answer.close)
        else:
            self._send(head, pieces, nbytes, answer)

    def _send_error(self, error: RequestError) -> None:
        head, body = error_answer(error)
        self._exchange.answer(head, (body,), len(body))

    def _release_memory(self) -> None:
        if self._share is not None:
            self._share.hold(0)
        scanner, self._scanner = self._scanner, None
        if scanner is not None:
            self._driver.free(scanner.blocks)


class OctetsReceiver(InferReceiver):
    """The receiver of a body without a type: JSON if the body begins like an object, else a file."""

    __slots__ = ()

    def receive_body(self, data: Piece, end: bool) -> None:
        self._decide(data)
        super().receive_body(data, end)

    def read(self, data: Piece, end: bool, content_length: int | None) -> None:
        self._decide(data)
        super().read(data, end, content_length)

    def _decide(self, data: Piece) -> None:
        if self._head.is_octets and len(data):
            is_json = bytes(data[:1]) in _JSON_STARTS
            self._head = self._head._replace(header_length=None if is_json else _WHOLE_BODY, is_octets=False)


class FormReceiver(InferReceiver):
    """The receiver of a multipart form, which becomes a binary request when the whole form has arrived."""

    __slots__ = ("_nbytes", "_parts")

    def __init__(self, context: InferHandler, exchange: Exchange, driver: Driver, head: InferHead) -> None:
        super().__init__(context, exchange, driver, head)
        self._parts: list[bytes] = []
        self._nbytes = 0
        self._share = self._new_share()

    def receive_body(self, data: Piece, end: bool) -> None:
        self.read(data, end, None)
        self._exchange.consumed(len(data))

    def read(self, data: Piece, end: bool, content_length: int | None) -> None:
        if self.is_done:
            return
        self._nbytes += len(data)
        self._parts.append(bytes(data))
        try:
            if self._nbytes > self._context.max_request_nbytes:
                raise body_too_large(self._nbytes, self._context.max_request_nbytes)
            assert self._share is not None
            self._share.hold(2 * self._nbytes)  # the form and the request
        except RequestError as error:
            self.refuse(error)
            return
        if end:
            parts, self._parts = self._parts, []
            work = partial(binary_body, parts, self._head.boundary or "", self._driver.spec)
            # Never on the loop: the heads of 256 short parts take 6 ms.
            run_off_loop(THREAD_NBYTES + self._nbytes, work, self._on_binary, self._context.executor)

    def _on_binary(self, found: tuple[bytes, int] | RequestError) -> None:
        if self.is_done:
            return
        if isinstance(found, RequestError):
            self.refuse(found)
            return
        body, json_nbytes = found
        if self._share is not None:
            self._share.hold(0)
        self._head = self._head._replace(header_length=str(json_nbytes))
        self._read_binary(memoryview(body), len(body))

    def _read_binary(self, body: memoryview, nbytes: int) -> None:
        """Read a piece of the request in this turn of the loop, and the rest in the next turns."""
        rest = body[_PIECE_NBYTES:]
        super().read(body[:_PIECE_NBYTES], not rest, nbytes)
        if rest:
            asyncio.get_running_loop().call_soon(self._read_binary, rest, nbytes)

    def _release_memory(self) -> None:
        self._parts.clear()
        super()._release_memory()


def _is_long(answer: InferResponse) -> bool:
    """Return whether a thread should encode the response's JSON: strings take longer than numbers."""
    most = SHORT_NBYTES
    nbytes = 0
    for one in answer.outputs:
        nbytes += len(one.data)
        if one.datatype == BYTES:
            most = validation.SHORT_NBYTES
    return nbytes > most


class CompressedReceiver:
    """The receiver of a compressed body, which passes inflated data to ``receiver``."""

    __slots__ = ("_busy", "_ended", "_exchange", "_inflater", "_parts", "_receiver", "_share")

    def __init__(
        self, exchange: Exchange, inflater: Inflater, receiver: InferReceiver, intake: Intake
    ) -> None:
        self._exchange = exchange
        self._inflater = inflater
        self._receiver = receiver
        self._share = Share(intake, exchange.endpoints.source, REQUEST_NBYTES)
        self._parts: list[bytes] = []
        self._ended = False
        #: Whether a part is being inflated; further parts wait.
        self._busy = False

    def receive_body(self, data: Piece, end: bool) -> None:
        if self._receiver.is_done:
            return
        self._parts.append(bytes(data))
        self._ended = end
        try:
            self._share.hold(self._share.nbytes + len(data))
        except RequestError as error:
            self._receiver.refuse(error)
        if not self._busy:
            self._inflate()

    def abandon(self) -> None:
        self._parts.clear()
        self._share.hold(0)
        self._receiver.abandon()

    def _inflate(self) -> None:
        data, end = b"".join(self._parts), self._ended
        self._parts.clear()
        self._busy = True
        slices = self._inflater.slices(data, end=end)
        inflate_off_loop(len(data), slices, partial(self._read, len(data), end))

    def _read(self, nbytes: int, end: bool, found: Slice | RequestError) -> bool:
        """Pass on an inflated slice of ``nbytes`` of input. Return whether more slices are wanted."""
        receiver, more = self._receiver, False
        if isinstance(found, RequestError):
            receiver.refuse(found)
        else:
            more = found.more
            receiver.read(found.data, end and not more, None)
        if more and not receiver.is_done:
            return True
        self._busy = False
        self._share.hold(0 if receiver.is_done else self._share.nbytes - nbytes)
        self._exchange.consumed(nbytes)
        if not receiver.is_done and (self._parts or self._ended is not end):
            self._inflate()
        return False
