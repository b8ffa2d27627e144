"""What CUDA does, as seen through cupy: each function looks at one thing and prints it as JSON. Run with the
name of a function and its arguments; needs a GPU, or the stand-in for one.
"""

import ctypes
import json
import mmap
import sys

import cupy
import numpy as np

runtime = cupy.cuda.runtime
#: CUDA cuts less out of blocks of 2 MiB, which outlive what is freed in them.
NBYTES = 1 << 21
#: Page-locked memory stays mapped until the end.
_locked = []


def status(call, *args):
    """The status that a call ends with; 0 for success."""
    try:
        call(*args)
    except runtime.CUDARuntimeError as error:
        return error.status
    return 0


def locked_bytes(nbytes):
    """Host memory on pages of its own, page-locked."""
    array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    _locked.append(array)
    runtime.hostRegister(array.ctypes.data, nbytes, 0)
    return array


def bad_copies():
    """Copies that are refused, and one after them that is not."""
    device, host = runtime.malloc(NBYTES), np.zeros(2 * NBYTES, np.uint8)
    address, to_device, to_host = host.ctypes.data, runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
    freed = runtime.malloc(NBYTES)
    runtime.free(freed)
    return {
        "past the end": status(runtime.memcpy, device, address, 64 * NBYTES, to_device),
        "freed": status(runtime.memcpy, address, freed, NBYTES, to_host),
        "no device memory": status(runtime.memcpy, address, 0x1000, NBYTES, to_host),
        "good": status(runtime.memcpy, address, device, NBYTES, to_host),
    }


def illegal_address():
    """A kernel that reads where nothing is; nothing works in the process any more."""
    nowhere = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0x10, 64, None, 0), 0)
    cupy.ndarray((4,), np.float32, nowhere) + 1
    return {
        "synchronise": status(runtime.deviceSynchronize),
        "allocate": status(runtime.malloc, NBYTES),
        "ask": status(runtime.memGetInfo),
    }


def page_locking():
    """Registering and unregistering, rightly and wrongly."""
    memory = np.frombuffer(mmap.mmap(-1, NBYTES), np.uint8)
    address = memory.ctypes.data
    return {
        "first": status(runtime.hostRegister, address, NBYTES, 0),
        "again": status(runtime.hostRegister, address, NBYTES, 0),
        "type": runtime.pointerGetAttributes(address).type,
        "unregister": status(runtime.hostUnregister, address),
        "once more": status(runtime.hostUnregister, address),
        "type then": runtime.pointerGetAttributes(address).type,
    }


def out_of_memory():
    """More than the device has, asked of the runtime and of cupy's pool."""
    too_much = runtime.memGetInfo()[1] + NBYTES
    found = {"runtime": status(runtime.malloc, too_much)}
    try:
        cupy.empty(too_much, np.uint8)
    except cupy.cuda.memory.OutOfMemoryError as error:
        found["cupy"] = isinstance(error, MemoryError)
    return {**found, "then": status(runtime.malloc, NBYTES)}


def own_handles():
    """Handles that the process cannot open, and memory that cannot be exported."""
    memory, event = runtime.malloc(NBYTES), cupy.cuda.Event(disable_timing=True, interprocess=True)
    plain = cupy.cuda.Event(disable_timing=True)
    pool = runtime.mallocAsync(NBYTES, 0)
    return {
        "own memory": status(runtime.ipcOpenMemHandle, runtime.ipcGetMemHandle(memory)),
        "garbage": status(runtime.ipcOpenMemHandle, bytes(range(64))),
        "pool": status(runtime.ipcGetMemHandle, pool),
        "plain event": status(runtime.ipcGetEventHandle, plain.ptr),
        "handle": len(runtime.ipcGetEventHandle(event.ptr)),
    }


def address_range():
    """Of an address inside an allocation, by the driver."""
    memory = runtime.malloc(4 * NBYTES)
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    ask = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    found = ask(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(memory + 12345))
    unknown = ask(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(0x1000))
    attributes = runtime.pointerGetAttributes(memory + 1)
    return {
        "status": found,
        "base": base.value == memory,
        "nbytes": nbytes.value,
        "unknown": unknown,
        "device": attributes.device,
        "type": attributes.type,
    }


