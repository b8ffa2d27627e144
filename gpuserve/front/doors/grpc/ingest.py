"""A large gRPC request, read while it arrives: its tensors are copied once, from the chunk they came
in to the place where the worker will read them.

Pure: chunks in, an ``InferRequest`` out; memory comes from a callable and is counted by a share. One unary
call's body is five bytes of framing and one ``ModelInferRequest``; only its top level is walked here.
Entries of ``raw_input_contents`` (field 7) are taken out of it, and the rest, which is small, is kept
as it came and parsed by the same code as every other request. Fields may come in any order and in
any cut; field 7 usually comes last, and only then is the model, whose memory is asked for, known.

The walk is a generator: where it stands in the code is where it is in the message, and it yields
when a chunk is used up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final, TypeAlias

from gpuserve.core.errors import InvalidArgument, ResourceExhausted
from gpuserve.front.doors.grpc.framing import PREFIX_NBYTES, read_prefix, surplus, truncated
from gpuserve.front.doors.grpc.requests import parse_beside_raws
from gpuserve.front.doors.grpc.responses import LARGE_NBYTES
from gpuserve.front.doors.grpc.typed_contents import WireType, malformed
from gpuserve.front.memory.intake import Share
from gpuserve.front.v2.json_values import MAX_JSON_NBYTES
from gpuserve.front.v2.limits import MAX_INPUTS, MAX_NAME_NBYTES
from gpuserve.front.v2.types import Data, InferRequest
from gpuserve_worker.memory.arena import Block

#: A request within the limits has fewer fields at its top level; each takes some microseconds in Python.
MAX_FIELDS: Final = 4096
#: What a message may hold beside its raw contents, in bytes: as much as JSON over HTTP.
MAX_HEADER_NBYTES: Final = MAX_JSON_NBYTES
_MODEL_NAME_TAG: Final = 1 << 3 | 2
_MODEL_VERSION_TAG: Final = 2 << 3 | 2
_RAW_TAG: Final = 7 << 3 | 2
_LONGEST_VARINT: Final = 10

_Walk: TypeAlias = Generator[None, None, None]


class GrpcBodyScanner:
    """Reads one large ``ModelInferRequest``, uncompressed, chunk by chunk: the body of a unary call, with
    its prefix, or, if not ``framed``, a message whose end is where the chunks end.

    ``claim(model_name, nbytes)`` gives memory for one large tensor, or None, and then the tensor
    stays on the heap; ``share`` holds what the body takes of that, ``kept_nbytes`` more. ``blocks`` are the
    ones given so far. They are the request's after ``finish()``, or ``parse()`` and ``hand_over()``; before,
    and whenever an error was raised, ``abort()`` hands them back.

    Its attributes are where the walk stands, in one object because every step of it moves several of them.
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
        #: The message without its raw contents, which ``parse()`` reads.
        self.header = bytearray()
        self._raws: list[Data] = []
        #: As far as it is known yet.
        self.model_version = ""
        self._model_name = ""
        self._blocks_model_name = ""
        self._chunk = memoryview(b"")
        self._position = 0
        self._received = kept_nbytes
        self._placed = 0
        self._framed = framed
        self._unread = PREFIX_NBYTES if framed else limit_nbytes
        #: Whether the message may end here.
        self._is_between = False
        self._complete = False
        #: The block that is being filled, how far, and how far it may be.
        self._target: memoryview | None = None
        self._filled = 0
        self._reserved = 0
        self._walk = self._body()

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take the next bytes, never after an error; InvalidArgument: malformed; ResourceExhausted: too
        large; NoMemory: there is none for it now.
        """
        nbytes = len(chunk)
        self._received += nbytes
        if self._target is not None and nbytes < len(self._target) - self._filled:
            # In the middle of a tensor, where nearly every chunk is: the walk would only do this.
            self._put(self._target, chunk)
            return
        self._chunk, self._position = memoryview(chunk), 0
        next(self._walk)
        self._chunk, self._position = memoryview(b""), 0
        self._share.hold(self._received - self._placed)

    def parse(self) -> InferRequest:
        """Return the request of a body that has ended; another thread may call this. Its blocks stay here.

        Raises InvalidArgument if it is malformed, truncated or contradicts itself, and ResourceExhausted if
        it is too large.
        """
        if not (self._complete or (self._is_between and not self._framed)):
            if not self._framed:
                raise malformed("it is truncated")
            raise truncated(self._received, self._received + self._unread)
        request = parse_beside_raws(self.header, self._raws)
        if self.blocks and request.model_name != self._blocks_model_name:
            raise InvalidArgument("the request names more than one model: expected one model_name")
        return request

    def hand_over(self) -> None:
        """Leave the blocks to the request that ``parse()`` returned."""
        self._walk.close()
        self.blocks = []

    def finish(self) -> InferRequest:
        """Do both."""
        request = self.parse()
        self.hand_over()
        return request

    def abort(self) -> list[Block]:
        """The blocks that nobody else will free. Nothing is read after this."""
        self._walk.close()
        self._target = None
        self._claim = lambda *_: None  # the caller's function may refer to this scanner
        blocks, self.blocks = self.blocks, []
        return blocks

    def _body(self) -> _Walk:
        if self._framed:
            prefix = bytearray()
            yield from self._copy(PREFIX_NBYTES, prefix.extend)
            _, self._unread = read_prefix(prefix, self._limit_nbytes)
        yield from self._message()
        self._complete = True
        while self._position == len(self._chunk):
            yield
        raise surplus()

    def _message(self) -> _Walk:
        fields = 0
        depth = 0  # inside unknown groups, where no field is ours
        while self._unread:
            fields += 1
            if fields > MAX_FIELDS:
                raise InvalidArgument(f"the request has too many fields, expected at most {MAX_FIELDS}")
            self._is_between = True
            while self._position == len(self._chunk):
                yield
            self._is_between = False
            token = bytearray()
            tag = yield from self._varint(token)
            if tag == _RAW_TAG and not depth:
                yield from self._raw()
                continue
            self.header += token
            depth += (tag & 7 == WireType.GROUP) - (tag & 7 == WireType.END_GROUP)
            yield from self._field(tag, is_ours=not depth)

    def _field(self, tag: int, *, is_ours: bool) -> _Walk:
        """What follows a tag goes to the header as it is; protobuf judges it in the end."""
        header = self.header
        match tag & 7:
            case WireType.VARINT:
                yield from self._varint(header)
            case WireType.FIXED64:
                yield from self._copy(8, header.extend)
            case WireType.LENGTH:
                nbytes = yield from self._varint(header)
                if len(header) + nbytes > MAX_HEADER_NBYTES:
                    raise ResourceExhausted(
                        f"the request has {len(header) + nbytes} bytes beside raw_input_contents, expected "
                        f"at most {MAX_HEADER_NBYTES}. Please use raw_input_contents for large inputs"
                    )
                yield from self._copy(nbytes, header.extend)
                if is_ours and tag in (_MODEL_NAME_TAG, _MODEL_VERSION_TAG) and nbytes <= MAX_NAME_NBYTES:
                    self._note_model(tag, header[len(header) - nbytes :].decode("utf-8", "replace"))
            case WireType.FIXED32:
                yield from self._copy(4, header.extend)
            case WireType.GROUP | WireType.END_GROUP:
                pass
            case wire_type:
                raise malformed(f"a field has wire type {wire_type}")

    def _note_model(self, tag: int, text: str) -> None:
        if tag == _MODEL_NAME_TAG:
            self._model_name = text
        else:
            self.model_version = text

    def _raw(self) -> _Walk:
        """One entry of ``raw_input_contents``: to a block, or to the heap."""
        if len(self._raws) == MAX_INPUTS:
            raise InvalidArgument(
                f"the request has over {MAX_INPUTS} entries in raw_input_contents, expected one an input"
            )
        nbytes = yield from self._varint(bytearray())
        block = self._place(nbytes)
        if block is None:
            heap = bytearray()
            yield from self._copy(nbytes, heap.extend)
            self._raws.append(memoryview(heap) if nbytes >= LARGE_NBYTES else bytes(heap))
        else:
            self._raws.append(block)
            yield from self._fill(block.view[:nbytes])

    def _place(self, nbytes: int) -> Block | None:
        """A block for this many bytes, if they are many and are really there to come."""
        if nbytes < LARGE_NBYTES or not self._model_name:
            return None
        if self.blocks and self._blocks_model_name != self._model_name:
            return None
        self._check_length(nbytes)
        block = self._claim(self._model_name, nbytes)
        if block is not None:
            self.blocks.append(block)
            self._blocks_model_name = self._model_name
        return block

    def _fill(self, target: memoryview) -> _Walk:
        """Copy the next bytes to the end of ``target``, as they come."""
        self._check_length(len(target))
        self._target, self._filled, self._reserved = target, 0, 0
        while (left := len(target) - self._filled) > 0:
            piece = self._chunk[self._position : self._position + left]
            if not piece:
                yield
                continue
            self._position += len(piece)
            self._put(target, piece)
        self._target = None

    def _put(self, target: memoryview, piece: bytes | bytearray | memoryview) -> None:
        nbytes = len(piece)
        end = self._filled + nbytes
        if end > self._reserved:
            self._reserved = self._share.reserve(self.blocks[-1], end)
        target[self._filled : end] = piece
        self._filled = end
        self._placed += nbytes
        self._unread -= nbytes

    def _copy(self, nbytes: int, put: Callable[[memoryview], None]) -> _Walk:
        """Hand the next ``nbytes`` to ``put``, piece by piece as they come."""
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

    def _varint(self, copy: bytearray) -> Generator[None, None, int]:
        """The next number; its bytes are appended to ``copy`` as they are."""
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
        raise malformed("a number has over 64 bits")

    def _check_length(self, nbytes: int) -> None:
        if nbytes > self._unread:
            if not self._framed:
                raise ResourceExhausted(f"a request is over the limit of {self._limit_nbytes} bytes")
            raise malformed(f"a field of {nbytes} bytes begins {self._unread} bytes before its end")
