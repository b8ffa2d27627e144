"""The gRPC door over ASGI: the methods of the inference, the health and the reflection service.

Converts, calls the service, converts back. The status travels in trailers, or, where there is no
message, in the headers (gRPC's Trailers-Only).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeAlias

from gpuserve.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    RequestError,
)
from gpuserve.front.endpoint import grpc_health, grpc_reflection, grpc_requests, grpc_responses, grpc_rpcs
from gpuserve.front.endpoint.asgi import MODEL_INFER, MODEL_STREAM_INFER, Receive, Scope, Send
from gpuserve.front.endpoint.disconnects import DisconnectWatch
from gpuserve.front.endpoint.forwarding import HeaderForwarding
from gpuserve.front.endpoint.grpc_calls import (
    OK,
    START,
    Call,
    call_of,
    end,
    read_rest,
    refuse,
    respond,
)
from gpuserve.front.endpoint.grpc_framing import (
    PREFIX_NBYTES,
    Unframer,
    frame,
    read_prefix,
    unary_message,
)
from gpuserve.front.endpoint.grpc_stream import InferStream
from gpuserve.front.endpoint.offload import offload
from gpuserve.front.endpoint.response_body import send_body
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.endpoint.v2 import InferRequest
from gpuserve.front.plane.grpc_ingest import GrpcBodyScanner
from gpuserve_worker.memory import Block

logger = logging.getLogger(__name__)

#: Bodies from this size on are copied into the arena chunk by chunk.
INGEST_NBYTES: Final = 64 * 1024
Method: TypeAlias = Callable[[Call], Awaitable[None]]


class GrpcDoor:
    """The ASGI application for gRPC requests."""

    def __init__(
        self,
        service: InferenceService,
        watch: DisconnectWatch,
        max_request_nbytes: int,
        forwarding: HeaderForwarding | None = None,
    ) -> None:
        self._service = service
        self._forwarding = forwarding
        self._watch = watch
        self._max_request_nbytes = max_request_nbytes
        self._methods: dict[str, Method] = {
            MODEL_INFER: self._infer,
            MODEL_STREAM_INFER: self._stream_infer,
            grpc_health.WATCH: self._health_watch,
            **dict.fromkeys(grpc_rpcs.UNARY, self._unary),
            **dict.fromkeys(grpc_reflection.METHODS, self._reflection),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call. Whatever goes wrong is its status; the connection and the others go on."""
        path = scope["path"]
        try:
            method = self._methods.get(path, self._unknown)
            if "http.response.trailers" not in scope.get("extensions", ()):
                method = self._without_trailers
            await method(call_of(scope, receive, send))
        except RequestError as error:
            await refuse(send, error)
        except Exception:
            logger.exception("defect while serving %s", path[:256])
            await refuse(send, Internal("internal error of the server"))

    async def _infer(self, call: Call) -> None:
        request = await self._read_request(call)
        if self._forwarding is not None:
            self._forwarding.add_to(request, call.headers)
        timeout_s = call.timeout_s
        if timeout_s is not None and (request.timeout_s is None or timeout_s < request.timeout_s):
            request.timeout_s = timeout_s
        pending = self._service.submit(request)
        response = await self._watch.answer(pending, call.receive)
        if response is None:
            return
        if request.class_counts:
            self._service.classify(response, pending)
        try:
            pieces = grpc_responses.encode_infer_response(response, framed=True)
            if len(pieces) == 1 and type(pieces[0]) is bytes:
                await call.send(START)
                await call.send({"type": "http.response.body", "body": pieces[0], "more_body": False})
                await call.send(OK)
            else:
                await call.send(START)
                await send_body(call.send, pieces)
                await call.send(OK)
        except OSError:  # what ASGI's send() raises once the client is gone
            pass
        finally:
            response.close()

    async def _stream_infer(self, call: Call) -> None:
        forwarded = None if self._forwarding is None else self._forwarding.parameters(call.headers)
        stream = InferStream(self._service, strict_errors=call.strict_errors, forwarded=forwarded)
        loop = asyncio.get_running_loop()
        reader = loop.create_task(self._read_stream(call, stream))
        timer = None
        if call.timeout_s is not None:
            late = DeadlineExceeded(f"the stream did not end within its {call.timeout_s:g} s")
            timer = loop.call_later(call.timeout_s, stream.fail, late)
        started = False
        try:
            async for chunk in stream.chunks():
                if not started:
                    started = True
                    await call.send(START)
                await call.send({"type": "http.response.body", "body": chunk, "more_body": True})
            if not started:
                await call.send(START)
            await call.send({"type": "http.response.body", "body": b"", "more_body": False})
            await call.send(OK)
        except RequestError as error:
            # Without an answer before it the status stands alone: clients and proxies may repeat such a call.
            await (end if started else refuse)(call.send, error)
        except OSError:  # the client is gone
            pass
        finally:
            if timer is not None:
                timer.cancel()
            reader.cancel()
            stream.cancel()

    async def _read_stream(self, call: Call, stream: InferStream) -> None:
        """Hand the requests on as they come, and notice when the client goes away, also after the last."""
        try:
            unframer = Unframer(self._max_request_nbytes, call.encoding)
            while (message := await call.receive())["type"] != "http.disconnect":
                for body in unframer.feed(message.get("body", b"")):
                    stream.take(body)
                if not message.get("more_body", False):
                    unframer.finish()
                    stream.close_requests()
                await stream.wait_for_room()
            stream.cancel()
        except RequestError as error:
            stream.fail(error)
        except Exception:
            logger.exception("defect while reading a stream")
            stream.fail(Internal("internal error of the server"))

    async def _read_request(self, call: Call) -> InferRequest:
        message = await call.receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        body: bytes = message.get("body", b"")
        # A complete message in the first chunk is the usual call. Its end of stream may still be on its
        # way; to wait for it would cost as much as to parse the message.
        nbytes = len(body) - PREFIX_NBYTES
        if body[:1] == b"\0" and int.from_bytes(body[1:PREFIX_NBYTES]) == nbytes and not call.encoding:
            return grpc_requests.parse_infer_request(body[PREFIX_NBYTES:])
        if not message.get("more_body", False):
            return await self._parse(call, body)
        if not call.encoding and self._is_large(body):
            return await self._ingest(call, body)
        whole = await read_rest(call.receive, body, self._max_request_nbytes + PREFIX_NBYTES)
        return await self._parse(call, whole)

    async def _parse(self, call: Call, body: bytes) -> InferRequest:
        limit, encoding = self._max_request_nbytes, call.encoding
        if encoding:
            message = await offload(len(body), unary_message, body, limit, encoding)
        else:
            message = unary_message(body, limit)
        return grpc_requests.parse_infer_request(message)

    def _is_large(self, start: bytes) -> bool:
        """Told by the length in the first five bytes; a body that does not even begin with them is not."""
        if len(start) < PREFIX_NBYTES:
            return False
        return read_prefix(start, self._max_request_nbytes)[1] >= INGEST_NBYTES

    async def _ingest(self, call: Call, body: bytes) -> InferRequest:
        def allocate(model_name: str, nbytes: int) -> Block | None:
            return self._service.allocate(model_name, nbytes, scanner.model_version)

        scanner = GrpcBodyScanner(allocate, self._max_request_nbytes)
        try:
            scanner.feed(body)
            more = True
            while more:
                message = await call.receive()
                if message["type"] == "http.disconnect":
                    raise asyncio.CancelledError
                scanner.feed(message.get("body", b""))
                more = message.get("more_body", False)
            return scanner.finish()
        finally:
            # After finish() the blocks are the request's and this list is empty.
            for block in scanner.abort():
                block.free()

    async def _unknown(self, call: Call) -> None:
        # A status before the end of the request may be lost with it.
        await read_rest(call.receive, b"", grpc_rpcs.MAX_REQUEST_NBYTES)
        raise grpc_rpcs.unimplemented(call.path)

    async def _without_trailers(self, call: Call) -> None:
        await read_rest(call.receive, b"", grpc_rpcs.MAX_REQUEST_NBYTES)
        raise InvalidArgument(
            "a gRPC call needs the header 'te: trailers', which is missing: "
            "the client or a proxy does not speak gRPC over HTTP/2"
        )

    async def _unary(self, call: Call) -> None:
        body = await read_rest(call.receive, b"", grpc_rpcs.MAX_REQUEST_NBYTES)
        message = unary_message(body, grpc_rpcs.MAX_REQUEST_NBYTES, call.encoding)
        reply = await grpc_rpcs.answer(call.path, self._service, bytes(message))
        await respond(call.send, reply)

    async def _health_watch(self, call: Call) -> None:
        await grpc_health.serve_watch(self._service, self._watch, call)

    async def _reflection(self, call: Call) -> None:
        try:
            replies = grpc_reflection.replies(self._service, call.path, _messages(call))
            await call.send(START)
            async for reply in replies:
                data = frame(len(reply)) + reply
                await call.send({"type": "http.response.body", "body": data, "more_body": True})
            await call.send({"type": "http.response.body", "body": b"", "more_body": False})
            await call.send(OK)
        except RequestError as error:
            await end(call.send, error)
        except OSError:  # the client is gone
            pass


async def _messages(call: Call) -> AsyncIterator[bytes]:
    """The small messages of a stream, until its end or until the client is gone.

    Raises:
        RequestError: see ``Unframer``.
    """
    unframer = Unframer(grpc_reflection.MAX_REQUEST_NBYTES, call.encoding)
    more = True
    while more:
        message = await call.receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        for body in unframer.feed(message.get("body", b"")):
            yield body
        more = message.get("more_body", False)
    unframer.finish()
