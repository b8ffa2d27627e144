"""The end of a batch: its reply, whose outputs may still be on their way from a device. Nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuserve_worker import wire
from gpuserve_worker.failure import DeviceError
from gpuserve_worker.regions import RegionError
from gpuserve_worker.session import Reply
from gpuserve_worker.stopwatch import Stopwatch

if TYPE_CHECKING:
    from gpuserve_worker.cuda.output_copies import OutputCopies


class Finishing:
    """A reply to come. Made by ``Execution.begin_done``; any thread may wait for it, one at a time.

    ``copies`` is None where the ``reply`` is there already; ``failure`` says what becomes of an error.
    """

    def __init__(
        self,
        batch_id: int,
        watch: Stopwatch,
        failure: Callable[[BaseException], wire.WireFailure],
        copies: OutputCopies | None,
        reply: Reply | None = None,
    ) -> None:
        self._batch_id = batch_id
        self._watch = watch
        self._failure = failure
        self._copies = copies
        self._reply = reply

    def is_ready(self) -> bool:
        """Whether ``wait()`` returns at once."""
        return self._copies is None or self._copies.is_ready()

    def wait(self) -> Reply:
        """The reply, when all of it is there; afterwards nothing of the batch is referred to any more. An
        error of the device makes it a ``Failed``.
        """
        if self._reply is None:
            assert self._copies is not None
            self._reply = self._finished(self._copies)
            self._copies = None
        return self._reply

    def _finished(self, copies: OutputCopies) -> Reply:
        try:
            outputs, responses, parameters = copies.wait()
        except (DeviceError, RegionError) as error:
            return wire.Failed(self._batch_id, self._failure(error), False)
        return wire.Done(self._batch_id, outputs, responses, False, *self._watch.phases(), parameters)
