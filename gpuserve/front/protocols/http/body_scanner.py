"""The scanner of large HTTP inference bodies: copies each tensor to its place as the body arrives. Pure.

The result equals that of ``infer_codec.parse_infer_request`` for the whole body. Tensors from
``LARGE_NBYTES`` on are copied once, into a block of the model's arena; a share counts the rest. If the known
length of the body contradicts the header, nothing is allocated.

A body is JSON of the header length, then tensors; or tensors alone if that length is 0 and the length of the
body is known. It is kept as a whole if there is no header length, a long one, or 0 and the length is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from gpuserve.front.ipc.heap_memory import LARGE_NBYTES, ArrivingTensor, Share
from gpuserve.front.protocols.http import infer_codec as codec
from gpuserve.front.protocols.http.http_responses import body_too_large
from gpuserve.front.protocols.http.infer_json import NO_ARRAYS, Arrays, InferHeader, OutputForm, header_for
from gpuserve.front.requests.inference import InferRequest, InputTensor
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Block

#: JSON before tensors up to this size is parsed as soon as complete.
_HEADER_NBYTES: Final = 64 << 10
#: Strings and members become Python objects, unlike numbers in arrays: parsing some thousand takes 1 ms.
_MANY_OBJECTS: Final = 16 << 10


class BodyHead(NamedTuple):
    """A body's properties before its first byte: length or None; ``spec`` for raw binary requests."""

    model_name: str
    model_version: str
    header_length: str | None
    content_length: int | None
    spec: ModelSpec | None = None


class HttpBodyScanner:
    """The scanner of one body. Call ``feed`` with its chunks, then ``finish`` once; each may raise
    ``RequestError``, after which nothing more may be fed.

    ``claim(nbytes)`` returns a block of that size for a large tensor, or None for heap memory. The caller
    frees ``blocks`` if it drops the body; once ``finish`` returns, they belong to the request.
    """

    def __init__(
        self, head: BodyHead, claim: Callable[[int], Block | None], limit_nbytes: int, share: Share
    ) -> None:
        self.blocks: list[Block] = []
        self._head = head
        self._claim = claim
        self._share = share
        self._limit_nbytes = limit_nbytes
        self._received_nbytes = 0
        #: Whether the body is kept as a whole; None before its start.
        self._is_whole: bool | None = None
        self._json_nbytes = 0
        #: The JSON received so far, or the whole body.
        self._text = bytearray()
        #: From the end of the JSON on: its content, and the bytes before a tensor that the client did not
        #: send.
        self._header: InferHeader | None = None
        self._arrays: Arrays = NO_ARRAYS
        self._prefix = b""
        self._sizes: list[int] = []
        self._tensors: list[ArrivingTensor] = []

    @property
    def json_nbytes(self) -> int:
        """The maximum size of the JSON that ``finish`` has to parse."""
        return len(self._text) if self._is_whole else 0

    @property
    def has_many_objects(self) -> bool:
        """True if short JSON takes long to parse, because much of it becomes Python objects."""
        text = self._text
        return len(text) > _HEADER_NBYTES and text.count(b'"') + text.count(b"{") > _MANY_OBJECTS

    def feed(self, chunk: bytes | memoryview) -> None:
        """Copy the next bytes of the body. Raise RequestError if they violate the protocol or a limit."""
        if self._is_whole is None:
            self._start()
        self._received_nbytes += len(chunk)
        self._check_limit(self._received_nbytes)
        if self._is_whole:
            self._share.hold(self._received_nbytes)
            self._text += chunk
            return
        rest = memoryview(chunk)
        if self._header is None:
            missing = self._json_nbytes - len(self._text)
            self._text += rest[:missing]
            if len(self._text) == self._json_nbytes:
                self._expect_tensors(*header_for(self._head.model_name, bytes(self._text), binary=True))
            rest = rest[missing:]
        if self._header is not None:
            while len(rest) > 0:
                if (not self._tensors or not self._tensors[-1].missing_nbytes) and not self._add_tensor():
                    raise codec.surplus_data(self._head.model_name)
                rest = rest[self._tensors[-1].fill(rest) :]
        placed = sum([one.filled_nbytes for one in self._tensors if one.block is not None])
        self._share.hold(max(0, self._received_nbytes - placed))

    def finish(self) -> tuple[InferRequest, OutputForm]:
        """Return the request and the form of its outputs. Raise RequestError if the body is invalid."""
        if self._is_whole is None:
            self._start()
        name, version, header_length, _, spec = self._head
        if self._is_whole:
            text, self._text = self._text, bytearray()
            return codec.parse_infer_request(name, version, text, header_length, spec)
        header = self._header
        if header is None:
            raise codec.header_out_of_range(header_length or "", self._received_nbytes)
        self._check_sizes(header, self._received_nbytes)
        while self._add_tensor():  # the remaining tensors are empty
            pass
        filled = iter(self._tensors)
        inputs = []
        for one in header.inputs:
            data = one.own_data(self._arrays) if one.nbytes is None else next(filled).data()
            inputs.append(InputTensor(one.name, one.datatype, one.shape, data))
        self.blocks = []
        return header.request(name, version, inputs), header.form

    def _start(self) -> None:
        name, version, header_length, content_length, spec = self._head
        if content_length is not None:
            self._check_limit(content_length)
        self._is_whole = header_length is None
        if header_length is None:
            return
        self._json_nbytes = codec.parse_header_length(header_length, content_length)
        if self._json_nbytes or content_length is None:
            self._is_whole = not 0 < self._json_nbytes <= _HEADER_NBYTES
        else:
            header, self._prefix = codec.raw_header(name, version, spec, content_length)
            self._expect_tensors(header, NO_ARRAYS)

    def _check_limit(self, nbytes: int) -> None:
        if nbytes > self._limit_nbytes:
            raise body_too_large(nbytes, self._limit_nbytes)

    def _expect_tensors(self, header: InferHeader, arrays: Arrays) -> None:
        if self._head.content_length is not None:
            self._check_sizes(header, self._head.content_length)
        self._header, self._arrays = header, arrays
        self._sizes = [one.nbytes for one in header.inputs if one.nbytes is not None]

    def _check_sizes(self, header: InferHeader, body_nbytes: int) -> None:
        available = body_nbytes - self._json_nbytes + len(self._prefix)
        for one in header.inputs:
            available -= one.nbytes or 0
            if available < 0:
                raise codec.missing_data(one.name, -available, self._head.model_name)
        if available > 0:
            raise codec.surplus_data(self._head.model_name)

    def _add_tensor(self) -> bool:
        """Begin the next tensor. Return False if there is none."""
        if len(self._tensors) == len(self._sizes):
            return False
        nbytes = self._sizes[len(self._tensors)]
        self._check_limit(nbytes)
        block = self._claim(nbytes) if nbytes >= LARGE_NBYTES else None
        if block is not None:
            self.blocks.append(block)
        tensor = ArrivingTensor(nbytes, block, self._share)
        tensor.fill(self._prefix)
        self._tensors.append(tensor)
        return True
