"""What one front has a worker keep on its device for other workers, and what of theirs it lends to it. Made
for each front, over what the worker has for all of them: ``device/exports.py`` and ``device/loans.py``. Bytes
are copied by ``output_copies.py`` and ``staging.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpuserve_worker.calling.failure import client_text
from gpuserve_worker.cuda.device.exports import ExportBlock
from gpuserve_worker.cuda.device.opened import Mapped, OpenedMemory, OpenState
from gpuserve_worker.cuda.device.runtime import CudaError
from gpuserve_worker.memory.regions import RegionError
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.payloads import DeviceLoan

if TYPE_CHECKING:
    from gpuserve_worker.cuda.device.device import CudaDevice


class ExportGone(RegionError):
    """What another worker kept on its device cannot be read here. The text is one sentence for the client."""

    code = "UNAVAILABLE"


class _Lent(NamedTuple):
    """``nbytes`` of another worker's memory."""

    memory: OpenedMemory
    nbytes: int

    def mapped(self) -> Mapped:
        """Where they are, once that is known; raises ``ExportGone`` where they cannot be read."""
        try:
            return self.memory.mapped(self.nbytes)
        except (CudaError, ValueError) as error:
            raise ExportGone(client_text(error)) from None


class ExportExchange:
    """The exports of a worker and its loans of others', for one front, which ``send`` reaches. ``fail`` is
    told what ends the worker.
    """

    def __init__(
        self,
        device: CudaDevice,
        send: Callable[[wire.Message], object],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._device = device
        self._send = send
        self._fail = fail
        self._lent: dict[int, _Lent] = {}

    # ---- the owner's side -----------------------------------------------------------------

    def keep(self, nbytes: int) -> ExportBlock | None:
        """Memory for an output that stays on the device; None where it has to go to the host."""
        return self._device.exports.allocate(nbytes, self._send)

    # ---- the borrower's side --------------------------------------------------------------

    @property
    def lends(self) -> bool:
        return bool(self._lent)

    def opened(self, loan: DeviceLoan) -> OpenedMemory:
        """The memory that a loan is in, from ``loan.offset`` on, once that is open. Raises ``ExportGone``
        where it could not be opened, ``ValueError`` where the bytes were not lent.
        """
        lent = self._lent.get(loan.segment)
        try:
            mapped = None if lent is None else lent.mapped()
        except ExportGone as gone:
            raise ExportGone(f"an output of the step before cannot be read on this device: {gone}") from None
        outside = mapped is None or min(loan.offset, loan.nbytes) < 0
        if lent is None or mapped is None or outside or loan.offset + loan.nbytes > mapped.nbytes:
            raise ValueError(f"no {loan.nbytes} bytes at {loan.offset} of lent export {loan.segment}")
        return lent.memory

    def opening(self, segment: int) -> OpenedMemory | None:
        """What is waited for, where a segment that was lent is being opened."""
        lent = self._lent.get(segment)
        return lent.memory if lent is not None and lent.memory.state is OpenState.OPENING else None

    # ---- messages -------------------------------------------------------------------------

    def take(self, message: wire.Message) -> bool:
        """Obey a message, if it is about exports; ``KeyError``: it names memory that there is not."""
        match message:
            case wire.StartExports():
                self._start()
            case wire.FreeExports(blocks):
                self._device.exports.free(blocks)
            case wire.LendExport(segment, nbytes, handle):
                self._open(segment, nbytes, handle)
            case wire.UnlendExport(segment):
                self._close(segment)
            case _:
                return False
        return True

    def _start(self) -> None:
        with suppress(CudaError):  # then nothing is kept
            self._device.enter()
            self._device.exports.start(self._send)

    def _open(self, segment: int, nbytes: int, handle: bytes) -> None:
        opened = self._device.opened
        lent = self._lent[segment] = _Lent(opened.open(handle), nbytes)
        opened.thread.later(partial(self._tell, segment, lent))

    def _tell(self, segment: int, lent: _Lent) -> None:
        """In the thread that opens handles."""
        problem = ""
        try:
            lent.mapped()
        except ExportGone as gone:
            problem = str(gone)
        except BaseException as error:  # it is the loop that is to raise it
            self._fail(error)
            return
        with suppress(OSError):  # the front is gone
            self._send(wire.ExportOpened(segment, problem))

    def _close(self, segment: int) -> None:
        self._device.opened.let_go(self._lent.pop(segment).memory)

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
