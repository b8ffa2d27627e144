"""The outputs of batches on their way back to the host: from the device into blocks of the page-locked output
arena; or, for other workers, to where those can read them. The host waits for them only when it is asked to.
Outputs are contiguous and of their declared type by now, which ``outputs.py`` has seen to on the device. What
is on the host already is written as by any worker.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from gpuserve_worker.calling.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.cuda.copies.client_regions import CudaMemoryRegion, DeviceRegions
from gpuserve_worker.cuda.copies.exchange import ExportExchange
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.host_uses import Span
from gpuserve_worker.cuda.device.page_locks import address_of
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, Copy, CudaError
from gpuserve_worker.memory.arena import Arena, Block
from gpuserve_worker.memory.copying import copy_bytes
from gpuserve_worker.memory.output_writer import Budget, OutputWriter, Written, as_bytes, fill, used_place
from gpuserve_worker.memory.regions import ClientRegions, RegionError, RegionMemory
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

#: About as long as a thread takes to fall asleep and to be woken up: who asks for so long, and sleeps then,
#: spends at most twice of what was needed, and small answers are not late.
_SPIN_NS: Final = 50_000

_Response: TypeAlias = tuple[WireTensor, ...] | WireFailure | None


class _Landing(NamedTuple):
    """Stands in the place of a payload until its bytes have come: those of a block, which then go into the
    message or, where there is a ``place``, into a client's region. ``is_placed``: they go there by now, and
    the block, if any, is only kept meanwhile.
    """

    block: Block | None
    place: Place | None
    is_placed: bool = False


class _UnderWay(threading.local):
    """The memory of the host that copies use which the write of this thread has begun."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def use(self, memory: memoryview) -> int:
        """Where memory begins that is copied from or to from now on."""
        address = address_of(memory)
        self.spans.append((address, len(memory)))
        return address


class CudaOutputCopies:
    """The outputs of one batch on their way; implements ``OutputCopies``. Made by ``DeviceWriter.begin``."""

    def __init__(
        self,
        device: CudaDevice,
        writer: DeviceWriter,
        written: Written,
        answers: BatchAnswers | None,
        event: int,
    ) -> None:
        self._device = device
        self._writer = writer
        self._written = written
        # What is copied must not be given to anybody else before it is.
        self._answers = answers
        self._event = event
        self._thread = threading.get_ident()

    def is_ready(self) -> bool:
        try:
            return not self._event or self._device.runtime.has_come(self._event)
        except CudaError:
            return True

    def wait(self) -> Written:
        """The answers as they are sent, once they are there. To be called once; an error keeps nothing."""
        try:
            if self._event and not self._comes_soon():
                self._device.runtime.wait(self._event)
        except CudaError:
            self._writer.abandon(self._written)
            raise
        finally:
            self._answers = None
        if not self._event:
            return self._written
        self._device.host.uses.end(self._event)
        self._device.events.give(self._event)
        return self._writer.landed(self._written)

    def _comes_soon(self) -> bool:
        """Whether the copies are over within a moment; the errors are those of ``wait``. Only the thread that
        began them asks more than once: in another one it would keep that from its next batch.
        """
        if threading.get_ident() != self._thread:
            self._device.enter_beside()
            return False
        until_ns = perf_counter_ns() + _SPIN_NS
        while not (has_come := self._device.runtime.has_come(self._event)) and perf_counter_ns() < until_ns:
            pass
        return has_come


