"""Incremental reader of a large gRPC request: each tensor is copied once, from the chunk that contained it to
the memory that the worker reads.

Pure: chunks in, an ``InferRequest`` out. Only the top level of the ``ModelInferRequest`` is walked here:
entries of ``raw_input_contents`` (field 7) are taken out, and the small rest is parsed by the same code as
every other request. Fields may come in any order and in any cut; field 7 usually comes last, and the model
whose memory is claimed is known only then. The walk is a generator: its position in the code is its position
in the message, and it yields when a chunk is used up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final, TypeAlias

from gpuserve.core.errors import InvalidArgument, ResourceExhausted
from gpuserve.front.ipc.heap_memory import LARGE_NBYTES, ArrivingTensor, Share
from gpuserve.front.protocols.grpc.grpc_protocol import (
    PREFIX_NBYTES,
    oversized_body_error,
    read_prefix,
    truncated_body_error,
)
from gpuserve.front.protocols.grpc.infer_decoder import parse_beside_raws
from gpuserve.front.protocols.grpc.typed_contents import WireType, malformed_message
from gpuserve.front.requests.inference import Data, InferRequest
from gpuserve.front.requests.json_values import MAX_JSON_NBYTES
from gpuserve.front.requests.limits import MAX_INPUTS, MAX_NAME_NBYTES
from gpuserve_worker.memory.arena import Block

#: A request within the limits has fewer top-level fields; each takes some microseconds in Python.
MAX_FIELDS: Final = 4096
#: The size limit of a message beside its raw contents, in bytes: as much as JSON over HTTP.
MAX_HEADER_NBYTES: Final = MAX_JSON_NBYTES
_MODEL_NAME_TAG: Final = 1 << 3 | 2
_MODEL_VERSION_TAG: Final = 2 << 3 | 2
_RAW_TAG: Final = 7 << 3 | 2
_LONGEST_VARINT: Final = 10

_Walk: TypeAlias = Generator[None, None, None]


class GrpcBodyScanner:
    """A reader of one large, uncompressed ``ModelInferRequest``, chunk by chunk.

    The input is the body of a unary call with its prefix, or, if not ``framed``, a message that ends where
    the chunks end. ``claim(model_name, nbytes)`` returns memory for one large tensor, or None, and then the
    tensor stays on the heap. ``share`` counts the heap bytes of the body plus ``kept_nbytes``. ``blocks`` are
    the claimed blocks. The request owns them after ``finish()``, or after ``parse()`` and
    ``transfer_blocks()``; before that, and after any error, ``abort()`` returns them.

    All attributes are the state of the walk, in one object because every step changes several of them.
    """

    def __init__(
        self,
        claim: Callable[[str, int], Block | None],
        limit_nbytes: int,
        share: Share,
        *,
        framed: bool = True,
        kept_nbytes: int = 0,
    ) -> None:
        self.blocks: list[Block] = []
        self._claim = claim
        self._share = share
        self._limit_nbytes = limit_nbytes
        #: The message without its raw contents, parsed by ``parse()``.
        self.header = bytearray()
        self._raws: list[Data] = []
        #: The model version, as far as it is known yet.
        self.model_version = ""
        self._model_name = ""
        self._blocks_model_name = ""
        self._chunk = memoryview(b"")
        self._position = 0
        self._received = kept_nbytes
        self._placed = 0
        self._framed = framed
        self._unread = PREFIX_NBYTES if framed else limit_nbytes
        #: True where the message may end.
        self._is_between = False
        self._complete = False
        #: The tensor whose block is being filled.
        self._tensor: ArrivingTensor | None = None
        self._walk = self._read_body()

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Read the next bytes; never called after an error. Raises InvalidArgument if they are malformed,
        ResourceExhausted if the message is too large, and NoMemory if there is no memory for it now.
        """
        nbytes = len(chunk)
        self._received += nbytes
        if self._tensor is not None and nbytes < self._tensor.missing_nbytes:
            # Nearly every chunk lies within a tensor. The walk would do only this for it.
            self._fill(self._tensor, chunk)
            return
        self._chunk, self._position = memoryview(chunk), 0
        next(self._walk)
        self._chunk, self._position = memoryview(b""), 0
        self._share.hold(self._received - self._placed)

    def parse(self) -> InferRequest:
        """Return the request of a complete body; another thread may call this. The scanner keeps the blocks.

        Raises InvalidArgument if the body is malformed, truncated or contradicts itself, and
        ResourceExhausted if it is too large.
        """
        if not (self._complete or (self._is_between and not self._framed)):
            if not self._framed:
                raise malformed_message("it is truncated")
            raise truncated_body_error(self._received, self._received + self._unread)
        request = parse_beside_raws(self.header, self._raws)
        if self.blocks and request.model_name != self._blocks_model_name:
            raise InvalidArgument("the request names more than one model: expected one model_name")
        return request

    def transfer_blocks(self) -> None:
        """Transfer the blocks to the request that ``parse()`` returned."""
        self._walk.close()
        self.blocks = []

    def finish(self) -> InferRequest:
        """Parse the body, and transfer the blocks to its request."""
        request = self.parse()
        self.transfer_blocks()
        return request

    def abort(self) -> list[Block]:
        """Return the blocks that nobody else frees. Nothing is read after this."""
        self._walk.close()
        self._tensor = None
        self._claim = lambda *_: None  # drops the caller's function, which may refer to this scanner
        blocks, self.blocks = self.blocks, []
        return blocks

    def _read_body(self) -> _Walk:
        if self._framed:
            prefix = bytearray()
            yield from self._read_bytes(PREFIX_NBYTES, prefix.extend)
            _, self._unread = read_prefix(prefix, self._limit_nbytes)
        yield from self._read_message()
        self._complete = True
        while self._position == len(self._chunk):
            yield
        raise oversized_body_error()

    def _read_message(self) -> _Walk:
        fields = 0
        depth = 0  # nesting depth of unknown groups, inside of which no field is ours
        while self._unread:
            fields += 1
            if fields > MAX_FIELDS:
                raise InvalidArgument(f"the request has too many fields, expected at most {MAX_FIELDS}")
            self._is_between = True
            while self._position == len(self._chunk):
                yield
            self._is_between = False
            token = bytearray()
            tag = yield from self._read_varint(token)
            if tag == _RAW_TAG and not depth:
                yield from self._read_raw()
                continue
            self.header += token
            depth += (tag & 7 == WireType.GROUP) - (tag & 7 == WireType.END_GROUP)
            yield from self._read_field(tag, is_ours=not depth)

    def _read_field(self, tag: int, *, is_ours: bool) -> _Walk:
        """Copy the value of a field to the header; protobuf checks it later."""
        header = self.header
        match tag & 7:
            case WireType.VARINT:
                yield from self._read_varint(header)
            case WireType.FIXED64:
                yield from self._read_bytes(8, header.extend)
            case WireType.LENGTH:
                nbytes = yield from self._read_varint(header)
                if len(header) + nbytes > MAX_HEADER_NBYTES:
                    raise ResourceExhausted(
                        f"the request has {len(header) + nbytes} bytes beside raw_input_contents, expected "
                        f"at most {MAX_HEADER_NBYTES}. Please use raw_input_contents for large inputs"
                    )
                yield from self._read_bytes(nbytes, header.extend)
                if is_ours and tag in (_MODEL_NAME_TAG, _MODEL_VERSION_TAG) and nbytes <= MAX_NAME_NBYTES:
                    text = header[len(header) - nbytes :].decode("utf-8", "replace")
                    if tag == _MODEL_NAME_TAG:
                        self._model_name = text
                    else:
                        self.model_version = text
            case WireType.FIXED32:
                yield from self._read_bytes(4, header.extend)
            case WireType.GROUP | WireType.END_GROUP:
                pass
            case wire_type:
                raise malformed_message(f"a field has wire type {wire_type}")

    def _read_raw(self) -> _Walk:
        if len(self._raws) == MAX_INPUTS:
            raise InvalidArgument(
                f"the request has over {MAX_INPUTS} entries in raw_input_contents, expected one an input"
            )
        nbytes = yield from self._read_varint(bytearray())
        self._check_length(nbytes)
        block = self._claim_block(nbytes)
        tensor = ArrivingTensor(nbytes, block, self._share)
        self._tensor = None if block is None else tensor
        while tensor.missing_nbytes:
            piece = self._chunk[self._position :]
            if not piece:
                yield
                continue
            self._position += self._fill(tensor, piece)
        self._tensor = None
        self._raws.append(tensor.data())

    def _claim_block(self, nbytes: int) -> Block | None:
        """Claim a block for a large tensor, or return None."""
        if nbytes < LARGE_NBYTES or not self._model_name:
            return None
        if self.blocks and self._blocks_model_name != self._model_name:
            return None
        block = self._claim(self._model_name, nbytes)
        if block is not None:
            self.blocks.append(block)
            self._blocks_model_name = self._model_name
        return block

    def _fill(self, tensor: ArrivingTensor, piece: bytes | bytearray | memoryview) -> int:
        nbytes = tensor.fill(piece)
        self._unread -= nbytes
        if tensor.block is not None:
            self._placed += nbytes
        return nbytes

    def _read_bytes(self, nbytes: int, put: Callable[[memoryview], None]) -> _Walk:
        """Pass the next ``nbytes`` to ``put``, piece by piece as they arrive."""
        self._check_length(nbytes)
        while nbytes:
            piece = self._chunk[self._position : self._position + nbytes]
            if not piece:
                yield
                continue
            put(piece)
            self._position += len(piece)
            self._unread -= len(piece)
            nbytes -= len(piece)

    def _read_varint(self, copy: bytearray) -> Generator[None, None, int]:
        """Return the next varint; append its bytes unchanged to ``copy``."""
        number = 0
        for position in range(_LONGEST_VARINT):
            self._check_length(1)
            while self._position == len(self._chunk):
                yield
            byte = self._chunk[self._position]
            self._position += 1
            self._unread -= 1
            copy.append(byte)
            number |= (byte & 0x7F) << 7 * position
            if byte < 0x80:
                return number
        raise malformed_message("a number has over 64 bits")

    def _check_length(self, nbytes: int) -> None:
        if nbytes > self._unread:
            if not self._framed:
                raise ResourceExhausted(f"a request is over the limit of {self._limit_nbytes} bytes")
            raise malformed_message(f"a field of {nbytes} bytes begins {self._unread} bytes before its end")
