"""Which memory of the host copies are at work on. Memory that is unlocked or unmapped while the device reads
or writes it is somebody else's by the end of the copy; to wait for a whole stream would be to wait for the
callables of later batches, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gpuserve_worker.cuda.device.runtime import Runtime

#: (address, nbytes)
Span: TypeAlias = "tuple[int, int]"


class HostUses:
    """The copies that nobody has waited for yet, by the event that comes when they are over. Any thread may
    call any method: each step is one operation on a dict.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._spans: dict[int, Sequence[Span]] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def begin(self, event: int, spans: Sequence[Span]) -> None:
        """Note copies from and to ``spans``, which an event was recorded after."""
        if spans:
            self._spans[event] = spans

    def end(self, event: int) -> None:
        """An event has come, and may be recorded for something else from now on."""
        self._spans.pop(event, None)

    def wait(self, address: int, nbytes: int) -> None:
        """Wait for the copies from and to this memory, and for nothing else. Raises ``CudaError``."""
        for event, spans in list(self._spans.items()):
            if any(at < address + nbytes and address < at + length for at, length in spans):
                self._runtime.wait(event)
