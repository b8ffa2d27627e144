"""The path of batches whose callable computes on the host: nothing is staged, copied or recovered."""

from __future__ import annotations

from typing import Final

from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol import wire
from gpuserve_worker.running.device_path import Recovery
from gpuserve_worker.running.execution import Execution, Stopwatch
from gpuserve_worker.running.loop import Loop
from gpuserve_worker.running.model import Model
from gpuserve_worker.running.session import FrontSession
from gpuserve_worker.running.splitting import BatchPart
from gpuserve_worker.running.supervision import Reporter


class HostPath:
    """Implements ``WorkerDevicePath`` without a device."""

    page_locks: Final = None
    spares: Final = None
    reader: Final = None
    new_watch = Stopwatch
    new_loop = Loop

    def open_session(self, front: FrontSession, arena: Arena) -> None:
        return None

    def enter_beside(self) -> None:
        return None

    def new_recovery(self, execution: Execution, model: Model, reporter: Reporter) -> Recovery:
        return _NoRecovery()

    def close(self) -> None:
        return None


class _NoRecovery:
    """Implements ``Recovery`` where no failure is a device's."""

    device_is_lost: Final = False

    def is_worth_it(self, error: BaseException, run: wire.Run, *, was_alone: bool) -> bool:
        return False

    def parts(self, session: FrontSession, run: wire.Run) -> list[BatchPart]:
        raise AssertionError("nothing is worth another run on the host")

    def failure(self, error: BaseException, run: wire.Run) -> None:
        return None

    async def judge(self, failed: wire.Failed, *, was_alone: bool) -> wire.Failed:
        return failed