def events():
    """What events say before and after they are recorded."""
    never, timeless = cupy.cuda.Event(), cupy.cuda.Event(disable_timing=True)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    stream = cupy.cuda.Stream(non_blocking=True)
    start.record(stream)
    end.record(stream)
    end.synchronize()
    timeless.record(stream)
    return {
        "never recorded": never.done,
        "recorded": runtime.eventQuery(end.ptr),
        "in order": cupy.cuda.get_elapsed_time(start, end) >= 0,
        "without timing": status(runtime.eventElapsedTime, timeless.ptr, end.ptr),
        "destroyed stream": _of_destroyed_stream(),
    }


def _of_destroyed_stream():
    """What was queued on a stream is done, though the stream is gone."""
    host, device = locked_bytes(NBYTES), cupy.zeros(NBYTES, np.uint8)
    cupy.cuda.Device().synchronize()
    host[:] = 7
    stream = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
    runtime.memcpyAsync(device.data.ptr, host.ctypes.data, NBYTES, runtime.memcpyHostToDevice, stream)
    runtime.streamDestroy(stream)
    runtime.deviceSynchronize()
    return bool((device == 7).all())


def arrays():
    """What a callable computes, and what is refused."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    one = cupy.asarray(values)
    lent = cupy.from_dlpack(one)
    lent[0] = 100
    found = {
        "arithmetic": ((one * 2 - 1) / 4).get().tolist(),
        "matmul": (one @ one.T).get().tolist(),
        "sum": float(one.sum()),
        "mean": one.mean(axis=1).get().tolist(),
        "slices": one[1:, ::2].get().tolist(),
        "joined": cupy.concatenate([one, one[:1]]).shape,
        "by numpy": type(np.exp(one)) is cupy.ndarray,
        "interface": one.__cuda_array_interface__["data"][0] == one.data.ptr,
        "device": tuple(map(int, one.__dlpack_device__())),
        "cast": str(one.astype(cupy.int8).dtype),
    }
    for name, call in {"implicit": lambda: np.asarray(one), "mixed": lambda: one + values}.items():
        try:
            call()
        except TypeError:
            found[name] = "TypeError"
    return found


def export():
    """Export memory and an event; the memory gets its values late, and then the event is recorded."""
    memory = cupy.ndarray(NBYTES, np.uint8, cupy.cuda.MemoryPointer(cupy.cuda.Memory(NBYTES), 0))
    event = cupy.cuda.Event(disable_timing=True, interprocess=True)
    memory.fill(1)
    cupy.cuda.Device().synchronize()
    print(runtime.ipcGetMemHandle(memory.data.ptr).hex(), runtime.ipcGetEventHandle(event.ptr).hex())
    for line in sys.stdin:
        memory.fill(int(line))
        event.record()
        print("recorded", flush=True)
    return {}


def take_over(memory_handle, event_handle):
    """Open memory and an event of another process, let a stream wait for the event, and read."""
    base = runtime.ipcOpenMemHandle(bytes.fromhex(memory_handle))
    again = runtime.ipcOpenMemHandle(bytes.fromhex(memory_handle))
    event = runtime.ipcOpenEventHandle(bytes.fromhex(event_handle))
    stream = cupy.cuda.Stream(non_blocking=True)
    target = locked_bytes(NBYTES)
    runtime.streamWaitEvent(stream.ptr, event)
    runtime.memcpyAsync(target.ctypes.data, base, NBYTES, runtime.memcpyDeviceToHost, stream.ptr)
    stream.synchronize()
    return {
        "same address": base == again,
        "values": np.unique(target).tolist(),
        "interior": status(runtime.ipcCloseMemHandle, base + 512),
        "closed": [status(runtime.ipcCloseMemHandle, base) for _ in range(3)],
        "after": status(runtime.memcpy, target.ctypes.data, base, NBYTES, runtime.memcpyDeviceToHost),
    }


def open_memory(memory_handle):
    """Whether the memory of another process can be opened."""
    return {"status": status(runtime.ipcOpenMemHandle, bytes.fromhex(memory_handle))}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
