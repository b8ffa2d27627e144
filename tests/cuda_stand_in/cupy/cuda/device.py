"""The stand-in for ``cupy.cuda.device``."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from cupy.cuda import runtime


class _Entered(threading.local):
    """The devices that this thread's ``with`` statements have to restore."""

    def __init__(self) -> None:
        self.stack: list[int] = []


_entered = _Entered()


class Device:
    """A device of CUDA; in a ``with`` statement the current one of the thread."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, device: int | Device | None = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)

    def use(self) -> None:
        runtime.setDevice(self.id)

    def synchronize(self) -> None:
        with self:
            runtime.deviceSynchronize()

    @property
    def compute_capability(self) -> str:
        found = runtime.getDeviceProperties(self.id)
        return f"{found['major']}{found['minor']}"

    @property
    def pci_bus_id(self) -> str:
        return runtime.deviceGetPCIBusId(self.id)

    def __enter__(self) -> Device:
        before = runtime.getDevice()
        if before != self.id:
            self.use()
        _entered.stack.append(before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before = _entered.stack.pop()
        if runtime.getDevice() != before:
            runtime.setDevice(before)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


def get_device_id() -> int:
    return runtime.getDevice()
