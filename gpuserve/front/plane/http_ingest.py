"""A large HTTP inference body while it arrives: each binary tensor goes straight to where it stays.

Pure: chunks in, the same request out that ``http_codec.parse_infer_request`` makes of the whole
body. Tensors from ``LARGE_NBYTES`` on are copied once, from the chunk into a block of the model's
arena; the rest is kept in heap memory. Nothing is allocated on the word of a header alone where the
body's length is known and contradicts it.

::

             header length   the JSON is complete
    START ──┬───────────► JSON ───────────────► TENSORS ──┐
            │ 0, body length known ───────────────▲       ├──► FINISHED
            └───────────────────────────► WHOLE ──────────┘
              no header length, or 0 and the body length is unknown
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

from gpuserve.errors import ResourceExhausted
from gpuserve.front.endpoint.http_codec import (
    LARGE_NBYTES,
    header_out_of_range,
    missing_data,
    parse_header_length,
    parse_infer_request,
    raw_header,
    surplus_data,
)
from gpuserve.front.endpoint.http_header import InferHeader, OutputForm, header_for
from gpuserve.front.endpoint.v2 import Data, InferRequest, InputTensor
from gpuserve.spec import ModelSpec
from gpuserve_worker.memory import Block


class Stage(enum.Enum):
    """What the next bytes of the body are."""

    START = "START"
    JSON = "JSON"
    TENSORS = "TENSORS"
    WHOLE = "WHOLE"
    FINISHED = "FINISHED"


TRANSITIONS: Final[dict[Stage, frozenset[Stage]]] = {
    Stage.START: frozenset({Stage.JSON, Stage.TENSORS, Stage.WHOLE}),
    Stage.JSON: frozenset({Stage.TENSORS}),
    Stage.TENSORS: frozenset({Stage.FINISHED}),
    Stage.WHOLE: frozenset({Stage.FINISHED}),
    Stage.FINISHED: frozenset(),
}


class _Tensor:
    """The memory of one binary input and how far it is filled."""

    __slots__ = ("data", "filled", "view")

    def __init__(self, data: bytearray | Block, prefix: bytes) -> None:
        self.data = data
        self.view = data.view if isinstance(data, Block) else memoryview(data)
        self.view[: len(prefix)] = prefix
        self.filled = len(prefix)

    def fill(self, chunk: memoryview) -> int:
        """Copy as much of a chunk as there is room for; how much that was."""
        taken = min(len(chunk), len(self.view) - self.filled)
        self.view[self.filled : self.filled + taken] = chunk[:taken]
        self.filled += taken
        return taken

    def result(self) -> Data:
        """The data as a request holds it."""
        if isinstance(self.data, Block):
            return self.data
        return bytes(self.data) if len(self.data) < LARGE_NBYTES else self.view


class HttpBodyScanner:
    """Reads one body. ``feed`` its chunks, then ``finish``; any of them may raise ``RequestError``.

    ``header_length`` is the value of ``Inference-Header-Content-Length``, None where it was not
    sent; ``content_length`` is None for a body of unknown length. ``allocate(model_name, nbytes)``
    gives a block of exactly that size, or None for heap memory instead. ``spec`` is the model's
    declaration, which only a raw binary request needs.

    Until ``finish`` returns, ``blocks`` are the caller's to free when it gives the body up; after
    that they belong to the request. After an error nothing more may be fed.
    """

    def __init__(
        self,
        model_name: str,
        model_version: str,
        header_length: str | None,
        content_length: int | None,
        allocate: Callable[[str, int], Block | None],
        limit_nbytes: int,
        spec: ModelSpec | None = None,
    ) -> None:
        self.blocks: list[Block] = []
        self._model_name = model_name
        self._model_version = model_version
        self._header_length = header_length
        self._content_length = content_length
        self._allocate = allocate
        self._limit_nbytes = limit_nbytes
        self._spec = spec
        self._stage = Stage.START
        self._received = 0
        self._json = bytearray()
        self._json_nbytes = 0
        self._whole: list[bytes] = []
        self._header: InferHeader | None = None
        self._prefix = b""
        self._announced: list[int] = []
        self._tensors: list[_Tensor] = []

    def feed(self, chunk: bytes | memoryview) -> None:
        """The next bytes of the body; they are copied.

        Raises:
            RequestError: the body breaks the protocol or a limit.
        """
        if self._stage is Stage.START:
            self._start()
        elif self._stage is Stage.FINISHED:
            raise RuntimeError("a body scanner was fed after its end")
        self._received += len(chunk)
        self._check_limit(self._received)
        if self._stage is Stage.WHOLE:
            self._whole.append(bytes(chunk))
            return
        rest = memoryview(chunk)
        if self._stage is Stage.JSON:
            rest = self._take_json(rest)
        if self._stage is Stage.TENSORS:
            self._take_tensors(rest)

    def finish(self) -> tuple[InferRequest, OutputForm]:
        """The request, and the form its outputs are wanted in, once the whole body was fed.

        Raises:
            RequestError: the body breaks the protocol, or ends too early.
        """
        if self._stage is Stage.START:
            self._start()
        if self._stage is Stage.JSON:
            raise header_out_of_range(self._header_length or "", self._received)
        body_was_collected = self._stage is Stage.WHOLE
        self._enter(Stage.FINISHED)
        return self._parse_whole() if body_was_collected else self._finish_tensors()

    def _enter(self, stage: Stage) -> None:
        if stage not in TRANSITIONS[self._stage]:
            raise RuntimeError(f"a body scanner in {self._stage.value} cannot go to {stage.value}")
        self._stage = stage

    def _start(self) -> None:
        if self._content_length is not None:
            self._check_limit(self._content_length)
        if self._header_length is None:
            self._enter(Stage.WHOLE)
            return
        self._json_nbytes = parse_header_length(self._header_length, self._content_length)
        if self._json_nbytes > 0:
            self._enter(Stage.JSON)
        elif self._content_length is None:
            self._enter(Stage.WHOLE)
        else:
            header, self._prefix = raw_header(
                self._model_name, self._model_version, self._spec, self._content_length
            )
            self._expect_tensors(header)

    def _check_limit(self, nbytes: int) -> None:
        if nbytes > self._limit_nbytes:
            raise ResourceExhausted(
                f"request size of {nbytes} bytes exceeds the maximum allowed input size of "
                f"{self._limit_nbytes} bytes. Use --max-request-nbytes to increase the limit."
            )

    def _take_json(self, chunk: memoryview) -> memoryview:
        missing = self._json_nbytes - len(self._json)
        self._json += chunk[:missing]
        if len(self._json) == self._json_nbytes:
            self._expect_tensors(header_for(self._model_name, bytes(self._json), binary=True))
        return chunk[missing:]

    def _expect_tensors(self, header: InferHeader) -> None:
        self._header = header
        self._announced = [one.nbytes for one in header.inputs if one.nbytes is not None]
        if self._content_length is not None:
            self._check_sizes(header, self._content_length - self._json_nbytes + len(self._prefix))
        self._enter(Stage.TENSORS)

    def _check_sizes(self, header: InferHeader, available: int) -> None:
        """Hold the announced sizes against the bytes there are."""
        for one in header.inputs:
            available -= one.nbytes or 0
            if available < 0:
                raise missing_data(one.name, -available, self._model_name)
        if available > 0:
            raise surplus_data(self._model_name)

    def _take_tensors(self, chunk: memoryview) -> None:
        while len(chunk) > 0:
            if not self._tensors or self._tensors[-1].filled == len(self._tensors[-1].view):
                if len(self._tensors) == len(self._announced):
                    raise surplus_data(self._model_name)
                self._add_tensor()
            chunk = chunk[self._tensors[-1].fill(chunk) :]

    def _add_tensor(self) -> None:
        """Memory for the next binary input; not before its first byte is there."""
        nbytes = self._announced[len(self._tensors)]
        self._check_limit(nbytes)
        block = self._allocate(self._model_name, nbytes) if nbytes >= LARGE_NBYTES else None
        if block is not None:
            self.blocks.append(block)
        self._tensors.append(_Tensor(bytearray(nbytes) if block is None else block, self._prefix))

    def _parse_whole(self) -> tuple[InferRequest, OutputForm]:
        body = b"".join(self._whole)
        self._whole.clear()
        return parse_infer_request(
            self._model_name, self._model_version, body, self._header_length, self._spec
        )

    def _finish_tensors(self) -> tuple[InferRequest, OutputForm]:
        header = self._header
        assert header is not None, "the stage TENSORS is entered with a header"
        self._check_sizes(header, self._received - self._json_nbytes + len(self._prefix))
        while len(self._tensors) < len(self._announced):  # what is left is empty
            self._add_tensor()
        filled = iter(self._tensors)
        inputs = [
            InputTensor(
                one.name,
                one.datatype,
                one.shape,
                one.own_data() if one.nbytes is None else next(filled).result(),
            )
            for one in header.inputs
        ]
        self.blocks = []
        return header.request(self._model_name, self._model_version, inputs), header.form
