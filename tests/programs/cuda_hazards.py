"""What goes wrong on a GPU when something is not waited for. Each function makes one such mistake, or takes
the time, and prints what came of it as JSON. Only on the stand-in do the mistakes show for certain.
"""

import ctypes
import itertools
import json
import sys
import threading
import time

import cupy
import numpy as np
from cuda_facts import NBYTES, locked_bytes, status

runtime = cupy.cuda.runtime
TO_DEVICE, TO_HOST = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
OLD, NEW, NEWER = 1, 2, 3


def _filled(value):
    """Device memory, page-locked host memory, and both hold the value."""
    device, host = cupy.full(NBYTES, value, np.uint8), locked_bytes(NBYTES)
    host[:] = value
    cupy.cuda.Device().synchronize()
    return device, host


def _values(array):
    return np.unique(array).tolist()


def _send(host, device, stream):
    runtime.memcpyAsync(device.data.ptr, host.ctypes.data, NBYTES, TO_DEVICE, stream.ptr)


def _fetch(device, stream):
    """What a stream of its own reads now."""
    target = locked_bytes(NBYTES)
    runtime.memcpyAsync(target.ctypes.data, device.data.ptr, NBYTES, TO_HOST, stream.ptr)
    stream.synchronize()
    return _values(target)


def _streams():
    return cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)


def no_event():
    """A stream reads what another has not copied yet; and then with an event between them."""
    device, host = _filled(OLD)
    first, second = _streams()
    host[:] = NEW
    _send(host, device, first)
    early = _fetch(device, second)
    first.synchronize()
    host[:] = NEWER
    _send(host, device, first)
    second.wait_event(first.record())
    return {"without": early, "with": _fetch(device, second)}


def reused_source():
    """The source of a copy changes before it is executed, page-locked and not."""
    device, locked = _filled(OLD)
    stream, _ = _streams()
    pageable = np.full(NBYTES, OLD, np.uint8)
    found = {}
    for name, source in {"page-locked": locked, "pageable": pageable}.items():
        source[:] = NEW
        _send(source, device, stream)
        source[:] = NEWER
        stream.synchronize()
        found[name] = _values(device.get())
    return found


def early_read():
    """The target of a copy to the host is read at once, page-locked and not."""
    device, locked = _filled(OLD)
    stream, _ = _streams()
    device.fill(NEW)
    cupy.cuda.Device().synchronize()
    found = {}
    for name, target in {"page-locked": locked, "pageable": np.full(NBYTES, OLD, np.uint8)}.items():
        runtime.memcpyAsync(target.ctypes.data, device.data.ptr, NBYTES, TO_HOST, stream.ptr)
        found[name] = _values(target)
        stream.synchronize()
    return found


def default_stream():
    """Who waits for the default stream, and for whom it waits."""
    found = {}
    for name, non_blocking in {"blocking": False, "non-blocking": True}.items():
        device, host = _filled(OLD)
        stream = cupy.cuda.Stream(non_blocking=non_blocking)
        host[:] = NEW
        _send(host, device, stream)
        found[f"waits for {name}"] = _fetch(device, cupy.cuda.Stream.null) == [NEW]
        stream.synchronize()
        host[:] = NEWER
        _send(host, device, cupy.cuda.Stream.null)
        found[f"holds up {name}"] = _fetch(device, stream) == [NEWER]
        cupy.cuda.Device().synchronize()
    return found


def overlap():
    """Seconds for three parts, copied, computed on and copied back: after each other, and in a pipeline."""
    parts = [(_filled(OLD), locked_bytes(NBYTES)) for _ in range(3)]
    first, second = _streams()
    pipeline = (first, cupy.cuda.Stream(), second)
    found = {}
    for name, streams in {"serial": (first, first, first), "pipeline": pipeline}.items():
        before = time.monotonic()
        for (device, host), target in parts:
            _through(device, host, target, streams)
        cupy.cuda.Device().synchronize()
        found[name] = time.monotonic() - before
    return found


def _through(device, host, target, streams):
    inwards, compute, outwards = streams
    _send(host, device, inwards)
    compute.wait_event(inwards.record())
    with compute:
        device += 1
    outwards.wait_event(compute.record())
    runtime.memcpyAsync(target.ctypes.data, device.data.ptr, NBYTES, TO_HOST, outwards.ptr)


