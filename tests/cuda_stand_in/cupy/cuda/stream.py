"""The stand-in for ``cupy.cuda.stream``: streams, events, and the current stream of threads and devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from cupy.cuda import runtime


class _Current(threading.local):
    """device -> the thread's current stream on it."""

    def __init__(self) -> None:
        self.streams: dict[int, _BaseStream] = {}
        self.entered: list[tuple[int, _BaseStream]] = []


_current = _Current()


class Event:
    """An event, destroyed with the object."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self.ptr = 0
        self.ptr = runtime.eventCreateWithFlags(
            (block and runtime.eventBlockingSync)
            | (disable_timing and runtime.eventDisableTiming)
            | (interprocess and runtime.eventInterprocess)
        )

    def __del__(self) -> None:
        if self.ptr:
            _quietly(lambda: runtime.eventDestroy(self.ptr))

    @property
    def done(self) -> bool:
        return runtime.eventQuery(self.ptr) == 0

    def record(self, stream: Any = None) -> None:
        runtime.eventRecord(self.ptr, (stream or get_current_stream()).ptr)

    def synchronize(self) -> None:
        runtime.eventSynchronize(self.ptr)


class _BaseStream:
    """What all streams can do. ``device_id`` -1: not known."""

    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr, self.device_id = ptr, device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)

    def __enter__(self) -> _BaseStream:
        device = runtime.getDevice()
        _current.entered.append((device, get_current_stream()))
        self._make_current()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        device, before = _current.entered.pop()
        _current.streams[device] = before

    def use(self) -> _BaseStream:
        self._make_current()
        return self

    @property
    def done(self) -> bool:
        return runtime.streamQuery(self.ptr) == 0

    @property
    def priority(self) -> int:
        return runtime.streamGetPriority(self.ptr)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def synchronize(self) -> None:
        runtime.streamSynchronize(self.ptr)

    def launch_host_func(self, callback: Callable[[Any], object], arg: Any) -> None:
        runtime.launchHostFunc(self.ptr, callback, arg)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        runtime.eventRecord(event.ptr, self.ptr)
        return event

    def wait_event(self, event: Event) -> None:
        runtime.streamWaitEvent(self.ptr, event.ptr)

    def begin_capture(self, mode: int | None = None) -> None:
        runtime.streamBeginCapture(self.ptr, runtime.streamCaptureModeRelaxed if mode is None else mode)

    def end_capture(self) -> Graph:
        return Graph(runtime.graphInstantiate(runtime.streamEndCapture(self.ptr)))

    def _make_current(self) -> None:
        device = runtime.getDevice()
        if self.device_id not in {-1, device}:
            raise RuntimeError(
                f"This stream was created on device {self.device_id}, the current device is {device}"
            )
        _current.streams[device] = self


class Stream(_BaseStream):
    """A stream, destroyed with the object; ``Stream.null`` is the legacy default stream."""

    null: _BaseStream
    ptds: _BaseStream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        self._owned = False
        if null or ptds:
            super().__init__(runtime.streamPerThread if ptds else 0, -1)
            return
        flags = runtime.streamNonBlocking if non_blocking else runtime.streamDefault
        ptr = runtime.streamCreateWithPriority(flags, priority or 0)
        super().__init__(ptr, runtime.getDevice())
        self._owned = True

    def __del__(self) -> None:
        if self._owned:
            _quietly(lambda: runtime.streamDestroy(self.ptr))

    def __repr__(self) -> str:
        return f"<Stream {self.ptr} (device {self.device_id})>"


class ExternalStream(_BaseStream):
    """A stream of somebody else."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__(ptr, device_id)


class Graph:
    """A graph that was captured, destroyed with the object."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __del__(self) -> None:
        _quietly(lambda: runtime.graphExecDestroy(self.ptr))

    def launch(self, stream: _BaseStream | None = None) -> None:
        runtime.graphLaunch(self.ptr, (stream or get_current_stream()).ptr)


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


def get_current_stream(device_id: int = -1) -> _BaseStream:
    """The current stream of this thread on a device, or on the current one."""
    device = runtime.getDevice() if device_id < 0 else device_id
    return _current.streams.get(device, Stream.null)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds."""
    return runtime.eventElapsedTime(start_event.ptr, end_event.ptr)


def _quietly(destroy: Callable[[], None]) -> None:
    """What cannot be destroyed when its object goes has gone with the device."""
    try:
        destroy()
    except runtime.CUDARuntimeError:
        pass
