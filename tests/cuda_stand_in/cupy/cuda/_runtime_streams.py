"""The part of ``cupy.cuda.runtime`` about streams, events and calls into the host's code."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from cuda_simulation import captures, errors, events
from cuda_simulation.context import current, entry
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.scheduler import Engine, Operation

_MS: Final = 1000


@entry(keeps_lock=True)
def streamCreate() -> int:
    return current().streams.create(current().device, 0).handle


@entry(keeps_lock=True)
def streamCreateWithFlags(flags: int) -> int:
    return current().streams.create(current().device, flags).handle


@entry(keeps_lock=True)
def streamCreateWithPriority(flags: int, priority: int) -> int:
    return current().streams.create(current().device, flags, priority).handle


@entry(keeps_lock=True)
def streamGetFlags(stream: int) -> int:
    return current().stream(stream).flags


@entry(keeps_lock=True)
def streamGetPriority(stream: int) -> int:
    return current().stream(stream).priority


@entry(keeps_lock=True)
def streamDestroy(stream: int) -> None:
    current().streams.destroy(stream)


@entry()
def streamSynchronize(stream: int) -> None:
    context = current()
    context.scheduler.wait(context.streams.unfinished(context.stream(stream)))


def streamQuery(stream: int) -> int:
    """A status, and no exception."""
    return _status(lambda: not current().streams.unfinished(current().stream(stream)))


@entry()
def streamBeginCapture(stream: int, mode: int = captures.RELAXED) -> None:
    current().captures.begin(current().stream(stream).handle, mode)


@entry()
def streamEndCapture(stream: int) -> int:
    return current().captures.end(current().stream(stream).handle)


@entry()
def graphInstantiate(graph: int) -> int:
    """As the graph itself: what can be launched."""
    return graph


@entry()
def graphLaunch(graphExec: int, stream: int) -> None:
    context = current()
    target = context.stream(stream)
    for operation in context.captures.operations(graphExec):
        context.streams.queue(target, operation)


@entry()
def graphExecDestroy(graphExec: int) -> None:
    current().captures.destroy(graphExec)


@entry()
def streamIsCapturing(stream: int) -> bool:
    current().stream(stream)
    return False


@entry()
def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
    context = current()
    target = context.stream(stream)
    held = events.hold(context.events.get(event), target.device.gpu_uuid)
    if held:
        context.streams.queue(target, held)


@entry(keeps_lock=True)
def eventCreate() -> int:
    return current().events.create(current().device, 0).handle


@entry(keeps_lock=True)
def eventCreateWithFlags(flags: int) -> int:
    return current().events.create(current().device, flags).handle


@entry(keeps_lock=True)
def eventDestroy(event: int) -> None:
    current().events.destroy(event)


@entry(keeps_lock=True)
def eventRecord(event: int, stream: int) -> None:
    context = current()
    recorded, target = context.events.get(event), context.stream(stream)
    if recorded.device != target.device:
        raise CUDARuntimeError(errors.INVALID_RESOURCE_HANDLE)
    context.streams.queue(target, events.mark(recorded, target.device.gpu_uuid))


def eventQuery(event: int) -> int:
    """A status, and no exception."""
    return _status(lambda: current().events.get(event).done)


@entry()
def eventSynchronize(event: int) -> None:
    """For an interprocess event it waits by an operation of its own, which looks at the shared state."""
    context = current()
    waited = context.events.get(event)
    place = waited.place
    if waited.shared:
        place = events.hold(waited, context.device.gpu_uuid)
        context.scheduler.submit(place)
    context.scheduler.wait([place] if place else [])
    if waited.flags & events.BLOCKING_SYNC and context.view.now.wake_s:
        time.sleep(context.view.now.wake_s)


@entry(keeps_lock=True)
def eventElapsedTime(start: int, end: int) -> float:
    """Milliseconds."""
    both = [current().events.get(one) for one in (start, end)]
    if any(one.flags & events.DISABLE_TIMING or one.place is None for one in both):
        raise CUDARuntimeError(errors.INVALID_RESOURCE_HANDLE)
    if not all(one.done for one in both):
        raise CUDARuntimeError(errors.NOT_READY)
    first, last = (one.place.finished_at for one in both if one.place)
    return (last - first) * _MS


@entry()
def launchHostFunc(stream: int, callback: Callable[[Any], object], arg: Any) -> None:
    _queue_host_code(stream, lambda: callback(arg))


@entry()
def streamAddCallback(
    stream: int, callback: Callable[[int, int, Any], object], arg: Any, flags: int = 0
) -> None:
    _queue_host_code(stream, lambda: callback(stream, 0, arg))


def _queue_host_code(stream: int, call: Callable[[], object]) -> None:
    context = current()
    target = context.stream(stream)

    def effect() -> None:
        context.thread.in_callback = True  # in which CUDA cannot be called
        call()

    context.streams.queue(target, Operation(target.device.gpu_uuid, Engine.HOST_CODE, effect=effect))


def _status(is_done: Callable[[], bool]) -> int:
    """The runtime keeps it as the thread's last error, if it is none of success; the driver does not."""
    try:
        status = 0 if _asked(is_done) else errors.NOT_READY
    except CUDARuntimeError as error:
        status = error.status
    current().thread.last_error = status or current().thread.last_error
    return status


@entry("eventQuery", keeps_lock=True)
def _asked(is_done: Callable[[], bool]) -> bool:
    return is_done()
