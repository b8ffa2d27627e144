"""What threads of one process do to each other, and how torch and cupy live in one process."""

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
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from benchmarks.gpu.questions.asking import (
    MIB,
    TO_DEVICE,
    Answer,
    address_of,
    beside,
    median_us,
    memfd,
    ms_of,
    records,
    runtime_of_device,
    sleeps,
    status_of,
    stream_and_event,
)
from benchmarks.gpu.questions.memory import EXPORTER, close_by_driver, open_by_driver

_RELAXED: Final = 2


def captures() -> Answer:
    """Whether a thread that tolerates captures spoils none, and how a plain one ends it."""
    runtime, found = runtime_of_device(), {}
    stream, event = stream_and_event(runtime)
    for name in ("relaxed", "plain"):
        seen: Answer = {}
        runtime.streamBeginCapture(stream, 0)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_while_captured, runtime, event, name == "relaxed", seen).result()
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
    """How long other threads are blocked while CUDA opens and closes a handle, by cupy and by ctypes."""
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
            for other in (sleeps, records):
                at: list[int] = []
                how = f"by {way}, beside a thread that {other.__name__}"
                found[f"open {how}"] = beside(lambda: at.append(opens(made.pop())), other)  # noqa: B023
                found[f"close {how}"] = beside(lambda: closes(at[0]), other)  # noqa: B023
        exporter.kill()
    return found


def waits() -> Answer:
    """How long another thread is blocked while a call takes its time, by cupy, in ms."""
    runtime, cupy = runtime_of_device(), importlib.import_module("cupy")
    nbytes = 256 * MIB
    mapped = mmap.mmap(memfd(nbytes), nbytes)
    at, plain = address_of(mapped), np.ones(nbytes, np.uint8)
    pinned, device = cupy.cuda.alloc_pinned_memory(nbytes), runtime.malloc(nbytes)
    stream, event = stream_and_event(runtime)
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
        found[name] = beside(call, sleeps)
    return found


def full_queue() -> Answer:
    """The longest of each call, in ms, while another thread queues kernels faster than they run."""
    runtime, longest, stop = runtime_of_device(), dict[str, float](), threading.Event()
    cupy = importlib.import_module("cupy")
    array = cupy.zeros(64 * MIB, cupy.float32)
    stream, event = stream_and_event(runtime)

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


#: Milliseconds; the first is Python's own.
_SWITCH_INTERVALS_MS: Final = (5.0, 1.0, 0.2, 0.05)


def torch_facts() -> Answer:
    """How torch and cupy share arrays, and how torch counts who uses a storage."""
    torch = importlib.import_module("torch")
    runtime_of_device()
    cupy = importlib.import_module("cupy")
    array = cupy.arange(1024, dtype=cupy.float32)
    tensor = torch.from_dlpack(array)
    new = torch.zeros(4, device="cuda") + 1
    count = torch._C._storage_Use_Count
    found: Answer = {
        "same memory": tensor.data_ptr() == array.data.ptr,
        "to torch, us": median_us(lambda: torch.from_dlpack(array), 500),
        "to cupy, us": median_us(lambda: cupy.from_dlpack(tensor), 500),
        "storage users": int(count(new.untyped_storage()._cdata)),
    }
    view = new[:2]
    found["storage users with a view"] = int(count(view.untyped_storage()._cdata))
    found["graph trees came with torch"] = "torch._inductor.cudagraph_trees" in sys.modules
    found["types that come back as they went"] = _types(torch, cupy)
    return {**found, **_asked_too_early(torch, cupy)}


def _types(torch: Any, cupy: Any) -> list[str]:
    """Of the types that requests have; bfloat16 goes as bits."""
    names = ["bool", "float16", "float32", "float64"]
    names += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    right = []
    for name in names:
        try:
            back = cupy.from_dlpack(torch.from_dlpack(cupy.ones(4, name)))
        except (BufferError, RuntimeError, TypeError, ValueError):
            continue
        right += [name] if back.dtype == name and bool(back.all()) else []
    bits = torch.from_dlpack(cupy.zeros(4, "int16")).view(torch.bfloat16).view(torch.int16)
    return right + (["bfloat16"] if cupy.from_dlpack(bits).dtype == "int16" else [])


def _asked_too_early(torch: Any, cupy: Any) -> Answer:
    """Whether torch takes an event that was not there yet for an error of its own."""
    runtime = cupy.cuda.runtime
    stream, event = stream_and_event(runtime)
    host, device = cupy.cuda.alloc_pinned_memory(256 * MIB), runtime.malloc(256 * MIB)
    runtime.memcpyAsync(device, host.ptr, 256 * MIB, TO_DEVICE, stream)
    runtime.eventRecord(event, stream)
    code = int(runtime.eventQuery(event))
    return {"eventQuery, too early": code, "torch then": float((torch.ones(3, device="cuda") * 2).sum())}


def torch_loop() -> Answer:
    """A small network in a bare loop, alone and beside threads that want the interpreter now and then."""
    torch = importlib.import_module("torch")
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, activation="gelu", batch_first=True)
    network = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval().cuda()
    x, stop = torch.randn(1, 128, 512), threading.Event()

    def rate() -> int:
        with torch.inference_mode():
            for _ in range(20):
                network(x.cuda()).cpu()
            count, began_at = 0, time.perf_counter()
            while (took_s := time.perf_counter() - began_at) < 1.0:
                network(x.cuda()).cpu()
                count += 1
        return round(count / took_s)

    def wants_the_lock() -> None:
        while not stop.wait(0.0005):
            sum(range(2000))

    found: Answer = {"alone": rate()}
    threads = [threading.Thread(target=wants_the_lock, daemon=True) for _ in range(2)]
    for one in threads:
        one.start()
    for interval_ms in (*_SWITCH_INTERVALS_MS, *_SWITCH_INTERVALS_MS):  # twice, since clocks go up and down
        sys.setswitchinterval(interval_ms / 1e3)
        name = f"beside two threads, switch interval {interval_ms:g} ms"
        found[name] = max(found.get(name, 0), rate())
    stop.set()
    return found
