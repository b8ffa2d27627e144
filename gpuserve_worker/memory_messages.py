"""The messages that make memory known between the processes, and give it back: segments of arenas, clients'
regions, loans between workers, exports of a device's memory. Messages of the link, as those in ``wire.py``,
which names them all.
"""

from __future__ import annotations

from typing import NamedTuple


class Segment(NamedTuple):
    """The sender's arena has a new segment; its memfd rides beside this message."""

    segment: int
    nbytes: int


class DropSegment(NamedTuple):
    """The sender's arena gave a segment up; nothing will refer to it again."""

    segment: int


class Region(NamedTuple):
    """A client's region of system shared memory; its file rides beside this.

    The region is ``nbytes`` from ``offset`` of the file on; places in it count from there. The file is the
    client's: it may be written or shrunk at any time.
    """

    region: int
    offset: int
    nbytes: int


class CudaRegion(NamedTuple):
    """A client's region of device memory, as a ``cudaIpcMemHandle_t`` of 64 bytes. See ``RegionOpened``."""

    region: int
    device_id: int
    nbytes: int
    raw_handle: bytes


class DropRegion(NamedTuple):
    """No batch will name this region any more."""

    region: int


class Lend(NamedTuple):
    """A segment of another worker's arena, by a number of the front's; its memfd rides beside it."""

    segment: int
    nbytes: int


class Unlend(NamedTuple):
    """No batch will name this lent segment any more."""

    segment: int


class Free(NamedTuple):
    """The front has read these blocks of the worker's output arena: (segment, offset) each."""

    blocks: tuple[tuple[int, int], ...]


class StartExports(NamedTuple):
    """Outputs are to be kept on the device for other workers: have memory for them, and say where it is.

    A worker that cannot says nothing.
    """


class ExportSegment(NamedTuple):
    """The sender has memory of its device for outputs that other workers read, and all of this may be seen by
    them: ``handle`` is its ``cudaIpcMemHandle_t``. It is not given up while the sender lives.
    """

    segment: int
    nbytes: int
    handle: bytes


class FreeExports(NamedTuple):
    """Nobody reads these blocks of the worker's exports any more: (segment, offset) each."""

    blocks: tuple[tuple[int, int], ...]


class LendExport(NamedTuple):
    """An ``ExportSegment`` of another worker, by a number of the front's. See ``ExportOpened``."""

    segment: int
    nbytes: int
    handle: bytes


class ExportOpened(NamedTuple):
    """What a ``LendExport`` lent can be read; or why it cannot, in one sentence."""

    segment: int
    problem: str


class UnlendExport(NamedTuple):
    """No batch will name what this ``LendExport`` lent any more."""

    segment: int


class RegionOpened(NamedTuple):
    """A ``CudaRegion`` can be used; or why it cannot, in one sentence."""

    region: int
    problem: str


class Return(NamedTuple):
    """The last array over what these answers lent has died; an answer of a stream is taken as well."""

    leases: tuple[int, ...]


class Released(NamedTuple):
    """The last array over the inputs of these batches died after their ``Done``."""

    batch_ids: tuple[int, ...]
