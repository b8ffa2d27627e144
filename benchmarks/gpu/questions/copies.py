"""Copies between host and device, what they need, and what each call costs."""

from __future__ import annotations

import importlib
import mmap
from typing import Any

from benchmarks.gpu.questions.asking import (
    EVENTS,
    MIB,
    NON_BLOCKING,
    TO_DEVICE,
    TO_HOST,
    Answer,
    address_of,
    median_us,
    memfd,
    ms_of,
    runtime_of_device,
    seconds_of,
)


def page_locks() -> Answer:
    """Milliseconds of locking memory as arenas have it, once for each process that maps it."""
    runtime, found = runtime_of_device(), {}
    for nbytes in (64 << 10, 16 * MIB, 256 * MIB):
        fd = memfd(nbytes)
        for name in ("first mapping", "second mapping"):
            memory = mmap.mmap(fd, nbytes)
            at = address_of(memory)
            found[f"{nbytes >> 10} KiB, {name}"] = {
                "lock_ms": ms_of(runtime.hostRegister, at, nbytes, 0),
                "unlock_ms": ms_of(runtime.hostUnregister, at),
                "again_ms": ms_of(runtime.hostRegister, at, nbytes, 0),
            }
    return {**found, "memfd of 256 MiB, ms": ms_of(memfd, 256 * MIB)}


def bandwidth() -> Answer:
    """GB/s by where the host's memory is from: what locked memfds cost is told from what our code costs."""
    runtime, found = runtime_of_device(), {}
    cupy = importlib.import_module("cupy")
    for nbytes in (MIB, 16 * MIB, 256 * MIB):
        own = [cupy.cuda.alloc_pinned_memory(nbytes) for _ in range(2)]
        maps = [mmap.mmap(memfd(nbytes), nbytes) for _ in range(2)]
        for one in maps:
            runtime.hostRegister(address_of(one), nbytes, 0)
        device = [runtime.malloc(nbytes) for _ in range(2)]
        for source, hosts in (
            ("hostAlloc", [one.ptr for one in own]),
            ("memfd, locked", [*map(address_of, maps)]),
        ):
            for name, rate in _rates(runtime, device, hosts, nbytes).items():
                found[f"{nbytes // MIB} MiB {name}, {source}"] = rate
        for one in maps:
            runtime.hostUnregister(address_of(one))
        for at in device:
            runtime.free(at)
    return found


def _rates(runtime: Any, device: list[int], hosts: list[int], nbytes: int) -> Answer:
    """GB/s to the device, to the host, and both ways at once."""
    count = max(8, (2 << 30) // nbytes)
    streams = [runtime.streamCreateWithFlags(NON_BLOCKING) for _ in range(2)]

    def move(kinds: tuple[int, ...]) -> None:
        for index in range(count):
            for stream, kind in zip(streams, kinds, strict=False):
                # Both ways at once, each has memory of its own at both ends.
                place = index % 2 if len(kinds) == 1 else kind - 1
                ends = device[place], hosts[place]
                runtime.memcpyAsync(*(ends if kind == TO_DEVICE else ends[::-1]), nbytes, kind, stream)
        for stream in streams:
            runtime.streamSynchronize(stream)

    found: Answer = {}
    ways = {"to the device": (TO_DEVICE,), "to the host": (TO_HOST,), "both ways": (TO_DEVICE, TO_HOST)}
    for name, kinds in ways.items():
        move(kinds)
        took_s = sorted(seconds_of(move, kinds) for _ in range(3))[1]
        found[name] = round(len(kinds) * count * nbytes / took_s / 1e9, 2)
    return found


def calls() -> Answer:
    """Microseconds of a call from Python, and until a waiter wakes, asleep and not."""
    runtime = runtime_of_device()
    stream = runtime.streamCreateWithFlags(NON_BLOCKING)
    device, host = runtime.malloc(MIB), importlib.import_module("cupy").cuda.alloc_pinned_memory(MIB)
    events = {name: runtime.eventCreateWithFlags(flags) for name, flags in EVENTS.items()}
    found: Answer = {
        "setDevice": median_us(lambda: runtime.setDevice(0)),
        "eventRecord": median_us(lambda: runtime.eventRecord(events["sleep"], stream)),
        "eventRecord, default stream": median_us(lambda: runtime.eventRecord(events["sleep"], 0)),
        "eventQuery": median_us(lambda: runtime.eventQuery(events["sleep"])),
        "streamWaitEvent": median_us(lambda: runtime.streamWaitEvent(0, events["sleep"])),
        "memcpyAsync of 4 KiB": median_us(
            lambda: runtime.memcpyAsync(device, host.ptr, 4096, TO_DEVICE, stream)
        ),
    }
    runtime.deviceSynchronize()
    for nbytes in (4096, 32 << 10, 256 << 10, MIB):
        for name, event in events.items():

            def there(nbytes: int = nbytes, event: int = event) -> None:
                runtime.memcpyAsync(device, host.ptr, nbytes, TO_DEVICE, stream)
                runtime.eventRecord(event, stream)
                runtime.eventSynchronize(event)

            found[f"copy of {nbytes >> 10} KiB and wait, {name}"] = median_us(there, 500)
    return found


def allocations() -> Answer:
    """Milliseconds of taking memory of the device from the driver, and of giving it back."""
    runtime, found = runtime_of_device(), {}
    made: list[int] = []

    def take(nbytes: int) -> None:
        made.append(runtime.malloc(nbytes))

    for nbytes in (64 << 10, 32 * MIB, 256 * MIB):
        rounds = [(ms_of(take, nbytes), ms_of(runtime.free, made[-1])) for _ in range(5)]
        malloc_ms, free_ms = (sorted(one)[2] for one in zip(*rounds, strict=True))
        found[f"{nbytes >> 10} KiB"] = {"malloc_ms": malloc_ms, "free_ms": free_ms}
    return found
