"""Where the stand-in for CUDA is as unkind as a GPU: each function looks at one such place and prints what it
found as JSON. Needs the stand-in.
"""

import ctypes
import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path

import cupy
import numpy as np
from cuda_facts import status

runtime = cupy.cuda.runtime
TO_HOST = runtime.memcpyDeviceToHost
#: Two that fit into one block of 2 MiB, and one that has its own.
SIZES = (64, 64, 3 << 20)
MIB = 1 << 20


def _bytes(address, nbytes):
    target = np.zeros(nbytes, np.uint8)
    runtime.memcpy(target.ctypes.data, address, nbytes, TO_HOST)
    return target


def shares():
    """Export allocations that hold 1, 2 and 3, and free those that are named."""
    made = [runtime.malloc(nbytes) for nbytes in SIZES]
    for number, address in enumerate(made):
        runtime.memset(address, number + 1, SIZES[number])
    runtime.deviceSynchronize()
    print(*(runtime.ipcGetMemHandle(one).hex() for one in made), flush=True)
    for line in sys.stdin:
        runtime.free(made[int(line)])
        print("freed", flush=True)
    return {}


def opens(*handles):
    """What is seen of memory of another process, and in which range it is said to lie."""
    ask = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    found = []
    for handle in handles:
        try:
            address = runtime.ipcOpenMemHandle(bytes.fromhex(handle))
        except runtime.CUDARuntimeError as error:
            found.append(error.status)
            continue
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        assert ask(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address)) == 0
        found.append([int(_bytes(address, 1)[0]), address - base.value, nbytes.value])
    return {"found": found}


def closes(first, second):
    """Two places of one block: the other one is there when the first is closed."""
    at, beside = (runtime.ipcOpenMemHandle(bytes.fromhex(one)) for one in (first, second))
    return {
        "closed": status(runtime.ipcCloseMemHandle, at),
        "again": status(runtime.ipcCloseMemHandle, at),
        "beside": int(_bytes(beside, 1)[0]),
        "then": status(runtime.ipcCloseMemHandle, beside),
        "after": status(_bytes, beside, 1),
    }


def unwritten():
    """Which values memory has that nobody has written to, of every kind."""
    large = cupy.empty(40 * MIB, np.uint8)
    host = cupy.cuda.alloc_pinned_memory(4096)
    return {
        "small": np.unique(_bytes(runtime.malloc(64), 64)).tolist(),
        "array": bool(np.isnan(cupy.empty(1000, np.float32).get()).all()),
        "ends": [np.unique(large[at:][:4096].get()).tolist() for at in (0, -4096)],
        "host": np.unique(np.frombuffer((ctypes.c_uint8 * 4096).from_address(host.ptr), np.uint8)).tolist(),
    }


def pool():
    """What cupy's pool keeps, cuts and shares."""
    kept = cupy.get_default_memory_pool()
    free, _ = runtime.memGetInfo()
    large = cupy.empty(8 * MIB, np.uint8)
    address = large.data.ptr
    del large
    first, second = cupy.empty(MIB, np.uint8), cupy.empty(MIB, np.uint8)
    found = {
        "cut": [one.data.ptr - address for one in (first, second)],
        "handles": len({runtime.ipcGetMemHandle(one.data.ptr) for one in (first, second)}),
        "kept": kept.free_bytes(),
        "taken": free - runtime.memGetInfo()[0],
    }
    kept.free_all_blocks()
    found["while in use"] = kept.free_bytes()
    del first, second
    found["joined"] = kept.n_free_blocks()
    kept.free_all_blocks()
    return {**found, "after": free - runtime.memGetInfo()[0]}


class _Counter(threading.Thread):
    """Counts as long as it is let."""

    def __init__(self):
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self.start()

    def run(self):
        last = time.perf_counter()
        while True:
            now = time.perf_counter()
            self.longest_s, last = max(self.longest_s, now - last), now
            time.sleep(0.0005)


def _pause_s(call):
    """How long a call takes, and how long no other thread could run meanwhile."""
    counter = _Counter()
    time.sleep(0.005)
    counter.longest_s, began = 0.0, time.perf_counter()
    call()
    took_s = time.perf_counter() - began
    time.sleep(0.002)
    return took_s, counter.longest_s


def costs(handle):
    """Seconds that calls take and keep the interpreter's lock."""
    memory = np.frombuffer(mmap.mmap(-1, 64 * MIB), np.uint8)
    event = runtime.eventCreateWithFlags(2)
    found = {
        "page-lock": _pause_s(lambda: runtime.hostRegister(memory.ctypes.data, 64 * MIB, 0)),
        "open": _pause_s(lambda: runtime.ipcOpenMemHandle(bytes.fromhex(handle))),
    }
    unlocking = threading.Thread(target=runtime.hostUnregister, args=(memory.ctypes.data,))

    def record_beside():
        unlocking.start()
        time.sleep(0.005)
        runtime.eventRecord(event, 0)

    found["record beside unlock"] = _pause_s(record_beside)
    unlocking.join()
    return found


def destroyed_event():
    """An event is asked for after it was destroyed."""
    event = runtime.eventCreateWithFlags(2)
    runtime.eventDestroy(event)
    return {"status": runtime.eventQuery(event)}


def destroyed_stream():
    """A stream is used after it was destroyed."""
    stream = runtime.streamCreateWithFlags(1)
    runtime.streamDestroy(stream)
    return {"status": status(runtime.streamSynchronize, stream)}


def compiles():
    """A copy, which needs no compiler, and then the kinds of work that need one, by what is raised."""
    found = {"copied": cupy.zeros(4, np.float32).get().tolist()}
    for name, call in {
        "kernel": lambda: cupy.zeros(4) + 1,
        "product": lambda: cupy.zeros((2, 2)) @ cupy.zeros((2, 2)),
    }.items():
        try:
            call()
        except RuntimeError as error:
            found[name] = f"{type(error).__module__}.{type(error).__name__}"
        else:
            found[name] = ""
    return found


def _links():
    """What the descriptors of this process lead to."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield Path(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # of this very listing
            continue


def traces():
    """Nodes of the driver that are open, and names in /dev/shm; then it waits for the end of its input."""
    runtime.setDevice(0)
    mine = f"cuda.shm.{os.getuid():x}.{os.getpid():x}."
    found = {
        "nodes": sorted(one.name for one in _links() if one.parent.name == "dev" and "nvidia" in one.name),
        "shm": [one for one in os.listdir("/dev/shm") if one.startswith(mine)],
    }
    print(json.dumps(found), flush=True)
    sys.stdin.read()
    return {}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
