"""Puts the tensors of a batch where its worker finds them: inside the message when they are small,
side by side in the model's arena otherwise. A large request alone in its batch stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuserve.front.endpoint.v2 import Data, InferRequest
from gpuserve_worker.memory import Arena, Block
from gpuserve_worker.wire import INLINE_NBYTES, Payload, Ref, WireTensor


class Gathered(NamedTuple):
    """A batch's tensors, and the blocks that the batch owns until its worker is done with them.

    ``in_place`` blocks still belong to the one request of the batch: the worker sees the very bytes
    that a retry would need.
    """

    tensors: tuple[WireTensor, ...]
    blocks: list[Block]
    in_place: bool


def gather(requests: Sequence[InferRequest], rows: int, batched: bool, nbytes: int, arena: Arena) -> Gathered:
    """The inputs of the requests, concatenated by rows.

    All requests have the same inputs in the same order, with the same inner shapes (``merge_key``).
    ``rows`` is the batch's sum of rows, ``nbytes`` that of its bytes.

    Raises:
        OutOfMemory: the arena has no room; nothing stays allocated.
    """
    first = requests[0]
    blocks: list[Block] = []
    tensors: list[WireTensor] = []
    in_place = False
    try:
        for position, tensor in enumerate(first.inputs):
            parts = [one.inputs[position].data for one in requests] if len(requests) > 1 else [tensor.data]
            payload: Payload
            if nbytes <= INLINE_NBYTES:
                payload = b"".join([_view(part) for part in parts])
            elif len(parts) == 1 and isinstance(parts[0], Block):
                in_place = True
                payload = Ref(parts[0].segment, parts[0].offset, parts[0].nbytes)
            else:
                block = _join(parts, arena)
                blocks.append(block)
                payload = Ref(block.segment, block.offset, block.nbytes)
            shape = (rows, *tensor.shape[1:]) if batched else tensor.shape
            tensors.append(WireTensor(tensor.name, tensor.datatype, shape, payload))
    except BaseException:
        for block in blocks:
            arena.free(block)
        raise
    return Gathered(tuple(tensors), blocks, in_place)


def _view(data: Data) -> bytes | memoryview:
    return data.view if isinstance(data, Block) else data


def _join(parts: Sequence[Data], arena: Arena) -> Block:
    block = arena.allocate(sum(map(len, parts)))
    view, position = block.view, 0
    for part in parts:
        end = position + len(part)
        view[position:end] = _view(part)
        position = end
    return block
