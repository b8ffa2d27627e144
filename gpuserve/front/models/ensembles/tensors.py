"""Who holds what between the steps of an ensemble: the same bytes for all of their readers, lent and not
copied, and the word to their owner when the last is through.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gpuserve.front.links.export_memory import KeptTensor
from gpuserve.front.links.output_memory import LentBlock, OutputMemory
from gpuserve.front.requests.inference import Data, InferResponse, OutputTensor, RegionSlice
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.tensor import ITEMSIZE, element_count
from gpuserve_worker.protocol.wire import INLINE_NBYTES


class Holders:
    """Those who hold one thing, which is closed when the last lets go. The first is whoever made this."""

    __slots__ = ("_close", "_count")

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._count = 1

    def share(self, readers: int, lent: Callable[[Callable[[], None]], Data]) -> list[Data]:
        """The thing for so many holders more; ``lent`` makes it for one, given what that calls to let go."""
        self._count += readers
        return [lent(self.let_go) for _ in range(readers)]

    def let_go(self) -> None:
        """Count one holder less; the last closes the thing."""
        self._count -= 1
        if not self._count:
            self._close()


def of_request(data: Data, memory: OutputMemory, readers: int) -> list[Data]:
    """An input of a request for each of its readers. Blocks, in ``memory`` or lent, are freed by the last."""
    if not isinstance(data, Block):
        return [data] * readers
    holders, shared = Holders(data.free), readers > 1
    if isinstance(data, LentBlock):
        found = holders.share(readers, partial(data.again, shared=shared))
    else:
        place = data.segment, data.offset, data.nbytes
        found = holders.share(readers, partial(memory.lent, *place, shared=shared))
    holders.let_go()
    return found


def of_response(
    output: OutputTensor,
    response: InferResponse,
    holders: Holders,
    readers: int,
    *,
    shared: bool,
    placement: RegionSlice | None,
) -> list[Data]:
    """An output of a step for each reader; ``placement`` is where it is if that is a client's region."""
    if output.placed:
        assert placement is not None, "an output lies in a region only where that was asked for"
        return [_written(placement, output)] * readers
    if isinstance(output, KeptTensor):
        return holders.share(readers, partial(output.lent, shared=shared))
    data = output.data
    place = None
    if isinstance(data, memoryview) and len(data) > INLINE_NBYTES and response.memory is not None:
        place = response.memory.locate(data)  # None where its worker has died since
    if place is None:
        return [bytes(data)] * readers if readers else []
    lend = partial(place.memory.lent, place.segment, place.offset, len(data), shared=shared)
    return holders.share(readers, lend)


def _written(placement: RegionSlice, output: OutputTensor) -> RegionSlice:
    """What was written of the place that a client gave; no element of it has a length of its own."""
    nbytes = ITEMSIZE[output.datatype] * element_count(output.shape)
    written = RegionSlice(placement.region, placement.offset, nbytes)
    written.number, written.device = placement.number, placement.device
    return written
