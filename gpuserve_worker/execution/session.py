"""The session of a worker with one front: the front's memory, the worker's output arena, and the sending of
replies.

A batch that runs while another front takes over runs to its end on this memory, but its reply is dropped. The
session is therefore closed in two steps: ``retire`` stops sending, and ``close`` frees the memory when no
batch uses it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from gpuserve_worker.execution.batch_inputs import Arrival, BatchInputs
from gpuserve_worker.execution.ranks import Rank
from gpuserve_worker.inference.outputs import BatchAnswers, DeviceReader
from gpuserve_worker.memory.arena import Arena, Mapping, SegmentSupplier
from gpuserve_worker.memory.batch_tensors import InputLeases, Inputs, OutputWriter, Written
from gpuserve_worker.memory.client_regions import ClientRegions, DeviceRegionOpener, RegionLocks
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.datagram import MAX_TOGETHER_NBYTES, joined
from gpuserve_worker.protocol.link import Link


class OutputCopies(Protocol):
    """The transfer of one batch's outputs from a device to memory that the front reads."""

    def is_ready(self) -> bool:
        """Return whether ``wait()`` would return at once."""

    def wait(self) -> Written:
        """Wait for all bytes and return the responses as they are sent. Raise ``DeviceFailure``."""


class DeviceSession(DeviceRegionOpener, Protocol):
    """The device's part of a session with one front."""

    @property
    def reader(self) -> DeviceReader:
        """The reader of arrays that are on the device."""

    @property
    def writer(self) -> OutputWriter:
        """The writer of outputs that are on the host or on the device."""

    def is_open(self, run: wire.Run) -> bool:
        """Return whether memory that a batch names is open or unavailable; else ``stage`` blocks."""

    def wait_open(self, run: wire.Run) -> None:
        """Wait until the memory that a batch names is open, or known to be unavailable."""

    def stage(
        self, run: wire.Run, failures: dict[int, wire.WireFailure]
    ) -> tuple[dict[str, Any], Arrival | None]:
        """Return all inputs of a batch by name, and the arrival of those in transfer to the device. Add
        requests whose bytes cannot be read to ``failures``, by position.
        """

    def warm(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the numpy arrays of a warm-up with the kind and location that the callable expects."""

    def start_output_copies(
        self,
        answers: BatchAnswers,
        requests: Sequence[wire.WireRequest | int],
        mark_computed: Callable[[], tuple[int, int]] | None = None,
    ) -> OutputCopies:
        """Start copying responses to memory that the front reads. ``mark_computed`` is that of the batch's
        stopwatch. Raise as ``write``, and ``DeviceFailure``.
        """

    def wait_inputs_read(self, batch_id: int) -> None:
        """Wait until no copy reads the input memory of a batch."""

    def report_memory(self) -> None:
        """Tell the front how much memory the worker holds on the device, if that has changed lately."""

    def process_message(self, message: wire.Message) -> bool:
        """Process a message about device memory. Return False if it is about something else."""

    def retire(self) -> None:
        """Stop exporting memory for the front, which is gone."""

    def close(self) -> None:
        """Close the memory that the front lent."""


class SessionDevice(Protocol):
    """The part of a worker's device path that sessions use."""

    @property
    def page_locks(self) -> RegionLocks | None:
        """The locker of mapped memory for the device's copies, if the device needs one."""

    @property
    def spares(self) -> SegmentSupplier | None:
        """The supplier of segments for output arenas, if making one takes long."""

    def open_session(self, front: FrontSession, arena: Arena) -> DeviceSession | None:
        """Return the device's part of a front's session, with the output arena; None on the host."""


class FrontSession:
    """The shared memory and the sending side of one front. Any thread may send, because any thread may delete
    an array or call a model. ``device`` is the device's part of the session, None on the host. ``fail`` ends
    the worker's loop with a fault found in another thread.
    """

    def __init__(
        self,
        link: Link,
        path: SessionDevice,
        fail: Callable[[BaseException], None],
        *,
        read_only_inputs: bool,
        rank: Rank | None = None,
    ) -> None:
        self._link = link
        self.fail = fail
        self._rank = rank
        self._retired = False
        #: Called before each reply, to send changed metrics.
        self.before_reply: Callable[[], None] = _nothing
        #: Replies that are sent together with the next one, and their batches.
        self.held: list[bytes] = []
        self._held_nbytes = 0
        self._held_batches: list[int] = []
        # Reentrant, because arrays may be deleted in any line, also below in this thread.
        self._lock = threading.RLock()
        self.mapping = Mapping(path.page_locks)
        self.loans = Mapping(path.page_locks)
        self.regions = ClientRegions(path.page_locks)
        memories = (self.mapping, self.regions, self.loans)
        self.leases = InputLeases(lambda batch_id: self.send_best_effort(wire.Released((batch_id,))))
        self.inputs = Inputs(*memories, self.leases, read_only=read_only_inputs)
        #: Arrays in answers of other models.
        returned = InputLeases(lambda lease: self.send_best_effort(wire.Return((lease,))))
        self._answers = Inputs(*memories, returned, read_only=False)
        # The front bounds the memory in use; this limit only stops a reply that no machine could hold.
        machine_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        arena = Arena(machine_nbytes, self._announce, self._drop, path.page_locks, path.spares)
        self.device = path.open_session(self, arena)
        self.writer = OutputWriter(arena, self.regions) if self.device is None else self.device.writer

    def process_memory_message(self, message: wire.Message, fds: list[int]) -> None:
        """Process a message about memory; raise ``WireError``, ``KeyError`` or ``ValueError`` for others."""
        match message:
            case wire.Free(blocks):
                self.writer.free(blocks)
            case wire.Shrink() if self.device is None:
                self.writer.shrink()
            case wire.Segment(segment, nbytes):
                self.mapping.attach(segment, fds[0], nbytes)
            case wire.DropSegment(segment):
                self.mapping.detach(segment)
            case wire.Region(region, offset, nbytes):
                self.regions.attach(region, fds[0], offset, nbytes)
            case wire.CudaRegion(region, _, nbytes, handle):
                # The front has matched the device to this worker.
                self.regions.attach_on_device(
                    *(region, nbytes, handle, self.device),
                    lambda problem: self.send_best_effort(wire.RegionOpened(region, problem)),
                )
            case wire.DropRegion(region):
                self.regions.detach(region)
            case wire.Lend(segment, nbytes):
                self.loans.attach(segment, fds[0], nbytes)
            case wire.Unlend(segment):
                self.loans.detach(segment)
            case wire.StartExports() if self.device is None:
                pass  # a worker without cupy exports no device memory
            case _:
                if self.device is None or not self.device.process_message(message):
                    raise wire.WireError(f"{type(message).__name__} is not for a worker's link")

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> bool:
        """Send a message unless another front has the link; return whether it was sent."""
        with self._lock:
            if self.held:
                self.flush()
            if not self._retired:
                self._link.send(message, fds)
            return not self._retired

    def hold(self, message: wire.Message) -> None:
        """Keep a message for the datagram of the next reply, or for ``flush``."""
        data = wire.WORKER.encode(message)
        with self._lock:
            if self.held and self._held_nbytes + len(data) > MAX_TOGETHER_NBYTES:
                self.flush()
            self.held.append(data)
            self._held_nbytes += len(data)

    def send_best_effort(self, message: wire.Message) -> None:
        """Send what a dead front does not need, where an array is deleted. Errors are ignored."""
        with suppress(OSError):
            self.send(message)

    def borrow(self, lease: int, tensors: tuple[Any, ...]) -> tuple[dict[str, Any], bool]:
        """Return an answer's arrays, and whether the lease ends with the last of them."""
        arrays = self._answers.arrays(lease, tensors)
        return arrays, bool(lease) and not self._answers.leases.is_free(lease)

    def reply(self, reply: wire.BatchReply, *, waits: bool = False) -> None:
        """Send the final reply of a batch, or hold it until the next message or ``flush``. The caller must
        have dropped its references to the batch's arrays.
        """
        batch_id = reply.batch_id
        if self._rank is not None:
            self._rank.before_reply(reply)
            waits = False
        if self.device is not None:
            self.device.wait_inputs_read(batch_id)
            self.device.report_memory()
        self.before_reply()
        data = wire.WORKER.encode(_with_inputs(reply, free=self.leases.is_free(batch_id)))
        try:
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
        except OSError:
            if self._rank is not None:
                self._rank.on_broken_link()
            raise
        if self._rank is not None:
            self._rank.after_reply(reply)

    def flush(self) -> None:
        """Send the held replies."""
        with self._lock:
            held, self.held, self._held_nbytes = self.held, [], 0
            batches, self._held_batches = self._held_batches, []
            if held and not self._retired:
                self._link.send_encoded(joined(held))
                for batch_id in batches:  # until now, deleted arrays of the batch were not reported
                    self.leases.answered(batch_id)

    def retire(self) -> None:
        with self._lock:
            # Rank 0, which waits for the replies of other ranks, is never replaced.
            self._retired = self._rank is None or self._rank.leads
        if self.device is not None:
            self.device.retire()

    def close(self) -> None:
        """Unmap and free the memory on both sides, except for memory under arrays of user code."""
        self.retire()
        self.leases.close()
        if self.device is not None:
            self.device.close()
        self.mapping.close()
        self.regions.close()
        self._answers.leases.close()
        self.loans.close()
        self.writer.close()

    def _announce(self, segment: int, fd: int, nbytes: int) -> None:
        self.send(wire.Segment(segment, nbytes), (fd,))

    def _drop(self, segment: int) -> None:
        self.send_best_effort(wire.DropSegment(segment))


#: Reads a batch's inputs, as ``Execution.read_inputs``.
InputReader: TypeAlias = Callable[[FrontSession, wire.Run], BatchInputs]


def _nothing() -> None: ...


def _with_inputs(reply: wire.BatchReply, *, free: bool) -> wire.BatchReply:
    """Return the same reply with ``inputs_free`` set; much faster than ``_replace``."""
    if not isinstance(reply, wire.Done):
        return type(reply)(reply.batch_id, reply.failure, free)  # type: ignore[arg-type]  # both classes fit
    batch_id, outputs, responses, _, input_ns, infer_ns, output_ns, parameters = reply
    return wire.Done(batch_id, outputs, responses, free, input_ns, infer_ns, output_ns, parameters)
