"""The scanner of large HTTP inference bodies: copies each tensor to its place as the body arrives. Pure.

The result equals that of ``infer_codec.parse_infer_request`` for the whole body. Tensors from
``LARGE_NBYTES`` on are copied once, into a block of the model's arena; a share counts the rest. If the known
length of the body contradicts the header, nothing is allocated.

::

             header length   the JSON is complete
    START ──┬───────────► JSON ───────────────► TENSORS ──┐
            │ 0, body length known ───────────────▲       ├──► FINISHED
            └───────────────────────────► WHOLE ──────────┘
              no header length, a long one, or 0 and the body length is unknown
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final, NamedTuple

from gpuserve.core.errors import ResourceExhausted
from gpuserve.core.states import StepTable
from gpuserve.front.ipc.heap_memory import Share
from gpuserve.front.protocols.http import infer_codec as codec
from gpuserve.front.protocols.http.infer_codec import LARGE_NBYTES
from gpuserve.front.protocols.http.infer_json import NO_ARRAYS, Arrays, InferHeader, OutputForm, header_for
from gpuserve.front.requests.inference import Data, InferRequest, InputTensor
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Block

#: JSON before tensors up to this size is parsed as soon as complete.
_HEADER_NBYTES: Final = 64 << 10
#: Strings and members become Python objects, unlike numbers in arrays: parsing some thousand takes 1 ms.
_MANY_OBJECTS: Final = 16 << 10


class BodyPart(enum.Enum):
    """The part of the body that the next bytes belong to."""

    START = "START"
    JSON = "JSON"
    TENSORS = "TENSORS"
    WHOLE = "WHOLE"
    FINISHED = "FINISHED"


PARTS: Final = StepTable(
    "a body scanner",
    {
        BodyPart.START: {BodyPart.JSON, BodyPart.TENSORS, BodyPart.WHOLE},
        BodyPart.JSON: {BodyPart.TENSORS},
        BodyPart.TENSORS: {BodyPart.FINISHED},
        BodyPart.WHOLE: {BodyPart.FINISHED},
        BodyPart.FINISHED: set(),
    },
)


class BodyHead(NamedTuple):
    """A body's properties before its first byte: length or None; ``spec`` for raw binary requests."""

    model_name: str
    model_version: str
    header_length: str | None
    content_length: int | None
    spec: ModelSpec | None = None


class _BinaryTensor:
    """The memory of a binary input of ``nbytes``; it grows with arriving bytes, not by the header alone."""

    __slots__ = ("_block", "_heap", "_nbytes", "_reserved", "_share", "filled")

    def __init__(self, nbytes: int, block: Block | None, prefix: bytes, share: Share) -> None:
        self.filled = 0
        self._nbytes = nbytes
        self._block = block
        self._heap = bytearray()
        self._share = share
        self._reserved = 0
        self.fill(memoryview(prefix))

    @property
    def is_full(self) -> bool:
        return self.filled == self._nbytes

    @property
    def placed_nbytes(self) -> int:
        return 0 if self._block is None else self.filled

    def fill(self, chunk: memoryview) -> int:
        """Copy as much of a chunk as there is room for. Return the number of copied bytes."""
        copied = min(len(chunk), self._nbytes - self.filled)
        end = self.filled + copied
        if self._block is None:
            self._heap += chunk[:copied]
        else:
            if end > self._reserved:
                self._reserved = self._share.reserve(self._block, end)
            self._block.view[self.filled : end] = chunk[:copied]
        self.filled = end
        return copied

    def result(self) -> Data:
        if self._block is not None:
            return self._block
        return bytes(self._heap) if self._nbytes < LARGE_NBYTES else memoryview(self._heap)


class _BinaryTensors:
    """The binary tensors of a header, after ``prefix``. ``claim(nbytes)`` returns a block or None."""

    def __init__(
        self,
        header: InferHeader,
        arrays: Arrays,
        prefix: bytes,
        claim: Callable[[int], Block | None],
        check_limit: Callable[[int], None],
        share: Share,
    ) -> None:
        self.header = header
        self.prefix = prefix
        self._arrays = arrays
        self.blocks: list[Block] = []
        self._sizes = [one.nbytes for one in header.inputs if one.nbytes is not None]
        self._tensors_made: list[_BinaryTensor] = []
        self._claim = claim
        self._check_limit = check_limit
        self._share = share

    def copy(self, chunk: memoryview) -> memoryview:
        """Copy a chunk to the tensors. Return the part of the chunk after the last tensor."""
        while len(chunk) > 0:
            if not self._tensors_made or self._tensors_made[-1].is_full:
                if len(self._tensors_made) == len(self._sizes):
                    break
                self._add()
            chunk = chunk[self._tensors_made[-1].fill(chunk) :]
        return chunk

    @property
    def placed_nbytes(self) -> int:
        return sum(one.placed_nbytes for one in self._tensors_made)

    def inputs(self) -> list[InputTensor]:
        """Return all inputs of the request, after the last byte was copied."""
        while len(self._tensors_made) < len(self._sizes):  # the remaining tensors are empty
            self._add()
        filled = iter(self._tensors_made)
        inputs = []
        for one in self.header.inputs:
            data = one.own_data(self._arrays) if one.nbytes is None else next(filled).result()
            inputs.append(InputTensor(one.name, one.datatype, one.shape, data))
        return inputs

    def _add(self) -> None:
        nbytes = self._sizes[len(self._tensors_made)]
        self._check_limit(nbytes)
        block = self._claim(nbytes) if nbytes >= LARGE_NBYTES else None
        if block is not None:
            self.blocks.append(block)
        self._tensors_made.append(_BinaryTensor(nbytes, block, self.prefix, self._share))


