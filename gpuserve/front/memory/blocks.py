"""Bodies of requests that the driver they were meant for does not take: because they lie in the arena of
another one, or because there is none.
"""

from __future__ import annotations

from gpuserve.front.links.output_memory import LentBlock
from gpuserve.front.v2.types import InferRequest
from gpuserve_worker.memory.arena import Arena, Block


def bring_home(request: InferRequest, arena: Arena) -> list[Block]:
    """Copy what lies in other arenas to the heap, and free it there; the blocks that lie in ``arena``.

    A request whose body began to arrive before its model was loaded anew is run by the new workers, which
    do not know the memory of the old ones.
    """
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
