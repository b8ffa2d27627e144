"""How torch and cupy live in one process, and what a loop of torch's launches is slowed down by."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from typing import Any, Final

from benchmarks.gpu.questions.asking import (
    EVENTS,
    MIB,
    NON_BLOCKING,
    TO_DEVICE,
    Answer,
    median_us,
    runtime_of_device,
)

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
    event, stream = runtime.eventCreateWithFlags(EVENTS["sleep"]), runtime.streamCreateWithFlags(NON_BLOCKING)
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
