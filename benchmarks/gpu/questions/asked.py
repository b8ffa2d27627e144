"""``python -m benchmarks.gpu.questions.asked NAME [ARGUMENT]`` asks one question and prints the answer as a
line of JSON. Each in a process of its own, because some of
them hurt: a handle that is none, memory that is gone. The card's settings stay as they are, and nothing is
judged here.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

_MIB: Final = 1 << 20
_TO_DEVICE: Final = 1
_TO_HOST: Final = 2
_NON_BLOCKING: Final = 1
#: ``cudaEventDisableTiming``, and with ``cudaEventBlockingSync``: a waiter spins, or sleeps.
_EVENTS: Final = {"spin": 2, "sleep": 3}
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_RELAXED: Final = 2
_LAZY_PEER_ACCESS: Final = 1
#: Milliseconds; the first is Python's own.
_SWITCH_INTERVALS_MS: Final = (5.0, 1.0, 0.2, 0.05)

Answer = dict[str, Any]


def _runtime() -> Any:
    runtime = importlib.import_module("cupy").cuda.runtime
    runtime.setDevice(0)
    return runtime


def _seconds(call: Callable[..., object], *args: object) -> float:
    began_at = time.perf_counter()
    call(*args)
    return time.perf_counter() - began_at


def _ms(call: Callable[..., object], *args: object) -> float:
    return round(1e3 * _seconds(call, *args), 3)


def _median_us(call: Callable[[], object], count: int = 1000) -> float:
    return round(1e6 * sorted(_seconds(call) for _ in range(count))[count // 2], 2)


def _status(call: Callable[..., object], *args: object) -> int:
    """The number of CUDA's error; 0 where there was none."""
    try:
        call(*args)
    except importlib.import_module("cupy").cuda.runtime.CUDARuntimeError as error:
        return int(error.status)
    return 0


