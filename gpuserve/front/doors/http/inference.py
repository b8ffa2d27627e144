"""Inference over HTTP: no task, no coroutine. Each request is a ``Sink``, which the connection calls with its
body and the model with its answer. Only zlib's work on large bodies leaves the event loop.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final, NamedTuple

from gpuserve.core.errors import Internal, RequestError, Unimplemented
from gpuserve.front.doors.access import routes
from gpuserve.front.doors.access.endpoints import Endpoint
from gpuserve.front.doors.access.failures import error_to_tell
from gpuserve.front.doors.access.forwarding import HeaderForwarding
from gpuserve.front.doors.access.inflation import Inflater, Slice
from gpuserve.front.doors.access.offload import each_off_loop, off_loop
from gpuserve.front.doors.access.routes import Route
from gpuserve.front.doors.http import codec, encoding
from gpuserve.front.doors.http.answers import Reply, failure, too_large
from gpuserve.front.doors.http.encoding import IDENTITY
from gpuserve.front.doors.http.header import OutputForm
from gpuserve.front.doors.http.ingest import BodyHead, HttpBodyScanner
from gpuserve.front.exchange.exchange import AnswerHead, Exchange, Head, Piece, Sink
from gpuserve.front.ipc.gather import free_body
from gpuserve.front.ipc.heap_memory import REQUEST_NBYTES, Intake, Share
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.models.model_driver import Driver
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.observability.tracing.request_trace import Reception
from gpuserve.front.requests import validation
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.requests.json_arrays import SHORT_NBYTES
from gpuserve.front.requests.validation import check_strings, has_long_strings
from gpuserve.front.service.inference_service import InferenceService
from gpuserve_worker.protocol.tensor import BYTES

#: A whole body up to here is credited to the client with its answer, as in gRPC.
_UNCREDITED_NBYTES: Final = 8 << 10
_NO_STREAM: Final = "HTTP end point doesn't support models with decoupled transaction policy"


class InferHead(NamedTuple):
    """A head for inference: ``coding`` of the body in the client's words, ``answer_coding`` as chosen."""

    model_name: str
    model_version: str
    header_length: str | None = None
    coding: str = ""
    answer_coding: str = IDENTITY


def read_head(head: Head) -> InferHead | None:
    """What a head says about inference; None where the request is for something else."""
    route = routes.match(head.method, head.raw_path)
    if not isinstance(route, Route) or route.endpoint is not Endpoint.MODEL_INFER:
        return None
    headers = {name: value.decode("latin-1") for name, value in head.headers}
    return InferHead(
        route.model_name,
        route.model_version,
        headers.get(b"inference-header-content-length"),
        headers.get(b"content-encoding", ""),
        encoding.negotiate(headers.get(b"accept-encoding")),
    )


class HttpInference:
    """Accepts the inference requests of HTTP, whose bodies have at most ``max_request_nbytes``."""

    def __init__(
        self, service: InferenceService, max_request_nbytes: int, forwarding: HeaderForwarding | None
    ) -> None:
        self.service = service
        self.submit = service.inference.submit
        self.receptions = service.control.trace.receptions
        self.max_request_nbytes = max_request_nbytes
        self.inflation = service.inflation.within(max_request_nbytes)
        self.forwarding = forwarding
        #: For JSON that is not short.
        self.executor = service.json_executor

    def accept(self, exchange: Exchange, asked: InferHead) -> Sink:
        """The sink of a request; it refuses one whose head alone says that it cannot be served."""
        name, version, _, said_coding, _ = asked
        try:
            driver = self.service.models.find(name, version)
            if driver.spec.decoupled:
                name = driver.spec.name
                raise Unimplemented(f"{_NO_STREAM}: model '{name}' gives any number of responses")
            coding = encoding.request_coding(said_coding) if said_coding else IDENTITY
        except RequestError as error:
            return Reply(exchange, partial(failure, error))
        post = InferPost(self, exchange, driver, asked)
        if coding == IDENTITY:
            return post
        return CompressedBody(exchange, Inflater(coding, self.inflation), post, self.service.intake)


