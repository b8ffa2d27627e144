"""What one front has a worker keep on its device for other workers, and what of theirs it lends to it. Made
for each front, over what the worker has for all of them: ``device/exports.py`` and ``device/loans.py``. Bytes
are copied by ``output_copies.py`` and ``staging.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from gpuserve_worker.calling.failure import client_text
from gpuserve_worker.cuda.device.exports import ExportBlock
from gpuserve_worker.cuda.device.loans import OpenedMemory
from gpuserve_worker.cuda.device.runtime import CudaError
from gpuserve_worker.memory.regions import RegionError
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.payloads import DeviceLoan

if TYPE_CHECKING:
    from gpuserve_worker.cuda.device.device import CudaDevice


class ExportGone(RegionError):
    """What another worker kept on its device cannot be read here. The text is one sentence for the client."""

    code = "UNAVAILABLE"


class ExportExchange:
    """The exports of a worker and its loans of others', for one front, which ``send`` reaches."""

    def __init__(self, device: CudaDevice, send: Callable[[wire.Message], object]) -> None:
        self._device = device
        self._send = send
        self._lent: dict[int, OpenedMemory | str] = {}

    # ---- the owner's side -----------------------------------------------------------------

    def keep(self, nbytes: int) -> ExportBlock | None:
        """Memory for an output that stays on the device; None where it has to go to the host."""
        return self._device.exports.allocate(nbytes, self._send)

    # ---- the borrower's side --------------------------------------------------------------

    @property
    def lends(self) -> bool:
        return bool(self._lent)

    def opened(self, loan: DeviceLoan) -> OpenedMemory:
        """The memory that a loan is in, from ``loan.offset`` on. Raises ``ExportGone`` where it could not be
        opened, ``ValueError`` where the bytes were not lent.
        """
        opened = self._lent.get(loan.segment)
        if isinstance(opened, str):
            raise ExportGone(f"an output of the step before cannot be read on this device: {opened}")
        if opened is None or min(loan.offset, loan.nbytes) < 0 or loan.offset + loan.nbytes > opened.nbytes:
            raise ValueError(f"no {loan.nbytes} bytes at {loan.offset} of lent export {loan.segment}")
        return opened

    # ---- messages -------------------------------------------------------------------------

    def take(self, message: wire.Message) -> bool:
        """Obey a message, if it is about exports; ``KeyError``: it names memory that there is not."""
        match message:
            case wire.StartExports():
                self._start()
            case wire.FreeExports(blocks):
                self._device.exports.free(blocks)
            case wire.LendExport(segment, nbytes, handle):
                self._send(wire.ExportOpened(segment, self._open(segment, nbytes, handle)))
            case wire.UnlendExport(segment):
                self._close(segment)
            case _:
                return False
        return True

    def _start(self) -> None:
        with suppress(CudaError):  # then nothing is kept
            self._device.enter()
            self._device.exports.start(self._send)

    def _open(self, segment: int, nbytes: int, handle: bytes) -> str:
        try:
            self._device.enter()
            self._lent[segment] = self._device.opened.open(handle, nbytes)
        except (CudaError, ValueError) as error:
            self._lent[segment] = problem = client_text(error)
            return problem
        return ""

    def _close(self, segment: int) -> None:
        opened = self._lent.pop(segment)
        if not isinstance(opened, str):
            self._device.opened.let_go(opened)

    def retire(self) -> None:
        self._device.exports.withdraw(self._send)

    def close(self) -> None:
        """No batch of the front runs any more: close what it lent, but for arrays that are still over it."""
        self.retire()
        if self._lent:
            with suppress(CudaError):  # nothing is copied any more
                self._device.settle()
        for segment in list(self._lent):
            self._close(segment)
