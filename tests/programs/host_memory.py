"""What a worker does with the host's memory for the copies of its device: each function looks at one thing
and prints it as JSON. Run with the name of a function; needs a GPU, or the stand-in for one.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpuserve_worker.cuda.copies.cuda_session import CudaSession, Staging
from gpuserve_worker.cuda.cuda_path import CudaPath
from gpuserve_worker.cuda.device.device import CudaDevice, open_device
from gpuserve_worker.cuda.device.host_memory import Background, PageLocker, address_of
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, Copy, Runtime
from gpuserve_worker.execution.session import FrontSession
from gpuserve_worker.inference.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.payloads import Place, WireRequest, WireTensor

NBYTES = 2 << 20
#: ``cudaMemoryTypeHost``: what CUDA calls page-locked memory.
LOCKED = 1


def mapped(nbytes: int = NBYTES) -> tuple[mmap.mmap, memoryview]:
    one = mmap.mmap(-1, nbytes)
    return one, memoryview(one)


def unmapped(one: mmap.mmap, view: memoryview) -> bool:
    """Return whether a mapping can be released now."""
    view.release()
    try:
        one.close()
    except BufferError:
        return False
    return True


def type_of(device: CudaDevice, address: int) -> int:
    return int(device.runtime.cupy.cuda.runtime.pointerGetAttributes(address).type)


@contextmanager
def held(device: CudaDevice) -> Any:
    """The background is busy with something else meanwhile."""
    gate = threading.Event()
    device.host._background.later(gate.wait)
    try:
        yield
    finally:
        gate.set()
        device.host.wait()


class Slow:
    """The runtime of a device, in which locking ends when it is told to."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.begun, self.gate = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def page_lock(self, address: int, nbytes: int) -> None:
        self.begun.set()
        self.gate.wait()
        self._runtime.page_lock(address, nbytes)


def in_the_background() -> dict[str, Any]:
    """Memory is copied from while it waits to be locked, and is locked when its turn has come."""
    device = open_device()
    one, view = mapped()
    view[:] = b"\7" * NBYTES
    on_device = device.runtime.cupy.zeros(NBYTES, "uint8")
    with held(device):
        device.host.locks.lock(view)
        before = device.host.locks.is_locked(view), type_of(device, address_of(view)) == LOCKED
        device.runtime.copy(on_device.data.ptr, address_of(view), NBYTES, Copy.HOST_TO_DEVICE, device.h2d)
        device.runtime.synchronize()
        there = bool((on_device == 7).all())
    after = device.host.locks.is_locked(view), type_of(device, address_of(view)) == LOCKED
    device.host.locks.unlock(view)
    then = device.host.locks.is_locked(view), type_of(device, address_of(view)) == LOCKED
    return {"before": before, "there": there, "after": after, "then": then, "unmapped": unmapped(one, view)}


def given_up_before_its_turn() -> dict[str, Any]:
    device = open_device()
    one, view = mapped()
    address = address_of(view)
    with held(device):
        device.host.locks.lock(view)
        device.host.locks.unlock(view)
        is_unmapped = unmapped(one, view)
    return {"unmapped": is_unmapped, "locked": type_of(device, address) == LOCKED}


def given_up_meanwhile() -> dict[str, Any]:
    """Who gives memory up that CUDA is locking does not wait, and it stays mapped until CUDA has done it."""
    device = open_device()
    slow: Any = Slow(device.runtime)
    background = Background(device.enter_concurrently)
    locks = PageLocker(slow, background, device.host.uses, 0, print)
    one, view = mapped()
    address = address_of(view)
    locks.lock(view)
    slow.begun.wait()
    locks.unlock(view)
    at_once = unmapped(one, view)
    slow.gate.set()
    background.wait()
    one.close()  # raises where anybody still refers to it
    return {"unmapped at once": at_once, "locked": type_of(device, address) == LOCKED}


def waits_for_its_copies_alone() -> dict[str, Any]:
    """Kernels take long here. Memory that no copy uses is unlocked beside them, and beside copies that come
    after them; memory that such a copy uses is unlocked after it.
    """
    device = open_device()
    runtime, locks = device.runtime, device.host.locks
    views = [mapped()[1] for _ in range(2)]
    for view in views:
        locks.lock_now(view)
    idle, used = views
    source = runtime.cupy.full(NBYTES, 7, "uint8")  # a kernel
    computed, landed = device.events.acquire(), device.events.acquire()
    runtime.record(computed, DEFAULT_STREAM)
    runtime.stream_wait_event(device.d2h, computed)
    runtime.copy(address_of(used), source.data.ptr, NBYTES, Copy.DEVICE_TO_HOST, device.d2h)
    runtime.record(landed, device.d2h)
    device.host.uses.begin(landed, [(address_of(used) + 4096, NBYTES - 4096)])
    locks.unlock(idle)
    beside = not runtime.is_complete(computed)
    locks.unlock(used)
    return {"beside": beside, "after": runtime.is_complete(landed), "there": bytes(used[-3:]) == b"\7\7\7"}


def lent_up_to_a_limit() -> dict[str, Any]:
    device = open_device(lent_limit_nbytes=2 * NBYTES)
    locks = device.host.locks
    views = [mapped()[1] for _ in range(3)]
    first = [locks.lock_lent(one) for one in views]
    locks.unlock(views[0])
    again = locks.lock_lent(views[2])
    own = mapped(4 * NBYTES)[1]
    locks.lock(own)
    device.host.wait()
    return {"first": first, "again": again, "locked": [locks.is_locked(one) for one in (*views, own)]}