def _memfd(nbytes: int) -> int:
    """Memory as arenas have it."""
    fd = os.memfd_create("facts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def _address(memory: Any) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


# ---- the machine --------------------------------------------------------------------------------


def imports() -> Answer:
    """Seconds; those of torch only where it is installed."""
    found: Answer = {}
    for name in ("numpy", "cupy", "torch"):
        try:
            found[name] = round(_seconds(importlib.import_module, name), 2)
        except ImportError as error:
            found[name] = str(error)
    return found


def context() -> Answer:
    """What the first call of a process takes, and what is left of the memory then."""
    runtime = importlib.import_module("cupy").cuda.runtime
    first_s = round(_seconds(runtime.setDevice, 0), 3)
    free, total = runtime.memGetInfo()
    return {"setDevice_s": first_s, "free_nbytes": free, "total_nbytes": total}


def kernels() -> Answer:
    """The first kernel is compiled, the next are only launched."""
    _runtime()
    cupy = importlib.import_module("cupy")
    one = cupy.zeros(4, cupy.float32)
    found: Answer = {"first_s": round(_seconds((one * 2).get), 3)}
    found["next_us"] = _median_us(lambda: one * 2, 500)
    return found


def nvml() -> Answer:
    """The code with which NVML answers what the server asks round after round; 0 for an answer."""
    library = importlib.import_module("pynvml")
    library.nvmlInit()
    gpu = library.nvmlDeviceGetHandleByIndex(0)
    field = getattr(library, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 0)
    questions: dict[str, tuple[object, ...]] = {
        "MemoryInfo": (), "UtilizationRates": (), "PowerUsage": (), "EnforcedPowerLimit": (),
        "RemappedRows": (),
        "TotalEnergyConsumption": (), "RetiredPagesPendingStatus": (), "Temperature": (0,), "MigMode": (),
        "TotalEccErrors": (1, 0), "CurrentClocksEventReasons": (), "ComputeRunningProcesses": (),
        "FieldValues": ([field],), "CpuAffinity": (4,), "MemoryAffinity": (4, 0), "SupportedEventTypes": (),
    }  # fmt: skip
    found: Answer = {}
    for name, args in questions.items():
        try:
            took_ms = _ms(getattr(library, f"nvmlDeviceGet{name}"), gpu, *args)
            found[name] = [0, took_ms]
        except library.NVMLError as error:
            found[name] = [int(error.value), str(error)]
        except AttributeError as error:
            found[name] = [-1, str(error)]
    return found


# ---- copies and calls ---------------------------------------------------------------------------


def page_locks() -> Answer:
    """Milliseconds of locking memory as arenas have it, once for each process that maps it."""
    runtime, found = _runtime(), {}
    for nbytes in (64 << 10, 16 * _MIB, 256 * _MIB):
        fd = _memfd(nbytes)
        for name in ("first mapping", "second mapping"):
            memory = mmap.mmap(fd, nbytes)
            at = _address(memory)
            found[f"{nbytes >> 10} KiB, {name}"] = {
                "lock_ms": _ms(runtime.hostRegister, at, nbytes, 0),
                "unlock_ms": _ms(runtime.hostUnregister, at),
                "again_ms": _ms(runtime.hostRegister, at, nbytes, 0),
            }
    return {**found, "memfd of 256 MiB, ms": _ms(_memfd, 256 * _MIB)}


def bandwidth() -> Answer:
    """GB/s by where the host's memory is from: what locked memfds cost is told from what our code costs."""
    runtime, found = _runtime(), {}
    cupy = importlib.import_module("cupy")
    for nbytes in (_MIB, 16 * _MIB, 256 * _MIB):
        own = [cupy.cuda.alloc_pinned_memory(nbytes) for _ in range(2)]
        maps = [mmap.mmap(_memfd(nbytes), nbytes) for _ in range(2)]
        for one in maps:
            runtime.hostRegister(_address(one), nbytes, 0)
        device = [runtime.malloc(nbytes) for _ in range(2)]
        for source, hosts in (
            ("hostAlloc", [one.ptr for one in own]),
            ("memfd, locked", [*map(_address, maps)]),
        ):
            for name, rate in _rates(runtime, device, hosts, nbytes).items():
                found[f"{nbytes // _MIB} MiB {name}, {source}"] = rate
        for one in maps:
            runtime.hostUnregister(_address(one))
        for at in device:
            runtime.free(at)
    return found


def _rates(runtime: Any, device: list[int], hosts: list[int], nbytes: int) -> Answer:
    """GB/s to the device, to the host, and both ways at once."""
    count = max(8, (2 << 30) // nbytes)
    streams = [runtime.streamCreateWithFlags(_NON_BLOCKING) for _ in range(2)]

    def move(kinds: tuple[int, ...]) -> None:
        for index in range(count):
            for stream, kind in zip(streams, kinds, strict=False):
                # Both ways at once, each has memory of its own at both ends.
                place = index % 2 if len(kinds) == 1 else kind - 1
                ends = device[place], hosts[place]
                runtime.memcpyAsync(*(ends if kind == _TO_DEVICE else ends[::-1]), nbytes, kind, stream)
        for stream in streams:
            runtime.streamSynchronize(stream)

    found: Answer = {}
    ways = {"to the device": (_TO_DEVICE,), "to the host": (_TO_HOST,), "both ways": (_TO_DEVICE, _TO_HOST)}
    for name, kinds in ways.items():
        move(kinds)
        took_s = sorted(_seconds(move, kinds) for _ in range(3))[1]
        found[name] = round(len(kinds) * count * nbytes / took_s / 1e9, 2)
    return found


def calls() -> Answer:
    """Microseconds of a call from Python, and until a waiter wakes, asleep and not."""
    runtime = _runtime()
    stream = runtime.streamCreateWithFlags(_NON_BLOCKING)
    device, host = runtime.malloc(_MIB), importlib.import_module("cupy").cuda.alloc_pinned_memory(_MIB)
    events = {name: runtime.eventCreateWithFlags(flags) for name, flags in _EVENTS.items()}
    found: Answer = {
        "setDevice": _median_us(lambda: runtime.setDevice(0)),
        "eventRecord": _median_us(lambda: runtime.eventRecord(events["sleep"], stream)),
        "eventQuery": _median_us(lambda: runtime.eventQuery(events["sleep"])),
        "streamWaitEvent": _median_us(lambda: runtime.streamWaitEvent(0, events["sleep"])),
        "memcpyAsync of 4 KiB": _median_us(
            lambda: runtime.memcpyAsync(device, host.ptr, 4096, _TO_DEVICE, stream)
        ),
    }
    runtime.deviceSynchronize()
    for nbytes in (4096, 32 << 10, 256 << 10, _MIB):
        for name, event in events.items():

            def there(nbytes: int = nbytes, event: int = event) -> None:
                runtime.memcpyAsync(device, host.ptr, nbytes, _TO_DEVICE, stream)
                runtime.eventRecord(event, stream)
                runtime.eventSynchronize(event)

            found[f"copy of {nbytes >> 10} KiB and wait, {name}"] = _median_us(there, 500)
    return found


# ---- handles ------------------------------------------------------------------------------------

_EXPORTER: Final = """
import sys, json
from cupy.cuda import runtime
runtime.setDevice(0)
memory = [runtime.malloc(int(one)) for one in sys.argv[1:]]
runtime.deviceSynchronize()
print(json.dumps([bytes(runtime.ipcGetMemHandle(one)).hex() for one in memory]), flush=True)
for line in sys.stdin:
    runtime.free(memory[int(line)])
    print("freed", flush=True)
"""


def handles() -> Answer:
    """What handles of another process open, when they are closed, and when their memory or maker is gone."""
    runtime = _runtime()
    sizes = (64, 64, 2 * _MIB, 32 * _MIB)
    command = [sys.executable, "-c", _EXPORTER, *map(str, sizes)]
    found: Answer = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as exporter:
        assert exporter.stdin is not None
        assert exporter.stdout is not None
        made = [bytes.fromhex(one) for one in json.loads(exporter.stdout.readline())]
        opened: list[int] = []
        for position, nbytes in enumerate(sizes):
            took_ms = _ms(lambda one=made[position]: opened.append(runtime.ipcOpenMemHandle(one)))
            found[f"open {nbytes} bytes"] = {"open_ms": took_ms, "range": _range(opened[-1])}
        found["close_ms"] = _ms(runtime.ipcCloseMemHandle, opened[3])
        found["closed twice"] = _status(runtime.ipcCloseMemHandle, opened[3])
        for position in (0, 3):
            exporter.stdin.write(f"{position}\n")
            exporter.stdin.flush()
            exporter.stdout.readline()
            found[f"open after {sizes[position]} bytes, freed there"] = _status(
                runtime.ipcOpenMemHandle, made[position]
            )
        exporter.kill()
    found["open what a dead process had"] = _status(runtime.ipcOpenMemHandle, made[2])
    found["shm"] = [one for one in os.listdir("/dev/shm") if one.startswith("cuda")]
    found["device then"] = _status(runtime.deviceSynchronize)
    return found


def _range(at: int) -> list[int]:
    """The driver's word on the allocation around an address: its code, our offset in it, its size."""
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    ask = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    code = ask(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(at))
    return [int(code), at - base.value, nbytes.value]


def bad_handle(text: str) -> Answer:
    """The code for 64 bytes that are no handle, by cupy and by the driver; whether the device works then."""
    runtime = _runtime()
    code = _status(runtime.ipcOpenMemHandle, bytes.fromhex(text))
    driver_code, _ = _open_by_driver(bytes.fromhex(text))
    then = _status(runtime.deviceSynchronize)
    return {"status": code, "the driver's": driver_code, "device then": then}


class _Handle(ctypes.Structure):
    """As the driver takes it: by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def _open_by_driver(handle: bytes) -> tuple[int, int]:
    """The driver's code, and the address; other threads run meanwhile."""
    address = ctypes.c_uint64()
    opens = ctypes.CDLL("libcuda.so.1").cuIpcOpenMemHandle_v2
    code = opens(ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS))
    return int(code), address.value


def _close_by_driver(address: int) -> None:
    ctypes.CDLL("libcuda.so.1").cuIpcCloseMemHandle(ctypes.c_uint64(address))


# ---- the interpreter's lock, and the driver's ---------------------------------------------------


def lock() -> Answer:
    """How long other threads stand still while CUDA opens and closes a handle, by cupy and by ctypes."""
    runtime = _runtime()
    found: Answer = {}
    command = [sys.executable, "-c", _EXPORTER, *[str(256 * _MIB)] * 4]
    ways: dict[str, tuple[Callable[[bytes], int], Callable[[int], object]]] = {
        "cupy": (runtime.ipcOpenMemHandle, runtime.ipcCloseMemHandle),
        "ctypes": (lambda handle: _open_by_driver(handle)[1], _close_by_driver),
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
    runtime = _runtime()
    stream = runtime.streamCreateWithFlags(_NON_BLOCKING)
    event = runtime.eventCreateWithFlags(_EVENTS["sleep"])
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
    took_ms = _ms(call)
    stop.set()
    thread.join()
    return {"took_ms": took_ms, "without_a_turn_ms": round(1e3 * longest_s[0], 3)}


def full_queue() -> Answer:
    """The longest of each call, in ms, while another thread queues kernels faster than they run."""
    runtime, longest, stop = _runtime(), dict[str, float](), threading.Event()
    cupy = importlib.import_module("cupy")
    array = cupy.zeros(64 * _MIB, cupy.float32)
    stream, event = (
        runtime.streamCreateWithFlags(_NON_BLOCKING),
        runtime.eventCreateWithFlags(_EVENTS["sleep"]),
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
            longest[name] = max(longest.get(name, 0.0), _ms(call))
    stop.set()
    thread.join()
    return dict(longest)


# ---- threads and torch --------------------------------------------------------------------------


def captures() -> Answer:
    """Whether a thread that tolerates captures spoils none, and how a plain one ends it."""
    runtime, found = _runtime(), {}
    stream, event = (
        runtime.streamCreateWithFlags(_NON_BLOCKING),
        runtime.eventCreateWithFlags(_EVENTS["sleep"]),
    )
    for name in ("relaxed", "plain"):
        seen: Answer = {}
        runtime.streamBeginCapture(stream, 0)
        thread = threading.Thread(target=_beside_a_capture, args=(runtime, event, name == "relaxed", seen))
        thread.start()
        thread.join()
        seen["capture ends with"] = _status(runtime.streamEndCapture, stream)
        found[name] = seen
    return found


def _beside_a_capture(runtime: Any, event: int, is_relaxed: bool, seen: Answer) -> None:
    runtime.setDevice(0)
    if is_relaxed:
        mode = ctypes.c_int(_RELAXED)
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        seen["exchange"] = int(exchange(ctypes.byref(mode)))
    seen["eventRecord on the default stream"] = _status(runtime.eventRecord, event, 0)
    seen["eventSynchronize"] = _status(runtime.eventSynchronize, event)
    seen["malloc"] = _status(runtime.malloc, _MIB)


def torch_facts() -> Answer:
    """How torch and cupy share arrays, and how torch counts who uses a storage."""
    torch = importlib.import_module("torch")
    _runtime()
    cupy = importlib.import_module("cupy")
    array = cupy.arange(1024, dtype=cupy.float32)
    tensor = torch.from_dlpack(array)
    new = torch.zeros(4, device="cuda") + 1
    count = torch._C._storage_Use_Count
    found: Answer = {
        "same memory": tensor.data_ptr() == array.data.ptr,
        "to torch, us": _median_us(lambda: torch.from_dlpack(array), 500),
        "to cupy, us": _median_us(lambda: cupy.from_dlpack(tensor), 500),
        "storage users": int(count(new.untyped_storage()._cdata)),
    }
    view = new[:2]
    found["storage users with a view"] = int(count(view.untyped_storage()._cdata))
    return found


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


#: In the order in which they are asked: what is cold first, what hurts last.
QUESTIONS: Final[tuple[Callable[..., Answer], ...]] = (
    imports, context, kernels, nvml, page_locks, calls, bandwidth, handles, lock, full_queue,
    bad_handle, captures, torch_facts, torch_loop,
)  # fmt: skip


def main(name: str, *arguments: str) -> None:
    """Ask, and print."""
    ask = {one.__name__: one for one in QUESTIONS}[name]
    print(json.dumps(ask(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
