"""Prints whether a buffer is used again whose last array died in a thread that had another device."""

from __future__ import annotations

import threading
from typing import Any

from gpuserve_worker.cuda.device.arrays import BufferLease
from gpuserve_worker.cuda.device.device import CudaDevice, open_device


def drop(device: CudaDevice, arrays: list[Any]) -> None:
    device.runtime.use_device(1)
    arrays.clear()


def main() -> None:
    device = open_device()
    buffer = device.buffers.acquire(1000)
    memory = device.arrays.memory(buffer.address, buffer.nbytes, BufferLease(device.buffers, buffer))
    arrays = [device.arrays.over(memory, 0, "FP32", (10,), "cupy")]
    del memory
    thread = threading.Thread(target=drop, args=(device, arrays))
    thread.start()
    thread.join()
    device.runtime.synchronize()
    device.buffers.acquire(1 << 20)  # looks at what came back, and has no use for it
    device.runtime.synchronize()
    print(device.buffers.acquire(1000) is buffer)


if __name__ == "__main__":
    main()
