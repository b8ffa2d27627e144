"""Copies of outputs from the device: into blocks of the page-locked output arena, into clients' regions, or
into exports for other workers. The host waits only when asked to. ``inference/outputs.py`` has made the
outputs contiguous and of their declared type. Outputs on the host are written as by any worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from gpuserve_worker.cuda.copies.ipc_regions import CudaMemoryRegion, DeviceRegions, ExportExchange
from gpuserve_worker.cuda.device.arrays import ALIGNMENT, BufferLease
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.host_memory import Span, address_of
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, Copy, CudaError
from gpuserve_worker.inference.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.memory.arena import Arena, Block
from gpuserve_worker.memory.batch_tensors import Budget, OutputWriter, Written, as_bytes, fill, filled_place
from gpuserve_worker.memory.client_regions import ClientRegions, RegionError, RegionMemory, copy_bytes
from gpuserve_worker.protocol.payloads import (
    INLINE_NBYTES,
    Exported,
    Payload,
    Place,
    Ref,
    WireFailure,
    WireRequest,
    WireTensor,
    requests_as_tuples,
)

#: About the time to suspend and wake a thread: polling this long before blocking takes at most twice the
#: needed time, and small outputs are not delayed.
_SPIN_NS: Final = 50_000

_Response: TypeAlias = tuple[WireTensor, ...] | WireFailure | None


class _Landing(NamedTuple):
    """A placeholder of a payload until its bytes have arrived: those of a block, which then go into a
    client's region. ``is_placed``: they go to the region directly, and the block, if any, is only kept
    meanwhile.
    """

    block: Block | None
    place: Place
    is_placed: bool = False


class _InlineLanding(NamedTuple):
    """A placeholder of a payload that goes into the message: ``nbytes`` of ``block``, at ``address``."""

    block: Block
    address: int
    nbytes: int


class _Copied(NamedTuple):
    """A part of an output that was copied within the device, with ``size`` elements."""

    address: int
    nbytes: int
    size: int


def _address(part: Any) -> int:
    return int(part.address if type(part) is _Copied else part.data.ptr)


class _UnderWay(threading.local):
    """The host memory used by the copies that this thread's current write has started."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def use(self, memory: memoryview) -> int:
        """Record memory that is copied from or to, and return its address."""
        address = address_of(memory)
        self.spans.append((address, len(memory)))
        return address


class CudaOutputCopies:
    """The copies of one batch's outputs; implements ``OutputCopies``. Made by ``DeviceWriter.begin``."""

    def __init__(
        self,
        device: CudaDevice,
        writer: DeviceWriter,
        written: Written,
        sources: object = None,
        event: int = 0,
        ticket: int = 0,
        lease: BufferLease | None = None,
    ) -> None:
        self._device = device
        self._writer = writer
        self._written = written
        # Keeps the source memory from being reused during the copies.
        self._sources = sources
        #: On the copies of outputs within the device.
        self._lease = lease
        self._event = event
        self._ticket = ticket
        self._thread = threading.get_ident()

    def is_ready(self) -> bool:
        try:
            return not self._event or self._device.runtime.is_complete(self._event)
        except CudaError:
            return True

    def wait(self) -> Written:
        """Wait for the copies, return the responses as sent; once. An error frees all blocks."""
        try:
            if self._event and not self._comes_soon():
                self._device.runtime.wait(self._event)
        except CudaError:
            self._writer.abandon(self._written)
            raise
        finally:
            self._sources = None
        if not self._event:
            return self._written
        self._device.progress.complete(self._ticket)
        if self._lease is not None:
            self._lease.ticket, self._lease = self._ticket, None
        self._device.host.uses.end(self._event)
        self._device.events.release_event(self._event)
        return self._writer.completed(self._written)

    def _comes_soon(self) -> bool:
        """Poll briefly whether the copies have ended. Raise as ``wait``. Only the thread that started the
        copies polls more than once, because another thread's polling would delay the next batch of that
        thread.
        """
        if threading.get_ident() != self._thread:
            self._device.enter_concurrently()
            return False
        until_ns = perf_counter_ns() + _SPIN_NS
        while (
            not (is_complete := self._device.runtime.is_complete(self._event))
            and perf_counter_ns() < until_ns
        ):
            pass
        return is_complete


