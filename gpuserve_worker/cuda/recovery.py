"""What an ``AsyncLoop`` on a device does after a failure, as ``DeviceLoop`` does for plain callables: a batch
for which the memory did not suffice is run again in halves, and a device that is lost ends the loop. Others
may be under way at once, and go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from gpuserve_worker import wire
from gpuserve_worker.cuda.device import Device
from gpuserve_worker.cuda.faults import Loss, is_out_of_memory
from gpuserve_worker.cuda.second_run import SecondRun
from gpuserve_worker.execution import Execution
from gpuserve_worker.halves import Part, joined
from gpuserve_worker.intake import TakenIn
from gpuserve_worker.model import Model
from gpuserve_worker.outputs import Answers
from gpuserve_worker.reporting import Report
from gpuserve_worker.session import Session
from gpuserve_worker.wire import WireFailure

#: Calls the callable on a part of a batch, whose requests are told apart in the answers.
Attempt: TypeAlias = Callable[[wire.Run, TakenIn], Awaitable[Answers]]


class Recovery:
    """Of the batches of one model on its device."""

    def __init__(self, device: Device, execution: Execution, model: Model, report: Report) -> None:
        self._execution = execution
        self._report = report
        self._second_run = SecondRun(device, execution, model, report)
        self._loss = Loss(device, model.name, model.context.instance)

    @property
    def device_is_lost(self) -> bool:
        """Whether this process can use its device no more."""
        return bool(self._loss.text)

    def is_worth_it(self, error: Exception, run: wire.Run, *, was_alone: bool) -> bool:
        """Whether a batch that failed with an error may succeed when it is run again."""
        return is_out_of_memory(error) and self._second_run.is_possible(run, was_alone=was_alone)

    async def run_again(self, session: Session, run: wire.Run, attempt: Attempt) -> Answers | WireFailure:
        """The answers to a batch that is run once more; raises as ``SecondRun.parts``."""
        parts = self._second_run.parts(session, run)
        return joined(parts, [await self._last_attempt(session, part, attempt) for part in parts])

    def failure(self, error: BaseException, run: wire.Run) -> WireFailure | None:
        """What a batch fails with for want of memory; None where that was not its error."""
        return self._second_run.no_room(run, error) if is_out_of_memory(error) else None

    async def judge(self, failed: wire.Failed, *, was_alone: bool) -> wire.Failed | None:
        """What a batch that failed is told; None: nothing, since the device is lost, and it need not have
        been its doing.
        """
        was_known = self.device_is_lost
        if not was_known and not await asyncio.to_thread(self._loss.find):
            return failed
        if not was_known:
            self._report.error(self._loss.last_words())
        if was_alone and self._loss.take_blame():
            return failed._replace(failure=self._loss.failure())
        return None

    async def _last_attempt(self, session: Session, part: Part, attempt: Attempt) -> Answers | WireFailure:
        try:
            return await attempt(part.run, part.taken)
        except Exception as error:  # user code may raise anything; its requests fail and nothing else
            failure = self.failure(error, part.run)
            return failure or self._execution.failure_of_call(error, session, part.taken)