class InferPost:
    """One request: reads the body, submits what it says, and sends the answer when it is called back."""

    __slots__ = (
        "_asked",
        "_began_ns",
        "_door",
        "_driver",
        "_exchange",
        "_form",
        "_pending",
        "_reception",
        "_scanner",
        "_share",
        "_through",
    )

    _form: OutputForm

    def __init__(self, door: HttpInference, exchange: Exchange, driver: Driver, asked: InferHead) -> None:
        self._door = door
        self._exchange = exchange
        self._driver = driver
        self._asked = asked
        self._scanner: HttpBodyScanner | None = None
        #: What it holds of the intake; a body that has come in one small part is not counted.
        self._share: Share | None = None
        self._pending: PendingRequest | None = None
        #: Where anything is traced: when it began, and what notes the rest where its request is.
        self._began_ns = 0 if door.receptions.deliver is None else time.monotonic_ns()
        self._reception: Reception | None = None
        #: Answered, or given up.
        self._through = False

    # ---- the request ----------------------------------------------------------------------

    @property
    def is_through(self) -> bool:
        """Whether it is answered, or given up: nothing more is read."""
        return self._through

    def take(self, data: Piece, end: bool) -> None:
        nbytes = len(data)
        if end and nbytes <= _UNCREDITED_NBYTES and self._scanner is None and not self._through:
            try:  # as in read: this is every small request
                self._parse(bytes(data))
            except Exception as error:
                self.refuse(error)
            return
        self.read(data, end, self._exchange.head.content_length)
        if nbytes > _UNCREDITED_NBYTES or not end:
            self._exchange.consumed(nbytes)

    def abandon(self) -> None:
        self._through = True
        self._let_go()
        if self._pending is not None:
            self._pending.cancel()
        if self._reception is not None:
            self._reception.close()

    def read(self, data: Piece, end: bool, content_length: int | None) -> None:
        """Use the next part of the body, of so many bytes altogether if that is known; ``end``: the last."""
        if self._through:
            return
        try:
            if end and self._scanner is None and len(data) < codec.LARGE_NBYTES:
                self._parse(bytes(data))
            else:
                self._scan(data, end, content_length)
        except Exception as error:
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Answer with an error, unless there was an answer."""
        told = error_to_tell(error, f"serving {self._exchange.head.path}")
        if not self._through:
            self._through = True
            self._pending = None
            self._let_go()
            self._send(*failure(told))

    def _parse(self, body: bytes) -> None:
        """Read a small body that has come in one part."""
        most = self._door.max_request_nbytes
        if len(body) > most:
            raise too_large(len(body), most)
        name, version, length, _, _ = self._asked
        self._submit(*codec.parse_infer_request(name, version, body, length, self._driver.spec))

    def _scan(self, data: Piece, end: bool, content_length: int | None) -> None:
        """Place a part of a body that is large, or comes in parts."""
        scanner, most = self._scanner, self._door.max_request_nbytes
        if scanner is None:
            if end and len(data) > most:
                raise too_large(len(data), most)
            name, version, length, _, _ = self._asked
            head = BodyHead(name, version, length, content_length, self._driver.spec)
            share = Share(self._door.service.intake, self._exchange.ends.source, REQUEST_NBYTES)
            self._share = share
            scanner = self._scanner = HttpBodyScanner(head, self._driver.claim, most, share)
        scanner.feed(data)
        if end:
            takes_long = scanner.json_nbytes > SHORT_NBYTES or scanner.has_many_objects
            off_loop(
                scanner.json_nbytes if takes_long else 0, scanner.finish, self._on_read, self._door.executor
            )

    def _on_read(self, found: tuple[InferRequest, OutputForm] | RequestError) -> None:
        """Submit the request of a body that was read, once its long strings have been looked at."""
        scanner, self._scanner = self._scanner, None
        if isinstance(found, RequestError):
            self._scanner = scanner  # whose blocks are to be freed
            self.refuse(found)
            return
        request, form = found
        if self._through:
            free_body(request)
        elif has_long_strings(request):
            work = partial(_checked, request, form)
            off_loop(validation.SHORT_NBYTES, work, self._on_read, self._door.executor)
        else:
            try:
                self._submit(request, form)
            except Exception as error:
                self.refuse(error)

    def _submit(self, request: InferRequest, form: OutputForm) -> None:
        door = self._door
        self._form = form
        if door.forwarding is not None:
            door.forwarding.add_to(request, self._exchange.head)
        if self._began_ns:
            request.receiver = self
        request.sender = self._exchange
        pending = door.submit(request, None, self._answer)
        if not self._through:
            self._pending = pending

    def receive(self) -> Reception | None:
        """What notes the rest of a request that has been read, and is traced."""
        self._reception = self._door.receptions.of(
            self._exchange.head.headers, grpc=False, began_ns=self._began_ns
        )
        return self._reception

    # ---- the answer -----------------------------------------------------------------------

    def _answer(self, pending: PendingRequest, answer: Answer) -> None:
        if not isinstance(answer, InferResponse):
            self.refuse(answer or Internal("a stream ended that was no stream"))
            return
        form = self._form
        try:
            if pending.request.class_counts:
                self._door.service.inference.classify(answer, pending)
            if not form.everything and _takes_long(answer):
                work = partial(codec.encode_infer_response, answer, form)
                off_loop(SHORT_NBYTES, work, partial(self._on_encoded, answer), self._door.executor)
                return
            encoded = codec.encode_infer_response(answer, form)
        except Exception as error:
            answer.close()
            self.refuse(error)
        else:
            self._send_encoded(answer, encoded)

    def _on_encoded(self, answer: InferResponse, found: codec.Encoded | RequestError) -> None:
        """A response of long JSON was written."""
        if self._through:
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
        coding = self._asked.answer_coding
        if coding != IDENTITY:
            work = partial(encoding.compress, coding, head, pieces)
            off_loop(nbytes, work, partial(self._send_compressed, answer))
            return
        self._through = True
        if self._reception is None:
            self._exchange.answer(head, pieces, nbytes, answer.on_close and answer.close)
        else:
            self._reception.send(partial(self._exchange.answer, head, pieces, nbytes, answer.close))

    def _send_compressed(
        self, response: InferResponse, compressed: tuple[AnswerHead, list[bytes]] | RequestError
    ) -> None:
        response.close()
        if isinstance(compressed, RequestError):
            self.refuse(compressed)
        elif not self._through:
            self._through = True
            head, pieces = compressed
            self._send(head, b"".join(pieces))

    def _send(self, head: AnswerHead, body: bytes) -> None:
        send = partial(self._exchange.answer, head, (body,), len(body))
        if self._reception is None:
            send()
        else:
            self._reception.send(send)

    def _let_go(self) -> None:
        """Hold nothing any more; free what a body that did not become a request was placed in."""
        if self._share is not None:
            self._share.hold(0)
        scanner, self._scanner = self._scanner, None
        if scanner is not None:
            self._driver.free(scanner.blocks)


def _takes_long(answer: InferResponse) -> bool:
    """Whether its JSON is for a thread to write: strings take longer than numbers."""
    most = SHORT_NBYTES
    nbytes = 0
    for one in answer.outputs:
        nbytes += len(one.data)
        if one.datatype == BYTES:
            most = validation.SHORT_NBYTES
    return nbytes > most


def _checked(request: InferRequest, form: OutputForm) -> tuple[InferRequest, OutputForm]:
    return check_strings(request), form


class CompressedBody:
    """The sink of a compressed body: ``post`` reads what it inflates to."""

    __slots__ = ("_busy", "_ended", "_exchange", "_inflater", "_parts", "_post", "_share")

    def __init__(self, exchange: Exchange, inflater: Inflater, post: InferPost, intake: Intake) -> None:
        self._exchange = exchange
        self._inflater = inflater
        self._post = post
        self._share = Share(intake, exchange.ends.source, REQUEST_NBYTES)
        self._parts: list[bytes] = []
        self._ended = False
        #: Whether a part is being inflated: what comes meanwhile waits.
        self._busy = False

    def take(self, data: Piece, end: bool) -> None:
        if self._post.is_through:
            return
        self._parts.append(bytes(data))
        self._ended = end
        try:
            self._share.hold(self._share.nbytes + len(data))
        except RequestError as error:
            self._post.refuse(error)
        if not self._busy:
            self._inflate()

    def abandon(self) -> None:
        self._parts.clear()
        self._share.hold(0)
        self._post.abandon()

    def _inflate(self) -> None:
        data, end = b"".join(self._parts), self._ended
        self._parts.clear()
        self._busy = True
        slices = self._inflater.slices(data, end=end)
        each_off_loop(len(data), slices, partial(self._read, len(data), end))

    def _read(self, nbytes: int, end: bool, found: Slice | RequestError) -> bool:
        """Have a slice read of what so many bytes inflate to; False: no more of it is wanted."""
        post, more = self._post, False
        if isinstance(found, RequestError):
            post.refuse(found)
        else:
            more = found.more
            post.read(found.data, end and not more, None)
        if more and not post.is_through:
            return True
        self._busy = False
        self._share.hold(0 if post.is_through else self._share.nbytes - nbytes)
        self._exchange.consumed(nbytes)
        if not post.is_through and (self._parts or self._ended is not end):
            self._inflate()
        return False