class DeviceWriter(OutputWriter):
    """A writer of outputs, on the device or on the host, to memory that the front reads."""

    def __init__(
        self,
        arena: Arena,
        regions: ClientRegions,
        device: CudaDevice,
        device_regions: DeviceRegions,
        exchange: ExportExchange,
    ) -> None:
        super().__init__(arena, regions)
        self._device_regions = device_regions
        self._exchange = exchange
        #: Exports of the write in progress, and its landings of outputs that go into the message.
        self._exported: list[Exported] = []
        self._inline: list[_InlineLanding] = []
        #: Blocks for such landings, with their addresses: most batches need one.
        self._inline_blocks: list[tuple[Block, int]] = []
        self._device = device
        self._array = device.runtime.cupy.ndarray, _Copied
        self._under_way = _UnderWay()

    def write(self, answers: BatchAnswers, requests: Sequence[WireRequest | int]) -> Written:
        return self.begin(answers, requests).wait()

    def begin(
        self,
        answers: BatchAnswers,
        requests: Sequence[WireRequest | int],
        mark_computed: Callable[[], tuple[int, int]] | None = None,
    ) -> CudaOutputCopies:
        """Start copying the responses to these requests, ordered after the present work of the default
        stream. ``mark_computed`` records an event after that work, and returns the event and its ticket.
        After an error all blocks are freed.
        """
        device = self._device
        outputs = answers.whole if answers.each is None else list(_outputs(answers))
        assert outputs is not None, "one of the two fields is set"
        if not any(map(self._is_on_device, outputs)) and not self._meets_device_regions(answers, requests):
            if mark_computed is not None:
                mark_computed()
            return CudaOutputCopies(device, self, super().write(answers, requests))
        sources, lease = self._copy_kept(outputs)
        event = device.events.acquire()
        if mark_computed is None:
            ticket = device.progress.record(event)
            device.runtime.stream_wait_event(device.d2h, event)
        else:
            computed, ticket = mark_computed()
            device.runtime.stream_wait_event(device.d2h, computed)
        spans: list[Span] = []
        self._under_way.spans = spans
        written = super().write(answers, requests)
        device.runtime.record(event, device.d2h)
        device.host.uses.begin(event, spans)
        return CudaOutputCopies(device, self, written, (answers, sources), event, ticket, lease)

    def _copy_kept(self, outputs: Sequence[CheckedOutput]) -> tuple[list[Any], BufferLease | None]:
        """Replace memory that the callable may write to again, such as the static output of a CUDA graph, by
        a copy on the device. Return the replaced arrays and the lease on the copies, which must live until
        the copies to the host have ended.
        """
        device = self._device
        replaced: list[Any] = []
        kept, end = [], 0
        for one in outputs:
            if one.is_kept:
                for index, part in enumerate(one.parts):
                    if isinstance(part, self._array) and part.nbytes:
                        kept.append((one.parts, index, end))
                        end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        if not kept:
            return replaced, None
        buffer = device.buffers.acquire(end)
        lease = BufferLease(device.buffers, buffer)
        for parts, index, offset in kept:
            part, to = parts[index], buffer.address + offset
            device.runtime.copy(to, part.data.ptr, part.nbytes, Copy.DEVICE_TO_DEVICE, DEFAULT_STREAM)
            parts[index] = _Copied(to, part.nbytes, part.size)
            replaced.append(part)
        device.order_after_default()  # on other streams the next call may write
        return replaced, lease

    def completed(self, written: Written) -> Written:
        """Return the responses after the end of the copies, with bytes moved into the message or a region."""
        with self._lock:
            if self._closed:
                return Written(None, None, ())
            outputs = written.outputs
            if outputs is not None:
                outputs = tuple([self._completed_tensor(one) for one in outputs])
            responses = written.responses
            if responses is not None:
                responses = tuple([self._completed_response(one) for one in responses])
            return Written(outputs, responses, written.parameters)

    def shrink(self) -> None:
        with self._lock:
            self._free_inline_blocks()
        super().shrink()

    def close(self) -> None:
        with self._lock:
            self._free_inline_blocks()
        super().close()

    def _free_inline_blocks(self) -> None:
        while self._inline_blocks:
            self._arena.free(self._inline_blocks.pop()[0])

    def abandon(self, written: Written) -> None:
        responses: Sequence[_Response] = (written.outputs, *(written.responses or ()))
        with self._lock:
            for response in responses:
                for tensor in response if response and not isinstance(response, WireFailure) else ():
                    self._release(tensor.payload)

    def _meets_device_regions(self, answers: BatchAnswers, requests: Sequence[WireRequest | int]) -> bool:
        """Return whether a response goes to a client's region of device memory, or the callable was given
        such memory. The work of the device must then end before the reply is sent.
        """
        if not self._device_regions.any_open:
            return False
        numbers = [place.region for place in answers.sources]
        numbers += [place[0] for one in requests_as_tuples(requests) for _, place in one[3]]
        return any(self._device_regions.get(number) is not None for number in numbers)

    def _is_on_device(self, output: CheckedOutput) -> bool:
        return any(isinstance(part, self._array) for part in output.parts)

    def _tensors(
        self, outputs: list[CheckedOutput], inline: Budget, taken: list[Block]
    ) -> tuple[WireTensor, ...]:
        return tuple(
            [
                WireTensor(one.name, one.datatype, one.shape, self._payload(one, inline, taken))
                for one in outputs
            ]
        )

    def _payload(self, output: CheckedOutput, inline: Budget, taken: list[Block]) -> Payload:
        if not output.nbytes or not self._is_on_device(output):
            return as_bytes(output) if inline.consume(output.nbytes) else self._in_block(output, taken)
        if inline.consume(output.nbytes):
            landing: Any = self._begun_inline(output)
            return landing  # type: ignore[no-any-return]
        block = self._begun(output, taken)
        return Ref(block.segment, block.offset, output.nbytes)

    def _begun_inline(self, output: CheckedOutput) -> _InlineLanding:
        if self._inline_blocks:
            block, address = self._inline_blocks.pop()
        else:
            block = self._arena.allocate(INLINE_NBYTES)
            address = address_of(block.view)
        landing = _InlineLanding(block, address, output.nbytes)
        self._inline.append(landing)
        self._under_way.spans.append((address, output.nbytes))
        self._start_to_host(output, block.view, address)
        return landing

    def _write(self, answers: BatchAnswers, requests: Sequence[WireRequest | int]) -> Written:
        self._exported.clear()
        self._inline.clear()
        return super()._write(answers, requests)

    def _response(
        self, outputs: list[CheckedOutput], request: WireRequest, inline: Budget, taken: list[Block]
    ) -> tuple[WireTensor, ...] | WireFailure:
        exported: dict[str, WireTensor] = {}
        for one in outputs if request[5] else ():
            if one.name in request[5] and (place := self._start_export(one)):
                self._exported.append(place)
                exported[one.name] = WireTensor(one.name, one.datatype, one.shape, place)
        if not exported:
            return super()._response(outputs, request, inline, taken)
        others = [one for one in outputs if one.name not in exported]
        response = super()._response(others, request, inline, taken)
        if isinstance(response, WireFailure):
            return response
        by_name = exported | {one.name: one for one in response}
        return tuple([by_name[one.name] for one in outputs])

    def _placed(self, output: CheckedOutput, place: Place, taken: list[Block]) -> WireTensor:
        region = self._device_regions.get(place.region)
        if not output.nbytes or (region is None and not self._is_on_device(output)):
            return super()._placed(output, place, taken)
        used = filled_place(output, place)
        payload: Any = used
        if region is None and self._regions.is_locked(used.region):
            memory = self._regions.view(used)
            self._start_to_host(output, memory, self._under_way.use(memory))
            payload = _Landing(None, used, is_placed=True)
        elif region is None:
            payload = _Landing(self._begun(output, taken), used)
        elif (block := self._start_to_region(region, output, used, taken)) is not None:
            payload = _Landing(block, used, is_placed=True)
        return WireTensor(output.name, output.datatype, output.shape, payload)

    def _start_to_region(
        self, region: CudaMemoryRegion, output: CheckedOutput, place: Place, taken: list[Block]
    ) -> Block | None:
        """Start copying an output to a place of its size; return a block to keep until then, or None."""
        stream = self._device.d2h
        if not self._is_on_device(output):
            block = self._block(output, taken)
            fill(block.view, output)
            region.start_write(place, self._under_way.use(block.view), Copy.HOST_TO_DEVICE, stream)
            return block
        kept: Block | None = None
        position = 0
        for part in output.parts:
            nbytes = part.size * output.dtype.itemsize
            at = place._replace(offset=place.offset + position, nbytes=nbytes)
            if isinstance(part, self._array):
                region.start_write(at, _address(part), Copy.DEVICE_TO_DEVICE, stream)
            elif nbytes:
                kept = kept or self._block(output, taken)
                _put(part, output.dtype, kept.view, position)
                source = self._under_way.use(kept.view[position : position + nbytes])
                region.start_write(at, source, Copy.HOST_TO_DEVICE, stream)
            position += nbytes
        return kept

    def _start_export(self, output: CheckedOutput) -> Exported | None:
        """Start copying an output to exported memory. Return None if the output must go to the host: a part
        is on the host, there is no room, or the output is small enough for a message.
        """
        if output.nbytes <= INLINE_NBYTES or not all(isinstance(part, self._array) for part in output.parts):
            return None
        block = self._exchange.keep(output.nbytes)
        if block is None:
            return None
        device, to = self._device, block.address
        for part in output.parts:
            if part.nbytes:
                device.runtime.copy(to, _address(part), part.nbytes, Copy.DEVICE_TO_DEVICE, device.d2h)
            to += part.nbytes
        return block.place

    def _begun(self, output: CheckedOutput, taken: list[Block]) -> Block:
        block = self._block(output, taken)
        self._start_to_host(output, block.view, self._under_way.use(block.view))
        return block

    def _start_to_host(self, output: CheckedOutput, memory: memoryview, address: int) -> None:
        position = 0
        for part in output.parts:
            if not isinstance(part, self._array):
                _put(part, output.dtype, memory, position)
            elif part.nbytes:
                device, to = self._device, address + position
                device.runtime.copy(to, _address(part), part.nbytes, Copy.DEVICE_TO_HOST, device.d2h)
            position += part.size * output.dtype.itemsize

    def _abandon(self, taken: list[Block]) -> None:
        with suppress(CudaError):  # after an error no copy is running
            self._device.runtime.synchronize_stream(self._device.d2h)
        for payload in (*self._exported, *self._inline):
            self._release(payload)
        super()._abandon(taken)

    def _completed_response(self, response: _Response) -> _Response:
        if response is None or isinstance(response, WireFailure):
            return response
        try:
            return tuple([self._completed_tensor(one) for one in response])
        except RegionError as error:
            for tensor in response:
                self._release(tensor.payload)
            return WireFailure("INVALID_ARGUMENT", str(error))

    def _completed_tensor(self, tensor: WireTensor) -> WireTensor:
        landing: Any = tensor.payload
        payload: Payload
        if type(landing) is _InlineLanding:
            payload = bytes(landing.block.view[: landing.nbytes])
        elif isinstance(landing, _Landing):
            payload = landing.place
            _put_in_place(landing, self._regions[payload.region], payload)
        else:
            return tensor
        self._release(landing)
        return WireTensor(tensor.name, tensor.datatype, tensor.shape, payload)

    def _release(self, payload: Any) -> None:
        if type(payload) is _InlineLanding:
            self._inline_blocks.append((payload.block, payload.address))
            if self._closed:
                self._free_inline_blocks()
            return
        if isinstance(payload, _Landing):
            if payload.block is None:
                return
            key = (payload.block.segment, payload.block.offset)
        elif isinstance(payload, Ref):
            key = (payload.segment, payload.offset)
        else:
            if isinstance(payload, Exported):
                self._device.exports.free([(payload.segment, payload.offset)])
            return
        if key in self._blocks:
            self._free([key])


def _put_in_place(landing: _Landing, region: RegionMemory, place: Place) -> None:
    """Put the bytes of a landing into a client's region. Raise ``RegionError``."""
    if landing.block is None:  # the bytes are there already
        region.check(place)
    elif not landing.is_placed:
        view = landing.block.view
        region.write(place, lambda memory: copy_bytes(memory, view))


def _put(part: Any, dtype: np.dtype[Any], memory: memoryview, position: int) -> None:
    """Copy a part on the host to a position in memory, cast during the copy."""
    if part.size:
        with np.errstate(all="ignore"):  # a NaN cast to an integer is the callable's responsibility
            np.copyto(np.ndarray(part.shape, dtype, memory, position), part, casting="unsafe")


def _outputs(answers: BatchAnswers) -> Iterator[CheckedOutput]:
    for one in (answers.whole, *(answers.each or ())):
        if one is not None and not isinstance(one, WireFailure):
            yield from one
