"""The memory that one front shares with a worker on a GPU, and the copies from and to it: ``CudaSession``
puts together what the files beside it do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuserve_worker.calling.outputs import BatchAnswers
from gpuserve_worker.cuda.copies.client_regions import CudaMemoryRegion, DeviceRegions, end_reads
from gpuserve_worker.cuda.copies.exchange import ExportExchange
from gpuserve_worker.cuda.copies.output_copies import CudaOutputCopies, DeviceWriter
from gpuserve_worker.cuda.copies.staging import StagedInputs, Staging
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.protocol import wire
from gpuserve_worker.running.device_path import FrontMemory, Send


class CudaSession:
    """Implements ``DeviceSession`` on a GPU."""

    def __init__(self, device: CudaDevice, staging: Staging, memory: FrontMemory, send: Send) -> None:
        self._device = device
        self._staging = staging
        self.memory = memory
        self.reader = device.arrays
        self.regions = DeviceRegions(device, memory.regions)
        #: What is kept on the device for other workers, and lent of theirs.
        self.exchange = ExportExchange(device, send)
        self.writer = DeviceWriter(memory, device, self.regions, self.exchange)
        #: Inputs that may still be on their way to the device, by batch.
        self._arrivals: dict[int, StagedInputs] = {}

    def stage(
        self, run: wire.Run, failures: dict[int, wire.WireFailure]
    ) -> tuple[dict[str, Any], StagedInputs | None]:
        arrays, arrival = self._staging.stage(self, run, failures)
        if arrival is not None:
            self._arrivals[run.batch_id] = arrival
        return arrays, arrival

    def warm(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return self._staging.warm(self, arrays)

    def begin_outputs(
        self, answers: BatchAnswers, requests: Sequence[wire.WireRequest | int]
    ) -> CudaOutputCopies:
        return self.writer.begin(answers, requests)

    def settle_inputs(self, batch_id: int) -> None:
        arrival = self._arrivals.pop(batch_id, None)
        if arrival is not None:
            arrival.settle()

    def open_region(self, nbytes: int, raw_handle: bytes) -> CudaMemoryRegion:
        return self.regions.open(nbytes, raw_handle)

    def end_reads(self) -> None:
        end_reads(self._device)

    def take(self, message: wire.Message) -> bool:
        return self.exchange.take(message)

    def retire(self) -> None:
        self.exchange.retire()

    def close(self) -> None:
        self.exchange.close()