class DeviceWriter(OutputWriter):
    """Puts checked outputs, on the device or not, where the front reads them."""

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
        #: What was begun to be exported by the one write that is under way.
        self._exported: list[Exported] = []
        self._device = device
        self._array = device.runtime.cupy.ndarray
        self._under_way = _UnderWay()

    def write(self, answers: BatchAnswers, requests: Sequence[WireRequest | int]) -> Written:
        return self.begin(answers, requests).wait()

    def begin(self, answers: BatchAnswers, requests: Sequence[WireRequest | int]) -> CudaOutputCopies:
        """Begin to copy the answers to these requests, after the work that is in the default stream now.
        After an error nothing is kept.
        """
        outputs = list(_outputs(answers))
        on_device = any(map(self._is_on_device, outputs))
        if not on_device and not self._meets_device_regions(answers, requests):
            return CudaOutputCopies(self._device, self, super().write(answers, requests), None, 0)
        runtime, stream = self._device.runtime, self._device.d2h
        event = self._device.events.take()
        runtime.record(event, DEFAULT_STREAM)
        runtime.stream_waits(stream, event)
        spans: list[Span] = []
        self._under_way.spans = spans
        written = super().write(answers, requests)
        runtime.record(event, stream)
        self._device.host.uses.begin(event, spans)
        if any(one.is_kept for one in outputs):  # the next call may write to it, and begins after the copy
            for one in self._device.arrays.streams():
                runtime.stream_waits(one, event)
        return CudaOutputCopies(self._device, self, written, answers, event)

    def landed(self, written: Written) -> Written:
        """The same when the copies are over: what was copied for a message or a region goes there."""
        with self._lock:
            if self._closed:
                return Written(None, None, ())
            outputs = written.outputs
            if outputs is not None:
                outputs = tuple([self._landed_tensor(one) for one in outputs])
            responses = written.responses
            if responses is not None:
                responses = tuple([self._landed_response(one) for one in responses])
            return Written(outputs, responses, written.parameters)

    def abandon(self, written: Written) -> None:
        responses: Sequence[_Response] = (written.outputs, *(written.responses or ()))
        with self._lock:
            for response in responses:
                for tensor in response if response and not isinstance(response, WireFailure) else ():
                    self._release(tensor.payload)

    def _meets_device_regions(self, answers: BatchAnswers, requests: Sequence[WireRequest | int]) -> bool:
        """Whether an answer goes into a client's region of device memory, or the callable was given the
        memory of one: then the work of the device has to be over before anything is sent.
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
            return as_bytes(output) if inline.take(output.nbytes) else self._in_block(output, taken)
        block = self._begun(output, taken)
        if inline.take(output.nbytes):
            landing: Any = _Landing(block, None)
            return landing  # type: ignore[no-any-return]
        return Ref(block.segment, block.offset, output.nbytes)

    def _write(self, answers: BatchAnswers, requests: Sequence[WireRequest | int]) -> Written:
        self._exported.clear()
        return super()._write(answers, requests)

    def _response(
        self, outputs: list[CheckedOutput], request: WireRequest, inline: Budget, taken: list[Block]
    ) -> tuple[WireTensor, ...] | WireFailure:
        exported: dict[str, WireTensor] = {}
        for one in outputs if request[5] else ():
            if one.name in request[5] and (place := self._begin_export(one)):
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
        used = used_place(output, place)
        payload: Any = used
        if region is None and self._regions.is_locked(used.region):
            self._begin_to_host(output, self._regions.view(used))
            payload = _Landing(None, used, is_placed=True)
        elif region is None:
            payload = _Landing(self._begun(output, taken), used)
        elif (block := self._begin_to_region(region, output, used, taken)) is not None:
            payload = _Landing(block, used, is_placed=True)
        return WireTensor(output.name, output.datatype, output.shape, payload)

    def _begin_to_region(
        self, region: CudaMemoryRegion, output: CheckedOutput, place: Place, taken: list[Block]
    ) -> Block | None:
        """Begin to copy an output to a place of its size. The block from which a part of it comes, if any
        does, is to be kept until the copies are over.
        """
        stream = self._device.d2h
        if not self._is_on_device(output):
            block = self._block(output, taken)
            fill(block.view, output)
            region.begin_write(place, self._under_way.use(block.view), Copy.HOST_TO_DEVICE, stream)
            return block
        kept: Block | None = None
        position = 0
        for part in output.parts:
            nbytes = part.size * output.dtype.itemsize
            at = place._replace(offset=place.offset + position, nbytes=nbytes)
            if isinstance(part, self._array):
                region.begin_write(at, part.data.ptr, Copy.DEVICE_TO_DEVICE, stream)
            elif nbytes:
                kept = kept or self._block(output, taken)
                _put(part, output.dtype, kept.view, position)
                source = self._under_way.use(kept.view[position : position + nbytes])
                region.begin_write(at, source, Copy.HOST_TO_DEVICE, stream)
            position += nbytes
        return kept

    def _begin_export(self, output: CheckedOutput) -> Exported | None:
        """Begin to copy an output to where other workers can read it on the device. None where it has to go
        to the host: it is there in part, there is no room, or it is so small that it travels in a message.
        """
        if output.nbytes <= INLINE_NBYTES or not all(isinstance(part, self._array) for part in output.parts):
            return None
        block = self._exchange.keep(output.nbytes)
        if block is None:
            return None
        device, to = self._device, block.address
        for part in output.parts:
            if part.nbytes:
                device.runtime.copy(to, part.data.ptr, part.nbytes, Copy.DEVICE_TO_DEVICE, device.d2h)
            to += part.nbytes
        return block.place

    def _begun(self, output: CheckedOutput, taken: list[Block]) -> Block:
        block = self._block(output, taken)
        self._begin_to_host(output, block.view)
        return block

    def _begin_to_host(self, output: CheckedOutput, memory: memoryview) -> None:
        address, position = self._under_way.use(memory), 0
        for part in output.parts:
            if not isinstance(part, self._array):
                _put(part, output.dtype, memory, position)
            elif part.nbytes:
                device, to = self._device, address + position
                device.runtime.copy(to, part.data.ptr, part.nbytes, Copy.DEVICE_TO_HOST, device.d2h)
            position += part.size * output.dtype.itemsize

    def _abandon(self, taken: list[Block]) -> None:
        with suppress(CudaError):  # then nothing is copied any more
            self._device.runtime.synchronize_stream(self._device.d2h)
        for place in self._exported:
            self._release(place)
        super()._abandon(taken)

    def _landed_response(self, response: _Response) -> _Response:
        if response is None or isinstance(response, WireFailure):
            return response
        try:
            return tuple([self._landed_tensor(one) for one in response])
        except RegionError as error:
            for tensor in response:
                self._release(tensor.payload)
            return WireFailure("INVALID_ARGUMENT", str(error))

    def _landed_tensor(self, tensor: WireTensor) -> WireTensor:
        landing: Any = tensor.payload
        if not isinstance(landing, _Landing):
            return tensor
        place = landing.place
        if place is None:
            assert landing.block is not None, "what goes into the message has been copied to a block"
            payload: Payload = bytes(landing.block.view)
        else:
            _put_in_place(landing, self._regions[place.region], place)
            payload = place
        self._release(landing)
        return tensor._replace(payload=payload)

    def _release(self, payload: Any) -> None:
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
    """Have the bytes of a landing in a client's region. Raises ``RegionError``."""
    if landing.block is None:  # they have been copied there
        region.check(place)
    elif not landing.is_placed:
        view = landing.block.view
        region.write(place, lambda memory: copy_bytes(memory, view))


def _put(part: Any, dtype: np.dtype[Any], memory: memoryview, position: int) -> None:
    """Copy a part that is on the host to a position in memory, cast as it goes."""
    if part.size:
        with np.errstate(all="ignore"):  # a NaN cast to an integer is the callable's business
            np.copyto(np.ndarray(part.shape, dtype, memory, position), part, casting="unsafe")


def _outputs(answers: BatchAnswers) -> Iterator[CheckedOutput]:
    for one in (answers.whole, *(answers.each or ())):
        if one is not None and not isinstance(one, WireFailure):
            yield from one
