"""Bodies of requests that lie in the arena of another driver than the one that runs them, or of none."""

from __future__ import annotations

from gpuserve.front.links.output_memory import LentBlock
from gpuserve.front.requests.inference import InferRequest
from gpuserve_worker.memory.arena import Arena, Block


def bring_home(request: InferRequest, arena: Arena) -> list[Block]:
    """Copy what lies in a former driver's arena to the heap; the blocks that lie in ``arena``."""
    blocks = []
    for one in request.inputs:
        if not isinstance(one.data, Block):
            continue
        if one.data.arena is arena or isinstance(one.data, LentBlock):
            blocks.append(one.data)
            continue
        foreign, one.data = one.data, bytes(one.data.view)
        foreign.free()
    return blocks


def free_body(request: InferRequest) -> None:
    """Give the memory of a request back that no driver has taken."""
    for one in request.inputs:
        if isinstance(one.data, Block):
            one.data.free()
    request.inputs.clear()


def heap_nbytes(request: InferRequest) -> int:
    """Return how many bytes the inputs of a request take on the heap."""
    return sum(len(one.data) for one in request.inputs if isinstance(one.data, bytes | memoryview))
