"""The memory that one front shares with a worker on a GPU, and the copies from and to it: ``CudaSession``
puts together what the files beside it do.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gpuserve_worker.cuda.copies.client_regions import DeviceRegions, end_reads
from gpuserve_worker.cuda.copies.exchange import ExportExchange
from gpuserve_worker.cuda.copies.output_copies import DeviceWriter
from gpuserve_worker.cuda.copies.staging import StagedInputs, Staging, named_by
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.opened import OpenedMemory
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol import wire

if TYPE_CHECKING:
    from gpuserve_worker.running.session import FrontSession


class CudaSession:
    """Implements ``DeviceSession`` on a GPU, for the front of ``front``."""

    def __init__(self, device: CudaDevice, staging: Staging, front: FrontSession, arena: Arena) -> None:
        self._staging = staging
        self._opened = device.opened
        self.front = front
        self.reader = device.arrays
        self.regions = DeviceRegions(device, front.regions, front.fail)
        self.open_region = self.regions.open
        self.end_reads = partial(end_reads, device)
        #: What is kept on the device for other workers, and lent of theirs.
        self.exchange = ExportExchange(device, front.send, front.fail)
        self.take = self.exchange.take
        self.retire = self.exchange.retire
        self.writer = DeviceWriter(arena, front.regions, device, self.regions, self.exchange)
        self.begin_outputs = self.writer.begin
        #: Inputs that may still be on their way to the device, by batch.
        self._arrivals: dict[int, StagedInputs] = {}

    def is_open(self, run: wire.Run) -> bool:
        return not (self.regions.any_opening or self._opened.opening) or not self._opening(run)

    def wait_open(self, run: wire.Run) -> None:
        for memory in self._opening(run):
            memory.wait()

    def stage(
        self, run: wire.Run, failures: dict[int, wire.WireFailure]
    ) -> tuple[dict[str, Any], StagedInputs | None]:
        arrays, arrival = self._staging.stage(self, run, failures)
        if arrival is not None:
            self.settle_inputs(run.batch_id)  # those of its first attempt
            self._arrivals[run.batch_id] = arrival
        return arrays, arrival

    def warm(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return self._staging.warm(self, arrays)

    def settle_inputs(self, batch_id: int) -> None:
        arrival = self._arrivals.pop(batch_id, None)
        if arrival is not None:
            arrival.settle()

    def close(self) -> None:
        """No batch of the front runs any more: what it lent is its own again."""
        for batch_id in list(self._arrivals):
            self.settle_inputs(batch_id)
        self.exchange.close()

    def _opening(self, run: wire.Run) -> list[OpenedMemory]:
        regions, segments = named_by(run)
        named = [*map(self.regions.opening, regions), *map(self.exchange.opening, segments)]
        return [one for one in named if one is not None]