def freed_in_use():
    """Memory is given back while a copy to it is queued, which waits."""
    device, host = runtime.malloc(NBYTES), locked_bytes(NBYTES)
    stream, _ = _streams()
    runtime.memcpyAsync(device, host.ctypes.data, NBYTES, TO_DEVICE, stream.ptr)
    event = stream.record()
    before = event.done
    runtime.free(device)
    return {"before": before, "after": event.done, "status": status(runtime.deviceSynchronize)}


def unmapped_source():
    """Page-locked memory is gone before it is copied."""
    device, _ = _filled(OLD)
    stream, _ = _streams()
    host = locked_bytes(NBYTES)
    _send(host, device, stream)
    munmap = ctypes.CDLL(None).munmap
    assert munmap(ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(NBYTES)) == 0
    stream.synchronize()
    return {"status": status(runtime.deviceSynchronize)}


def host_code():
    """A call into the host's code comes in the stream's order, and cannot use CUDA."""
    stream, _ = _streams()
    device, host = _filled(OLD)
    seen, target = [], locked_bytes(NBYTES)
    host[:] = NEW
    _send(host, device, stream)
    runtime.memcpyAsync(target.ctypes.data, device.data.ptr, NBYTES, TO_HOST, stream.ptr)
    stream.launch_host_func(lambda given: seen.append([given, _values(target)]), 5)
    stream.launch_host_func(lambda given: seen.append(status(runtime.getDevice)), None)
    stream.synchronize()
    return {"seen": seen}


def full_queue(count):
    """Seconds until so many kernels are queued, and for which another thread stood still in a call that keeps
    the interpreter's lock.
    """
    array, stream = cupy.zeros(16, np.uint8), cupy.cuda.Stream.null
    cupy.add(array, 1, out=array)
    stream.synchronize()
    before = time.monotonic()
    for _ in range(int(count)):
        cupy.add(array, 1, out=array)
    queued_s = time.monotonic() - before
    turns, ends = [], threading.Event()

    def turn():
        while not ends.is_set():
            turns.append(time.monotonic())
            time.sleep(0.0005)

    other = threading.Thread(target=turn)
    other.start()
    time.sleep(0.005)
    stream.record()
    ends.set()
    other.join()
    stream.synchronize()
    gaps = [late - early for early, late in itertools.pairwise(turns)]
    return {"queued_s": queued_s, "without_a_turn_s": max(gaps)}


def pageable():
    """Seconds that the start of a copy from pageable memory takes behind a kernel, by its size."""
    device, found = cupy.zeros(NBYTES, np.uint8), {}
    source, stream = np.ones(NBYTES, np.uint8), cupy.cuda.Stream.null
    cupy.add(device, 1, out=device)
    for nbytes in (1 << 10, NBYTES):
        stream.synchronize()
        cupy.add(device, 1, out=device)
        before = time.monotonic()
        runtime.memcpyAsync(device.data.ptr, source.ctypes.data, nbytes, TO_DEVICE, stream.ptr)
        found[nbytes] = time.monotonic() - before
    return {"small_s": found[1 << 10], "large_s": found[NBYTES]}


def last_error():
    """Whether a kernel is told of an event that was asked for too early, by the runtime and by the driver."""
    array, stream = cupy.zeros(16, np.uint8), cupy.cuda.Stream.null
    query = ctypes.PyDLL("libcuda.so.1").cuEventQuery
    found = {}
    for name, ask in (("driver", lambda ptr: query(ctypes.c_void_p(ptr))), ("runtime", runtime.eventQuery)):
        cupy.add(array, 1, out=array)
        event = stream.record()
        found[name] = [ask(event.ptr), status(cupy.add, array, 1, array)]
        stream.synchronize()
    return found


def computes(count):
    """Seconds for so many kernels, once told to begin."""
    array = cupy.zeros(16, np.uint8)
    cupy.add(array, 1, out=array)
    cupy.cuda.Stream.null.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    before = time.monotonic()
    for _ in range(int(count)):
        cupy.add(array, 1, out=array)
    cupy.cuda.Stream.null.synchronize()
    return {"took_s": time.monotonic() - before}


def hold(nbytes):
    """Take memory of the device, say so, and keep it until the input ends; then, what a call ends with."""
    held = runtime.malloc(int(nbytes))
    print("holds", flush=True)
    sys.stdin.read()
    return {"held": held > 0, "status": status(runtime.deviceSynchronize)}


def memory():
    """What is free."""
    return {"free": runtime.memGetInfo()[0]}


def devices():
    """What the process sees: names on the bus, or the status that it ends with."""
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return {"status": error.status}
    return {"seen": [runtime.deviceGetPCIBusId(number) for number in range(count)]}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
