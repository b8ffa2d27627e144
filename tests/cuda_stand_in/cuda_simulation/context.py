"""CUDA in this process: its devices, its memory and streams, the current device of each thread, and the
errors that stay. ``current()`` is all of it; the entry points of the runtime go through ``entry``.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from cuda_simulation import captures, errors, traces
from cuda_simulation.costs import DriverTime
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.events import Events
from cuda_simulation.host import PageLocked
from cuda_simulation.imports import Imports
from cuda_simulation.machine import (
    Gpu,
    MachineView,
    end_mps_clients,
    mps_fault_ns,
    queue_xid,
    view_from_environment,
)
from cuda_simulation.memory import AddressTable, Allocation, Bytes, MemoryFiles, Origin, OwnMemory
from cuda_simulation.scheduler import Engine, Operation, Scheduler, Turns
from cuda_simulation.streams import Stream, Streams
from cuda_simulation.virtual_memory import VirtualMemory
from cuda_simulation.visible import Device, visible

P = ParamSpec("P")
R = TypeVar("R")
#: The driver reports it of a process that touched memory that is not there.
_XID_MEMORY_FAULT: Final = 31
#: A compute mode of GPUs.
_PROHIBITED: Final = 2
#: How long a call in a full queue keeps the interpreter's lock, and lets it go.
_FULL_S: Final = 0.005
_MOMENT_S: Final = 0.0001
#: Calls that wait for the device, and let others into the driver meanwhile.
_WAITING: Final = frozenset({"deviceSynchronize", "eventSynchronize", "memcpy", "streamSynchronize"})


class Thread(threading.local):
    """What CUDA keeps for each thread: its device, if a context is current, and its mode of captures."""

    ordinal = 0
    capture_mode = captures.GLOBAL
    has_context = False
    in_callback = False
    #: Whether the call under way keeps the interpreter's lock.
    keeps_lock = False
    #: The status of the last call that was no success, as the runtime has it; cupy clears it as it raises.
    last_error = 0


class Context:
    """CUDA in this process."""

    def __init__(self, view: MachineView) -> None:
        self.pid = os.getpid()
        #: How often each function was called.
        self.calls: Counter[str] = Counter()
        self.compiled: set[tuple[Any, ...]] = set()
        self.view = view
        self.thread = Thread()
        self.init_failure = _init_failure(view)
        self.devices = visible(view.now, os.environ) if not self.init_failure else ()
        turns = Turns(view.directory, lambda: view.now.mps)
        self.scheduler = Scheduler(lambda: view.now.launch_delay_s, view.now.seed, turns)
        self.captures = captures.Captures()
        self.streams = Streams(self.scheduler, self.captures.holds, self.wait_for_room)
        self.events = Events(view.directory)
        self.files = MemoryFiles(view.directory)
        self.addresses = AddressTable()
        self.memory = OwnMemory(self.files, self.addresses)
        self.virtual_memory = VirtualMemory(self)
        self.imports = Imports(self.files, self.addresses, self._known)
        self.page_locked = PageLocked()
        self.driver_time = DriverTime()
        self.peers: set[tuple[Device, Device]] = set()
        #: With the time of the last fault of another client of MPS before.
        self._used_devices: dict[Device, int] = {}
        self._using = threading.Lock()

    @property
    def device(self) -> Device:
        """The current device of this thread."""
        return self.devices[self.thread.ordinal]

    def numbered(self, ordinal: int) -> Device:
        """Raises CUDARuntimeError: there is no such device."""
        if not 0 <= ordinal < len(self.devices):
            raise CUDARuntimeError(errors.INVALID_DEVICE)
        return self.devices[ordinal]

    def stream(self, handle: int) -> Stream:
        """Raises CUDARuntimeError: there is no such stream."""
        return self.streams.get(handle, self.device)

    def allocate(self, nbytes: int, origin: Origin) -> Allocation:
        """Raises CUDARuntimeError: the current device has not so much memory left."""
        device, gpu = self.device, self.view.gpu(self.device.uuid)
        self.spend(self.view.now.malloc_s)
        return self.memory.allocate(device, nbytes, origin, gpu.foreign_memory)

    def compile(self, kernel: tuple[Any, ...]) -> None:
        """Spend the time of the compiler if this process has not launched the kernel before."""
        if kernel not in self.compiled:
            self.compiled.add(kernel)
            time.sleep(self.view.now.compile_s)

    def wait_for_room(self) -> None:
        """Block while the queue of launches is full, with the interpreter's lock where the call keeps it. The
        simulated GPU runs in this interpreter, and gets it for moments.
        """
        most = self.view.now.launch_queue
        while self.scheduler.is_full(most):
            if self.thread.keeps_lock:
                self.driver_time.keep_lock(_FULL_S)
            time.sleep(_MOMENT_S)

    def spend(self, seconds: float) -> None:
        """Time of the driver that the call under way takes."""
        self.driver_time.spend(seconds, keeps_lock=self.thread.keeps_lock)

    def accessible(self, address: int, nbytes: int, device: Device, *, writes: bool = False) -> Bytes:
        """Device memory for a kernel of a device. Raises CUDARuntimeError, which stays: it has none there, or
        must not write to it.
        """
        found = self.addresses.around(address, nbytes)
        if (
            found is None
            or not (found.device == device or (device, found.device) in self.peers)
            or (writes and found.address in self.addresses.read_only)
        ):
            queue_xid(self.view.directory, device.gpu_uuid, _XID_MEMORY_FAULT)
            self.scheduler.fail(errors.ILLEGAL_ADDRESS)
            if self.view.now.mps:
                end_mps_clients(self.view.directory, device.gpu_uuid)
            raise CUDARuntimeError(errors.ILLEGAL_ADDRESS)
        return found.part(address, nbytes)

    def launch(
        self, stream: Stream, effect: Callable[[], None], begin: Callable[[], None] = lambda: None
    ) -> Operation:
        """Queue a kernel."""
        kernel = Operation(stream.device.gpu_uuid, Engine.COMPUTE, self.view.now.kernel_s, begin, effect)
        return self.streams.queue(stream, kernel)

    def can_reach(self, device: Device, peer: Device) -> bool:
        """Whether a device can use the memory of another."""
        either_mig = any(one.uuid.startswith("MIG-") for one in (device, peer))
        return device != peer and self.view.now.peer_access and not either_mig

    def check(self, name: str) -> None:
        """What every call finds first. Raises CUDARuntimeError."""
        if sys.is_finalizing():  # the threads that would do anything do not run any more
            raise CUDARuntimeError(errors.CUDART_UNLOADING)
        if self.pid != os.getpid():  # CUDA cannot be used in a child by fork
            raise CUDARuntimeError(errors.INITIALIZATION_ERROR)
        if self.view.now.mps:
            self._find_mps_fault()
        failure = self.init_failure or self.scheduler.failure or self.view.now.failures.get(name, 0)
        if failure:
            raise CUDARuntimeError(failure)
        if not self.devices:
            raise CUDARuntimeError(errors.NO_DEVICE)
        if self.thread.in_callback:
            raise CUDARuntimeError(errors.NOT_PERMITTED)
        self.captures.check(name, self.thread.capture_mode)
        if name not in _WAITING:
            self.spend(0)

    def _find_mps_fault(self) -> None:
        for device, since_ns in list(self._used_devices.items()):
            if mps_fault_ns(self.view.directory, device.gpu_uuid) > since_ns:
                self.scheduler.fail(errors.MPS_CLIENT_TERMINATED)

    def use(self) -> None:
        """A call that needs the current device's context. Raises CUDARuntimeError: the GPU is lost, or no
        process may use it.
        """
        gpu = self.view.gpu(self.device.uuid)
        if gpu.compute_mode == _PROHIBITED:
            raise CUDARuntimeError(errors.DEVICES_UNAVAILABLE)
        if gpu.lost:
            self.scheduler.fail(gpu.lost_status)
            raise CUDARuntimeError(gpu.lost_status)
        with self._using:
            if self.device not in self._used_devices:
                self._begin_use(gpu)
        self.thread.has_context = True

    def _begin_use(self, gpu: Gpu) -> None:
        """Make the context of the current device. Raises CUDARuntimeError: there is no memory for it."""
        if gpu.context_memory:
            self.files.reserve(self.device, gpu.context_memory, gpu.foreign_memory)
        traces.open_nodes(self.view.directory, [one.uuid for one in self.view.now.gpus].index(gpu.uuid))
        if self.view.now.files_in_shm:
            traces.open_shared()
        self._used_devices[self.device] = mps_fault_ns(self.view.directory, gpu.uuid)

    def _known(self, uuid: str) -> Device:
        """The device of that UUID, also where this process does not see it."""
        known = [one for one in self.devices if one.uuid == uuid]
        return known[0] if known else Device(uuid, self.view.gpu(uuid).uuid, 0)


def _init_failure(view: MachineView) -> int:
    machine = view.now
    return errors.INSUFFICIENT_DRIVER if machine.driver_version is None else machine.broken


_making = threading.Lock()
_context: Context | None = None


def current() -> Context:
    """CUDA in this process; made at the first call, as CUDA is."""
    global _context
    if _context is None:
        with _making:
            _context = _context or Context(view_from_environment())
    return _context


def entry(
    name: str = "", *, uses_device: bool = True, keeps_lock: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """An entry point of the runtime: fails by what is wrong with the process or with the machine, also when
    that came up during the call. ``name`` is that of the function where it has another. Without
    ``uses_device`` it makes no context and can be called on a lost GPU. With ``keeps_lock`` cupy keeps the
    interpreter's lock during the call, and no other thread runs while that waits for the driver.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        called = name or function.__name__

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            context = current()
            context.calls[called] += 1
            thread, before = context.thread, context.thread.keeps_lock
            thread.keeps_lock = keeps_lock
            try:
                context.check(called)
                if uses_device:
                    context.use()
                result = function(*args, **kwargs)
            finally:
                thread.keeps_lock = before
            if uses_device and context.scheduler.failure:
                raise CUDARuntimeError(context.scheduler.failure)
            return result

        return call

    return decorate
