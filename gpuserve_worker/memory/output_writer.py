"""From checked outputs to tensors on the wire: small ones into the message, the others into the worker's
output arena or, where a client wants that, into its own region of shared memory. Only bytes are copied here.
What an output is, and whether it may be one, is known before; see ``outputs.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuserve_worker.calling.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.memory.arena import Arena, Block
from gpuserve_worker.memory.copying import copy
from gpuserve_worker.memory.regions import ClientRegions, RegionError
from gpuserve_worker.protocol.payloads import requests_as_tuples
from gpuserve_worker.protocol.tensor import BYTES
from gpuserve_worker.protocol.wire import (
    INLINE_NBYTES,
    Payload,
    Place,
    Ref,
    WireFailure,
    WireRequest,
    WireTensor,
)


class Written(NamedTuple):
    """The fields of a ``Done`` or ``Yield`` that hold the answers to a batch."""

    outputs: tuple[WireTensor, ...] | None
    responses: tuple[tuple[WireTensor, ...] | WireFailure | None, ...] | None
    parameters: tuple[dict[str, Any], ...]


class OutputWriter:
    """Puts checked outputs where the front reads them, and keeps the blocks until it has."""

    def __init__(self, arena: Arena, regions: ClientRegions) -> None:
        self._arena = arena
        self._regions = regions
        self._blocks: dict[tuple[int, int], Block] = {}
        # A callable may ask other models from any of its threads, and what it asks is written here too.
        self._lock = threading.Lock()
        self._closed = False

    def write(self, answers: BatchAnswers, requests: Sequence[WireRequest | int]) -> Written:
        """The answers to these requests; after ``close()`` nothing is written. Raises ``OutOfMemory``, or
        ``RegionError`` where a client's region that they are a part of has shrunk; nothing is kept then.
        """
        with self._lock:
            return Written(None, None, ()) if self._closed else self._write(answers, requests)

    def _write(self, answers: BatchAnswers, requests: Sequence[WireRequest | int]) -> Written:
        taken: list[Block] = []
        inline = Budget(INLINE_NBYTES)
        try:
            if answers.whole is not None:
                whole = self._tensors(answers.whole, inline, taken)
                self._check(answers.sources)
                return Written(whole, None, answers.parameters)
            responses = tuple(
                [
                    one
                    if one is None or isinstance(one, WireFailure)
                    else self._response(one, request, inline, taken)
                    for one, request in zip(answers.each or (), requests_as_tuples(requests), strict=True)
                ]
            )
            self._check(answers.sources)
            return Written(None, responses, answers.parameters)
        except BaseException:
            self._abandon(taken)
            raise

    def _abandon(self, taken: list[Block]) -> None:
        self._free((block.segment, block.offset) for block in taken)

    def tensors(self, outputs: list[CheckedOutput]) -> tuple[WireTensor, ...]:
        """Tensors that are no answer, but come back by ``Free`` as those do; raises as ``write``."""
        return self.write(BatchAnswers(outputs, None), ()).outputs or ()

    def free(self, places: Iterable[tuple[int, int]]) -> None:
        """The front has read these blocks. Raises ``KeyError`` where no block begins there."""
        with self._lock:
            self._free(places)

    def _free(self, places: Iterable[tuple[int, int]]) -> None:
        for segment, offset in places:
            self._arena.free(self._blocks.pop((segment, offset)))

    def shrink(self) -> None:
        with self._lock:
            self._arena.shrink()

    def close(self) -> None:
        """Give the arena up. What the front has not read is taken back first: a view would keep it mapped."""
        with self._lock:
            self._closed = True
            self._free(list(self._blocks))
            self._arena.close()

    def _check(self, sources: Iterable[Place]) -> None:
        for place in sources:
            self._regions.check(place)

    def _response(
        self, outputs: list[CheckedOutput], request: WireRequest, inline: Budget, taken: list[Block]
    ) -> tuple[WireTensor, ...] | WireFailure:
        if not request[3]:
            return self._tensors(outputs, inline, taken)
        places = {name: Place(*place) for name, place in request[3]}
        placed: dict[str, WireTensor] = {}
        for output in outputs:
            if output.name in places:
                try:
                    placed[output.name] = self._placed(output, places[output.name], taken)
                except RegionError as error:
                    return WireFailure("INVALID_ARGUMENT", str(error))
                except _TooSmall as error:
                    return WireFailure("INTERNAL", str(error))
        if len(placed) == len(outputs):
            return tuple(placed.values())
        others = self._tensors([one for one in outputs if one.name not in places], inline, taken)
        by_name = placed | {one.name: one for one in others}
        return tuple([by_name[output.name] for output in outputs])

    def _placed(self, output: CheckedOutput, place: Place, taken: list[Block]) -> WireTensor:
        used = used_place(output, place)
        self._regions[used.region].write(used, lambda memory: fill(memory, output))
        return WireTensor(output.name, output.datatype, output.shape, used)

    def _tensors(
        self, outputs: list[CheckedOutput], inline: Budget, taken: list[Block]
    ) -> tuple[WireTensor, ...]:
        return tuple(
            [
                WireTensor(
                    one.name,
                    one.datatype,
                    one.shape,
                    as_bytes(one) if inline.take(one.nbytes) else self._in_block(one, taken),
                )
                for one in outputs
            ]
        )

    def _in_block(self, output: CheckedOutput, taken: list[Block]) -> Payload:
        block = self._block(output, taken)
        fill(block.view, output)
        return Ref(block.segment, block.offset, output.nbytes)

    def _block(self, output: CheckedOutput, taken: list[Block]) -> Block:
        block = self._arena.allocate(output.nbytes)
        self._blocks[block.segment, block.offset] = block
        taken.append(block)
        return block


class _TooSmall(Exception):
    """A client's region has no room for an output; the text is for the client."""


def used_place(output: CheckedOutput, place: Place) -> Place:
    """The part of a client's place that an output fills; raises ``_TooSmall``, which the response says."""
    if output.nbytes > place.nbytes:
        raise _TooSmall(
            f"shared memory size specified with the request for output '{output.name}' ({place.nbytes} "
            f"bytes) should be at least {output.nbytes} bytes to hold the results"
        )
    return Place(place.region, place.offset, output.nbytes)


class Budget:
    """Bytes that may still travel in a message."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def take(self, nbytes: int) -> bool:
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True


def as_bytes(output: CheckedOutput) -> bytes:
    """The bytes of an output on the host, row-major, to travel in a message."""
    parts = output.parts
    if output.datatype == BYTES:
        return b"".join(parts)
    if len(parts) == 1 and parts[0].dtype == output.dtype:
        one: bytes = parts[0].tobytes()
        return one
    memory = bytearray(output.nbytes)
    fill(memoryview(memory), output)
    return bytes(memory)


def fill(memory: memoryview, output: CheckedOutput) -> None:
    """Write an output row-major to memory of its ``nbytes``: its parts along axis 0, cast as they go."""
    position = 0
    if output.datatype == BYTES:
        for part in output.parts:
            memory[position : position + len(part)] = part
            position += len(part)
        return
    parts, dtype = output.parts, output.dtype
    whole = np.ndarray(output.shape, dtype, memory)
    if len(parts) == 1 and parts[0].dtype == dtype:  # nearly always, and nothing is cast
        copy(whole, parts[0])
        return
    with np.errstate(all="ignore"):  # a NaN cast to an integer is the callable's business
        if len(parts) == 1:
            np.copyto(whole, parts[0], casting="unsafe")
            return
        for part in parts:
            np.copyto(whole[position : position + len(part)], part, casting="unsafe")
            position += len(part)
