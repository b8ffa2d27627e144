"""All that a worker shares with one front, and gives up when another takes the link over: the front's
memory, the worker's output arena, and the way for answers. No callable is called here.

A batch that runs while another front takes over is run to its end on this memory, for nobody: so first
nothing is sent any more (``retire``), and the memory is given up when no batch uses it (``close``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from gpuserve_worker import wire
from gpuserve_worker.inputs import Inputs, Leases
from gpuserve_worker.intake import fill_all, places_of
from gpuserve_worker.link import Link
from gpuserve_worker.memory import Arena, Mapping
from gpuserve_worker.output_writer import OutputWriter
from gpuserve_worker.regions import Regions

if TYPE_CHECKING:
    from gpuserve_worker.cuda.device import Device
    from gpuserve_worker.cuda.exchange import Exchange
    from gpuserve_worker.cuda.output_copies import DeviceWriter, OutputCopies
    from gpuserve_worker.cuda.staging import Arrival
    from gpuserve_worker.outputs import Answers

Reply: TypeAlias = wire.Done | wire.Failed


class Session:
    """One front on the link. Any thread may send: an array may die, or a question be asked, in each.

    With a ``device`` the memory on both sides is page-locked for its copies.
    """

    def __init__(self, link: Link, *, read_only_inputs: bool, device: Device | None = None) -> None:
        self._link = link
        self.device = device
        #: Inputs that may still be on their way to the device, by batch.
        self._arrivals: dict[int, Arrival] = {}
        self._read_only_inputs = read_only_inputs
        self._retired = False
        # Arrays die in any line, also in those below that are under way in this very thread.
        self._lock = threading.RLock()
        locks = None if device is None else device.pins
        self.mapping = Mapping(locks)
        self.leases = Leases(self._released)
        self.regions = Regions(device)
        self.loans = Mapping(locks)
        self.inputs = Inputs(self.mapping, self.regions, self.loans, self.leases, read_only=read_only_inputs)
        self._borrowed = Leases(self._returned)
        self._answers = Inputs(self.mapping, self.regions, self.loans, self._borrowed, read_only=False)
        # The front bounds what is in flight; this only stops an answer no machine could hold.
        arena = Arena(_machine_nbytes(), self._announce, self._drop, locks)
        self.writer = OutputWriter(arena, self.regions)
        #: What is kept on the device for other workers, and lent of theirs.
        self.exchange: Exchange | None = None
        self._device_writer: DeviceWriter | None = None
        if device is not None:
            from gpuserve_worker.cuda.exchange import Exchange  # only a worker with a device needs them
            from gpuserve_worker.cuda.output_copies import DeviceWriter

            self.exchange = Exchange(device, self.send)
            writer = DeviceWriter(arena, self.regions, device, self.exchange)
            self.writer = self._device_writer = writer

    def take_memory(self, message: wire.Message, fds: list[int]) -> None:
        """Obey a message about memory.

        Raises:
            WireError, KeyError, ValueError: it is none, or names memory that there is not.
        """
        match message:
            case wire.Free(blocks):
                self.writer.free(blocks)
            case wire.Segment(segment, nbytes):
                self.mapping.attach(segment, fds[0], nbytes)
            case wire.DropSegment(segment):
                self.mapping.detach(segment)
            case wire.Region(region, offset, nbytes):
                self.regions.attach(region, fds[0], offset, nbytes)
            case wire.CudaRegion(region, _, nbytes, raw_handle):  # the front knows which device is ours
                problem = self.regions.attach_cuda(region, nbytes, raw_handle)
                self.send(wire.RegionOpened(region, problem))
            case wire.DropRegion(region):
                self.regions.detach(region)
            case wire.Lend(segment, nbytes):
                self.loans.attach(segment, fds[0], nbytes)
            case wire.Unlend(segment):
                self.loans.detach(segment)
            case wire.StartExports() if self.exchange is None:
                pass  # a worker without cupy keeps nothing on its device
            case _:
                if self.exchange is None or not self.exchange.take(message):
                    raise wire.WireError(f"{type(message).__name__} is not for a worker's link")

    def take_in(self, run: wire.Run) -> tuple[dict[int, wire.WireFailure], tuple[wire.Place, ...]]:
        """Copy what a batch needs from clients' regions: which requests cannot have it, by position, and the
        places that are read where they are.
        """
        failures = fill_all(run, self.mapping, self.regions, self.loans) if run.fills else {}
        return failures, places_of(run) if self._read_only_inputs else ()

    def begin_outputs(self, answers: Answers, requests: Sequence[wire.WireRequest | int]) -> OutputCopies:
        """Begin to copy the answers to these requests from the device; raises as ``DeviceWriter.begin``."""
        assert self._device_writer is not None, "only of a session with a device"
        return self._device_writer.begin(answers, requests)

    def under_way(self, batch_id: int, arrival: Arrival) -> None:
        """The inputs of a batch are on their way to the device: the front has its memory back after that."""
        self._arrivals[batch_id] = arrival

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> bool:
        """Send, unless another front has the link by now: what is for this one must not reach that one.
        Says whether it was sent.

        Raises:
            OSError: the front is gone.
        """
        with self._lock:
            if not self._retired:
                self._link.send(message, fds)
            return not self._retired

    def borrow(self, lease: int, tensors: tuple[Any, ...]) -> tuple[dict[str, Any], bool]:
        """The arrays in an answer of another model, and whether the lease ends with the last of them.

        Raises:
            ValueError: it names memory that there is not.
        """
        arrays = self._answers.arrays(lease, tensors)
        return arrays, bool(lease) and not self._borrowed.is_free(lease)

    def reply(self, reply: Reply) -> None:
        """Send the end of a batch.

        Whoever calls this refers to nothing of the batch any more: what still is, the user keeps.
        """
        batch_id = reply.batch_id
        if self._arrivals and (arrival := self._arrivals.pop(batch_id, None)) is not None:
            arrival.settle()
            del arrival
        if self.send(_with_inputs(reply, free=self.leases.is_free(batch_id))):
            self.leases.answered(batch_id)

    def retire(self) -> None:
        """Send nothing any more."""
        with self._lock:
            self._retired = True
        if self.exchange is not None:
            self.exchange.retire()

    def close(self) -> None:
        """Give up the memory on both sides, as far as no array of the user's is over it."""
        self.retire()
        self.leases.close()
        if self.exchange is not None:
            self.exchange.close()
        self.mapping.close()
        self.regions.close()
        self._borrowed.close()
        self.loans.close()
        self.writer.close()

    def _announce(self, segment: int, fd: int, nbytes: int) -> None:
        self.send(wire.Segment(segment, nbytes), (fd,))

    def _drop(self, segment: int) -> None:
        self.send_if_there(wire.DropSegment(segment))

    def _returned(self, lease: int) -> None:
        self.send_if_there(wire.Return((lease,)))

    def _released(self, batch_id: int) -> None:
        self.send_if_there(wire.Released((batch_id,)))

    def send_if_there(self, message: wire.Message) -> None:
        """Send what nobody needs to hear who is gone.

        It runs wherever an array happens to die, or when all is given up; that the peer is gone is the
        loop's to see.
        """
        try:
            self.send(message)
        except OSError:
            pass


def _with_inputs(reply: Reply, *, free: bool) -> Reply:
    """The same reply, which says whether the inputs are free; a good deal faster than by ``_replace``."""
    if isinstance(reply, wire.Failed):
        return wire.Failed(reply.batch_id, reply.failure, free)
    batch_id, outputs, responses, _, input_ns, infer_ns, output_ns, parameters = reply
    return wire.Done(batch_id, outputs, responses, free, input_ns, infer_ns, output_ns, parameters)


def _machine_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
