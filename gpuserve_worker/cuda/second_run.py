"""What becomes of a batch for which the memory of the device did not suffice: all caches are emptied, and it
is run once more, in two halves where it has several requests. No callable is called here.

A callable may have written to its inputs before it failed, so the second run has new ones: those on the
device are copied there again, those in messages read again. Large inputs on the host are there only once, and
the batch fails at once unless they are read-only.
"""

from __future__ import annotations

from gpuserve_worker.cuda.device import Device
from gpuserve_worker.cuda.faults import free_memory
from gpuserve_worker.cuda.staging import device_inputs
from gpuserve_worker.execution import Execution
from gpuserve_worker.failure import log_text
from gpuserve_worker.halves import Part, halves
from gpuserve_worker.model import Model
from gpuserve_worker.reporting import Report
from gpuserve_worker.session import Session
from gpuserve_worker.tensor import BYTES
from gpuserve_worker.wire import Run, Split, WireFailure, requests


class SecondRun:
    """The second runs of one model's batches on its device."""

    def __init__(self, device: Device, execution: Execution, model: Model, report: Report) -> None:
        self._device = device
        self._execution = execution
        self._model = model
        self._report = report
        self._on_device = device_inputs(model.context.inputs)

    def is_possible(self, run: Run, *, was_alone: bool) -> bool:
        """Whether a batch may fit when it is run again: it can be cut, or was not ``was_alone`` on the
        device, and its inputs are as they were.
        """
        if was_alone and (len(run.requests) == 1 or not self._model.batching):
            return False
        return self._model.read_only_inputs or all(
            name in self._on_device or datatype == BYTES or isinstance(payload, bytes)
            for name, datatype, _, payload in run.inputs
        )

    def parts(self, session: Session, run: Run) -> list[Part]:
        """The parts of a batch that is to be run again, with their inputs on their way. Nothing may refer to
        what it was run with the first time.

        Raises:
            DeviceError, RegionError: as ``Execution.take_in``.
        """
        self.free_memory()
        taken = self._execution.take_in(session, run)
        taken.admit()
        parts = halves(run, taken)
        if len(parts) > 1:
            what = f"a batch of {_rows(run)} rows of model {self._model.name!r}"
            self._report.warning(
                f"the memory of the device did not suffice for {what}: it is run in two halves"
            )
            session.send(Split(run.batch_id))
        return parts

    def free_memory(self) -> None:
        """Have every cache of the device's memory given up; raises ``CudaError``."""
        free_memory(self._device)

    def no_room(self, run: Run, error: BaseException) -> WireFailure:
        """There is no room for a batch, or a part of one."""
        rows = _rows(run)
        counted = f"{rows} {'row' if rows == 1 else 'rows'}"
        text = f"The memory of the device does not suffice for {counted} of model {self._model.name!r}"
        self._report.error(f"{text}: {log_text(error)}")
        return WireFailure("RESOURCE_EXHAUSTED", text)


def _rows(run: Run) -> int:
    return sum(one.rows for one in requests(run.requests))