class HttpBodyScanner:
    """The scanner of one body. Call ``feed`` with its chunks, then ``finish``; each may raise
    ``RequestError``, after which nothing more may be fed.

    ``claim(nbytes)`` returns a block of that size for a large tensor, or None for heap memory. The caller
    frees ``blocks`` if it drops the body; once ``finish`` returns, they belong to the request.
    """

    def __init__(
        self, head: BodyHead, claim: Callable[[int], Block | None], limit_nbytes: int, share: Share
    ) -> None:
        self._head = head
        self._claim = claim
        self._share = share
        self._limit_nbytes = limit_nbytes
        self._part = BodyPart.START
        self._received_nbytes = 0
        self._json_nbytes = 0
        #: The JSON received so far, or the whole body.
        self._text = bytearray()
        self._tensors: _BinaryTensors | None = None

    @property
    def blocks(self) -> list[Block]:
        """The blocks that the caller frees."""
        return [] if self._tensors is None else self._tensors.blocks

    @property
    def json_nbytes(self) -> int:
        """The maximum size of the JSON that ``finish`` has to parse."""
        return len(self._text) if self._part is BodyPart.WHOLE else 0

    @property
    def has_many_objects(self) -> bool:
        """True if short JSON takes long to parse, because much of it becomes Python objects."""
        text = self._text
        return len(text) > _HEADER_NBYTES and text.count(b'"') + text.count(b"{") > _MANY_OBJECTS

    def feed(self, chunk: bytes | memoryview) -> None:
        """Copy the next bytes of the body. Raise RequestError if they violate the protocol or a limit."""
        if self._part is BodyPart.START:
            self._start()
        elif self._part is BodyPart.FINISHED:
            raise RuntimeError("a body scanner was fed after its end")
        self._received_nbytes += len(chunk)
        self._check_limit(self._received_nbytes)
        if self._part is BodyPart.WHOLE:
            self._share.hold(self._received_nbytes)
            self._text += chunk
            return
        rest = memoryview(chunk)
        if self._part is BodyPart.JSON:
            missing = self._json_nbytes - len(self._text)
            self._text += rest[:missing]
            if len(self._text) == self._json_nbytes:
                self._start_tensors(*header_for(self._head.model_name, bytes(self._text), binary=True), b"")
            rest = rest[missing:]
        if self._tensors is not None and self._tensors.copy(rest):
            raise codec.surplus_data(self._head.model_name)
        placed = 0 if self._tensors is None else self._tensors.placed_nbytes
        self._share.hold(max(0, self._received_nbytes - placed))

    def finish(self) -> tuple[InferRequest, OutputForm]:
        """Return the request and the form of its outputs. Raise RequestError if the body is invalid."""
        if self._part is BodyPart.START:
            self._start()
        name, version, header_length, _, spec = self._head
        if self._part is BodyPart.JSON:
            raise codec.header_out_of_range(header_length or "", self._received_nbytes)
        self._enter(BodyPart.FINISHED)
        tensors = self._tensors
        if tensors is None:
            text, self._text = self._text, bytearray()
            return codec.parse_infer_request(name, version, text, header_length, spec)
        self._check_sizes(tensors, self._received_nbytes)
        inputs = tensors.inputs()
        tensors.blocks = []
        return tensors.header.request(name, version, inputs), tensors.header.form

    def _enter(self, part: BodyPart) -> None:
        self._part = PARTS.step(self._part, part)

    def _start(self) -> None:
        name, version, header_length, content_length, spec = self._head
        if content_length is not None:
            self._check_limit(content_length)
        if header_length is None:
            self._enter(BodyPart.WHOLE)
            return
        self._json_nbytes = codec.parse_header_length(header_length, content_length)
        if 0 < self._json_nbytes <= _HEADER_NBYTES:
            self._enter(BodyPart.JSON)
        elif self._json_nbytes or content_length is None:
            self._enter(BodyPart.WHOLE)
        else:
            header, prefix = codec.raw_header(name, version, spec, content_length)
            self._start_tensors(header, NO_ARRAYS, prefix)

    def _check_limit(self, nbytes: int) -> None:
        if nbytes > self._limit_nbytes:
            raise ResourceExhausted(
                f"request size of {nbytes} bytes exceeds the maximum allowed input size of "
                f"{self._limit_nbytes} bytes. Use --max-request-nbytes to increase the limit."
            )

    def _start_tensors(self, header: InferHeader, arrays: Arrays, prefix: bytes) -> None:
        """Expect tensors from now on, after ``prefix`` bytes that the client did not send."""
        tensors = _BinaryTensors(header, arrays, prefix, self._claim, self._check_limit, self._share)
        if self._head.content_length is not None:
            self._check_sizes(tensors, self._head.content_length)
        self._enter(BodyPart.TENSORS)
        self._tensors = tensors

    def _check_sizes(self, tensors: _BinaryTensors, body_nbytes: int) -> None:
        available = body_nbytes - self._json_nbytes + len(tensors.prefix)
        for one in tensors.header.inputs:
            available -= one.nbytes or 0
            if available < 0:
                raise codec.missing_data(one.name, -available, self._head.model_name)
        if available > 0:
            raise codec.surplus_data(self._head.model_name)
