"""What threads of one process do to each other: captures of graphs, the interpreter's lock, the driver's."""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from benchmarks.gpu.questions.asking import (
    EVENTS,
    MIB,
    NON_BLOCKING,
    TO_DEVICE,
    Answer,
    address_of,
    memfd,
    ms_of,
    runtime_of_device,
    status_of,
)
from benchmarks.gpu.questions.handles import EXPORTER, close_by_driver, open_by_driver

_RELAXED: Final = 2


def captures() -> Answer:
    """Whether a thread that tolerates captures spoils none, and how a plain one ends it."""
    runtime, found = runtime_of_device(), {}
    stream, event = (
        runtime.streamCreateWithFlags(NON_BLOCKING),
        runtime.eventCreateWithFlags(EVENTS["sleep"]),
    )
    for name in ("relaxed", "plain"):
        seen: Answer = {}
        runtime.streamBeginCapture(stream, 0)
        thread = threading.Thread(target=_while_captured, args=(runtime, event, name == "relaxed", seen))
        thread.start()
        thread.join()
        seen["capture ends with"] = status_of(runtime.streamEndCapture, stream)
        found[name] = seen
    return found


def _while_captured(runtime: Any, event: int, is_relaxed: bool, seen: Answer) -> None:
    runtime.setDevice(0)
    if is_relaxed:
        mode = ctypes.c_int(_RELAXED)
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        seen["exchange"] = int(exchange(ctypes.byref(mode)))
    seen["eventRecord on the default stream"] = status_of(runtime.eventRecord, event, 0)
    seen["eventSynchronize"] = status_of(runtime.eventSynchronize, event)
    seen["eventQuery"] = int(runtime.eventQuery(event))  # answers its code
    seen["malloc"] = status_of(runtime.malloc, MIB)
    memory = mmap.mmap(-1, MIB)
    seen["hostRegister"] = status_of(runtime.hostRegister, address_of(memory), MIB, 0)


def lock() -> Answer:
    """How long other threads stand still while CUDA opens and closes a handle, by cupy and by ctypes."""
    runtime = runtime_of_device()
    found: Answer = {}
    command = [sys.executable, "-c", EXPORTER, *[str(256 * MIB)] * 4]
    ways: dict[str, tuple[Callable[[bytes], int], Callable[[int], object]]] = {
        "cupy": (runtime.ipcOpenMemHandle, runtime.ipcCloseMemHandle),
        "ctypes": (lambda handle: open_by_driver(handle)[1], close_by_driver),
    }
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as exporter:
        assert exporter.stdout is not None
        made = [bytes.fromhex(one) for one in json.loads(exporter.stdout.readline())]
        for way, (opens, closes) in ways.items():
            for other in (_sleeps, _records):
                opened, closed = _opened_beside(opens, closes, made.pop(), other)
                beside = f"by {way}, beside a thread that {other.__name__[1:]}"
                found |= {f"open {beside}": opened, f"close {beside}": closed}
        exporter.kill()
    return found


def _opened_beside(
    opens: Callable[[bytes], int], closes: Callable[[int], object], handle: bytes, other: Callable[..., Any]
) -> tuple[Answer, Answer]:
    at: list[int] = []
    opened = _beside(lambda: at.append(opens(handle)), other)
    return opened, _beside(lambda: closes(at[0]), other)


def _sleeps() -> Callable[[], object]:
    """What a thread of Python needs: the interpreter."""
    return lambda: None


def _records() -> Callable[[], object]:
    """What a thread that uses the device needs: the driver, too."""
    runtime = runtime_of_device()
    stream = runtime.streamCreateWithFlags(NON_BLOCKING)
    event = runtime.eventCreateWithFlags(EVENTS["sleep"])
    return lambda: runtime.eventRecord(event, stream)


def _beside(call: Callable[[], object], other: Callable[[], Callable[[], object]]) -> Answer:
    """How long a call takes, and how long another thread was without a turn meanwhile, in ms."""
    longest_s, stop, begun = [0.0], threading.Event(), threading.Event()

    def run() -> None:
        step, ended_at = other(), time.perf_counter()
        begun.set()
        while not stop.is_set():
            time.sleep(0.0001)
            step()
            began_at, ended_at = ended_at, time.perf_counter()
            longest_s[0] = max(longest_s[0], ended_at - began_at)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    time.sleep(0.02)
    longest_s[0] = 0.0
    took_ms = ms_of(call)
    stop.set()
    thread.join()
    return {"took_ms": took_ms, "without_a_turn_ms": round(1e3 * longest_s[0], 3)}


def waits() -> Answer:
    """How long another thread stands still while a call takes its time, by cupy, in ms."""
    runtime, cupy = runtime_of_device(), importlib.import_module("cupy")
    nbytes = 256 * MIB
    mapped = mmap.mmap(memfd(nbytes), nbytes)
    at, plain = address_of(mapped), np.ones(nbytes, np.uint8)
    pinned, device = cupy.cuda.alloc_pinned_memory(nbytes), runtime.malloc(nbytes)
    stream, event = runtime.streamCreateWithFlags(NON_BLOCKING), runtime.eventCreateWithFlags(EVENTS["sleep"])
    calls: dict[str, Callable[[], object]] = {
        "hostRegister of 256 MiB": lambda: runtime.hostRegister(at, nbytes, 0),
        "hostUnregister": lambda: runtime.hostUnregister(at),
        "memcpy of 256 MiB that is not locked": lambda: runtime.memcpy(
            device, plain.ctypes.data, nbytes, TO_DEVICE
        ),
        "eventSynchronize behind 1 GiB": lambda: runtime.eventSynchronize(event),
        "streamSynchronize": lambda: runtime.streamSynchronize(stream),
        "free of 256 MiB": lambda: runtime.free(device),
    }
    found: Answer = {}
    for name, call in calls.items():
        if "Synchronize" in name:
            for _ in range(4):
                runtime.memcpyAsync(device, pinned.ptr, nbytes, TO_DEVICE, stream)
            runtime.eventRecord(event, stream)
        found[name] = _beside(call, _sleeps)
    return found


def full_queue() -> Answer:
    """The longest of each call, in ms, while another thread queues kernels faster than they run."""
    runtime, longest, stop = runtime_of_device(), dict[str, float](), threading.Event()
    cupy = importlib.import_module("cupy")
    array = cupy.zeros(64 * MIB, cupy.float32)
    stream, event = (
        runtime.streamCreateWithFlags(NON_BLOCKING),
        runtime.eventCreateWithFlags(EVENTS["sleep"]),
    )

    def queues() -> None:
        runtime.setDevice(0)
        while not stop.is_set():
            cupy.add(array, 1, out=array)

    calls: dict[str, Callable[[], object]] = {
        "eventRecord on the default stream": lambda: runtime.eventRecord(event, 0),
        "eventRecord on another": lambda: runtime.eventRecord(event, stream),
        "eventQuery": lambda: runtime.eventQuery(event),
        "setDevice": lambda: runtime.setDevice(0),
        "sleep of 0.1 ms": lambda: time.sleep(0.0001),
    }
    thread = threading.Thread(target=queues)
    thread.start()
    time.sleep(0.2)  # CUDA takes some thousand ahead
    until_s = time.perf_counter() + 1.0
    while time.perf_counter() < until_s:
        for name, call in calls.items():
            longest[name] = max(longest.get(name, 0.0), ms_of(call))
    stop.set()
    thread.join()
    return dict(longest)
