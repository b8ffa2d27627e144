"""All that a worker shares with one front, and gives up when another takes the link over: the front's memory,
the worker's output arena, and the way for answers. No callable is called here. A batch that runs while
another front takes over is run to its end on this memory, for nobody: so first nothing is sent any more
(``retire``), and the memory is given up when no batch uses it (``close``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from gpuserve_worker.memory.arena import Arena, Mapping
from gpuserve_worker.memory.inputs import Inputs, Leases
from gpuserve_worker.memory.output_writer import OutputWriter
from gpuserve_worker.memory.regions import ClientRegions
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.datagram import MAX_TOGETHER_NBYTES
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.vocabulary import joined

if TYPE_CHECKING:
    from gpuserve_worker.running.device_path import WorkerDevicePath

BatchReply: TypeAlias = wire.Done | wire.Failed


class FrontSession:
    """One front on the link. Any thread may send: an array may die, or a question be asked, in each.
    ``device`` is what the worker's device does with this memory, None on the host. ``fail`` ends the worker's
    loop with a fault that was found in another thread.
    """

    def __init__(
        self,
        link: Link,
        path: WorkerDevicePath,
        fail: Callable[[BaseException], None],
        *,
        read_only_inputs: bool,
    ) -> None:
        self._link = link
        self.fail = fail
        self._retired = False
        #: Answers that leave with the next one, and the batches that they are to.
        self.held: list[bytes] = []
        self._held_nbytes = 0
        self._held_batches: list[int] = []
        # Arrays die in any line, also in those below that are under way in this very thread.
        self._lock = threading.RLock()
        self.mapping = Mapping(path.page_locks)
        self.loans = Mapping(path.page_locks)
        self.regions = ClientRegions(path.page_locks)
        memories = (self.mapping, self.regions, self.loans)
        self.leases = Leases(lambda batch_id: self.send_if_there(wire.Released((batch_id,))))
        self.inputs = Inputs(*memories, self.leases, read_only=read_only_inputs)
        #: The arrays in answers of other models.
        returned = Leases(lambda lease: self.send_if_there(wire.Return((lease,))))
        self._answers = Inputs(*memories, returned, read_only=False)
        # The front bounds what is in flight; this only stops an answer no machine could hold.
        machine_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        arena = Arena(machine_nbytes, self._announce, self._drop, path.page_locks, path.spares)
        self.device = path.open_session(self, arena)
        self.writer = OutputWriter(arena, self.regions) if self.device is None else self.device.writer

    def take_memory(self, message: wire.Message, fds: list[int]) -> None:
        """Obey a message about memory; raises ``WireError``, ``KeyError`` or ``ValueError`` for any other."""
        match message:
            case wire.Free(blocks):
                self.writer.free(blocks)
            case wire.Shrink():
                self.writer.shrink()
            case wire.Segment(segment, nbytes):
                self.mapping.attach(segment, fds[0], nbytes)
            case wire.DropSegment(segment):
                self.mapping.detach(segment)
            case wire.Region(region, offset, nbytes):
                self.regions.attach(region, fds[0], offset, nbytes)
            case wire.CudaRegion(region, _, nbytes, raw_handle):  # the front knows which device is ours
                told = partial(self._tell_of_region, region)
                self.regions.attach_on_device(region, nbytes, raw_handle, self.device, told)
            case wire.DropRegion(region):
                self.regions.detach(region)
            case wire.Lend(segment, nbytes):
                self.loans.attach(segment, fds[0], nbytes)
            case wire.Unlend(segment):
                self.loans.detach(segment)
            case wire.StartExports() if self.device is None:
                pass  # a worker without cupy keeps nothing on its device
            case _:
                if self.device is None or not self.device.take(message):
                    raise wire.WireError(f"{type(message).__name__} is not for a worker's link")

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> bool:
        """Send, unless another front has the link by now, which must not get it: whether it was sent."""
        with self._lock:
            if self.held:
                self.flush()
            if not self._retired:
                self._link.send(message, fds)
            return not self._retired

    def send_if_there(self, message: wire.Message) -> None:
        """Send what a front that is gone need not hear, wherever an array dies: the loop sees its end."""
        with suppress(OSError):
            self.send(message)

    def borrow(self, lease: int, tensors: tuple[Any, ...]) -> tuple[dict[str, Any], bool]:
        """The arrays in an answer of another model, and whether the lease ends with the last of them."""
        arrays = self._answers.arrays(lease, tensors)
        return arrays, bool(lease) and not self._answers.leases.is_free(lease)

    def reply(self, reply: BatchReply, *, waits: bool = False) -> None:
        """Send the end of a batch, or have it wait until something else is sent, or ``flush``. Whoever calls
        this refers to nothing of it any more.
        """
        batch_id = reply.batch_id
        if self.device is not None:
            self.device.settle_inputs(batch_id)
        data = wire.WORKER.encode(_with_inputs(reply, free=self.leases.is_free(batch_id)))
        with self._lock:
            if self.held and self._held_nbytes + len(data) > MAX_TOGETHER_NBYTES:
                self.flush()
            if waits or self.held:
                self.held.append(data)
                self._held_nbytes += len(data)
                self._held_batches.append(batch_id)
                if not waits:
                    self.flush()
            elif not self._retired:
                self._link.send_encoded(data)
                self.leases.answered(batch_id)

    def flush(self) -> None:
        """Send the answers that wait."""
        with self._lock:
            held, self.held, self._held_nbytes = self.held, [], 0
            batches, self._held_batches = self._held_batches, []
            if held and not self._retired:
                self._link.send_encoded(joined(held))
                for batch_id in batches:  # until now no array that died was told of by itself
                    self.leases.answered(batch_id)

    def retire(self) -> None:
        with self._lock:
            self._retired = True
        if self.device is not None:
            self.device.retire()

    def close(self) -> None:
        """Give up the memory on both sides, as far as no array of the user's is over it."""
        self.retire()
        self.leases.close()
        if self.device is not None:
            self.device.close()
        self.mapping.close()
        self.regions.close()
        self._answers.leases.close()
        self.loans.close()
        self.writer.close()

    def _tell_of_region(self, region: int, problem: str) -> None:
        self.send_if_there(wire.RegionOpened(region, problem))

    def _announce(self, segment: int, fd: int, nbytes: int) -> None:
        self.send(wire.Segment(segment, nbytes), (fd,))

    def _drop(self, segment: int) -> None:
        self.send_if_there(wire.DropSegment(segment))


def _with_inputs(reply: BatchReply, *, free: bool) -> BatchReply:
    """The same reply, which says whether the inputs are free; a good deal faster than by ``_replace``."""
    if isinstance(reply, wire.Failed):
        return wire.Failed(reply.batch_id, reply.failure, free)
    batch_id, outputs, responses, _, input_ns, infer_ns, output_ns, parameters = reply
    return wire.Done(batch_id, outputs, responses, free, input_ns, infer_ns, output_ns, parameters)