def all_up_to_a_limit() -> dict[str, Any]:
    """Of arenas, of the worker's own blocks and of clients' memory together."""
    warned: list[str] = []
    device = open_device(warn=warned.append, lent_limit_nbytes=8 * NBYTES, locked_limit_nbytes=2 * NBYTES)
    locks = device.host.locks
    arena, lent, late = (mapped()[1] for _ in range(3))
    locks.lock(arena)
    first = [locks.lock_lent(one) for one in (lent, late)]
    block = device.host.blocks.acquire(NBYTES)
    device.host.wait()
    before = [*map(locks.is_locked, (arena, lent, late, block.memory)), locks.locked_nbytes // NBYTES]
    for one in (arena, late):  # the one is locked, the other is not
        locks.unlock(one)
    locks.lock_now(late)
    return {"first": first, "before": before, "after": locks.is_locked(late), "warned": len(warned)}


def blocks_of_their_size() -> dict[str, Any]:
    """A large block is for who needs it."""
    blocks = open_device().host.blocks
    large, small = blocks.acquire(32 << 20), blocks.acquire(1000)
    for block in (large, small):
        blocks.release_block(block)
    found = [blocks.acquire(nbytes) for nbytes in (64 << 10, 64 << 10, 30 << 20)]
    return {
        "sizes": [len(one.memory) for one in found],
        "same": [found[0] is small, found[2] is large],
    }


def surplus_blocks_are_unlocked() -> dict[str, Any]:
    device = open_device()
    blocks = device.host.blocks
    taken = [blocks.acquire(20 << 20) for _ in range(6)]
    device.host.wait()
    addresses = [one.address for one in taken]
    for block in taken:
        blocks.release_block(block)
    del taken, block
    device.host.wait()
    kept = sum(type_of(device, one) == LOCKED for one in addresses)
    device.close()
    return {"kept": kept, "closed": sum(type_of(device, one) == LOCKED for one in addresses)}


def raised(error: BaseException) -> None:
    raise error


class Region:
    """What a worker shares with a front, and a client's region of which all is there."""

    def __init__(self, nbytes: int = NBYTES, lent_limit_nbytes: int = 1 << 30) -> None:
        self.device = open_device(lent_limit_nbytes=lent_limit_nbytes)
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        staging = Staging(self.device, frozenset({"x"}), "cupy")
        path = CudaPath(self.device, staging)
        self.front = FrontSession(Link(ours), path, raised, read_only_inputs=False)
        assert isinstance(self.front.device, CudaSession)
        self.session, self._staging = self.front.device, staging
        self.fd = os.memfd_create("client")
        os.write(self.fd, os.urandom(nbytes))
        self.place = Place(1, 0, nbytes)
        self.front.regions.attach(1, self.fd, 0, nbytes)

    def bring(self, datatype: str = "UINT8") -> tuple[bool, bool]:
        """Bring all of it to the device: whether it came from there at once, and whether it is there."""
        tensors = [WireTensor("x", datatype, (self.place.nbytes,), self.place)]
        arrays, arrival = self._staging.start_transfer(self.session, tensors, {})
        is_direct = len(self.device.host.uses) == 1
        arrival.wait_idle()
        here = os.pread(self.fd, self.place.nbytes, 0)
        return is_direct, bytes(arrays["x"].get()) == here

    def take(self, value: int) -> tuple[bool, bool]:
        """Have an output of the device put there: whether it went there at once, and whether it is there."""
        array = self.device.runtime.cupy.full(self.place.nbytes, value, "uint8")
        output = CheckedOutput("y", "UINT8", array.shape, array.nbytes, np.dtype(np.uint8), [array])
        requests = [WireRequest(1, {}, (), (("y", self.place),))]
        copies = self.session.start_output_copies(BatchAnswers(None, [[output]]), requests)
        is_direct = not self.front.writer._blocks
        written = copies.wait()
        assert written.responses == ((WireTensor("y", "UINT8", array.shape, self.place),),)
        assert not self.front.writer._blocks
        return is_direct, os.pread(self.fd, self.place.nbytes, 0) == bytes([value]) * self.place.nbytes


def regions_as_inputs() -> Any:
    region = Region()
    first = region.bring()
    region.device.host.wait()
    return [first, region.bring(), region.bring("BOOL")]


def regions_for_outputs() -> Any:
    region = Region()
    first = region.take(1)
    region.device.host.wait()
    return [first, region.take(2)]


def regions_over_the_limit() -> Any:
    region = Region(lent_limit_nbytes=NBYTES - 1)
    found = []
    for _ in range(3):
        found += [region.bring(), region.take(3)]
        region.device.host.wait()
    return found


def regions_that_go() -> Any:
    """A region goes while the device reads it: its copy is over then, and it is locked no more."""
    region = Region()
    region.bring()
    region.device.host.wait()
    pages = region.front.regions.view(region.place)
    address = address_of(pages)
    pages.release()
    before = type_of(region.device, address) == LOCKED
    here = os.pread(region.fd, NBYTES, 0)
    tensors = [WireTensor("x", "UINT8", (NBYTES,), region.place)]
    arrays, arrival = region._staging.start_transfer(region.session, tensors, {})
    under_way = not region.device.runtime.is_complete(arrival._arrived)
    region.front.regions.detach(1)
    over = region.device.runtime.is_complete(arrival._arrived)
    after = type_of(region.device, address) == LOCKED
    with open("/proc/self/maps", encoding="ascii") as maps:
        is_mapped = "memfd:client" in maps.read()
    there = bytes(arrays["x"].get()) == here
    return {
        "locked": [before, after],
        "under way": [under_way, not over],
        "mapped": is_mapped,
        "there": there,
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()), flush=True)
