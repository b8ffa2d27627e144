"""Set-up of a front or ingress process: environment, malloc, signals, garbage collector, logging."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from gpuserve.core.turn_limit import turn_limit_s
from gpuserve_worker.protocol.stack_signals import show_on_signal

if TYPE_CHECKING:
    import asyncio

    from gpuserve.config.settings.server import ServerSettings

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
#: malloc reuses request bodies up to this size. glibc's default (128 KiB, dynamic) maps and faults every 1
#: MiB body anew, which halved the throughput of such requests. Larger bodies are returned to the kernel at
#: once: they left holes in the heap.
_REUSED_NBYTES: Final = 4 << 20
#: malloc keeps this much free memory.
_KEPT_NBYTES: Final = 32 << 20
#: How long the event loop waits for another thread that computes. With Python's default of 5 ms, each system
#: call of the event loop while a thread parsed long JSON gave that thread 5 ms.
_SWITCH_S: Final = 0.0001


class LongProcess(Protocol):
    """A front or an ingress process."""

    async def run(self) -> None:
        """Serve until the supervisor ends the process."""


#: Makes a process from its control socket, a function that applies the settings, and one for its failure.
ProcessKind = Callable[[socket.socket, Callable[["ServerSettings"], None], Callable[[], None]], LongProcess]


def run_process(title: bytes, control_fd: int, stacks_fd: int, load: Callable[[], ProcessKind]) -> None:
    """Run the kind of process that ``load`` imports. A signal writes its stacks to ``stacks_fd``. ``top`` and
    ``ps`` show the title.
    """
    _before_imports(title)
    show_on_signal(stacks_fd)
    os.set_inheritable(control_fd, False)
    import uvloop

    made = load()

    async def run() -> None:
        await made(control, apply_settings, lambda: exit_process(1)).run()
        # Nothing is left to do, and an orderly shutdown of grpc's server would cancel calls that have just
        # arrived.
        exit_process(0)

    control = socket.socket(fileno=control_fd)
    _after_imports()
    uvloop.run(run())


def on_callback_error(
    what: str, on_lost: Callable[[], None]
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return a handler that logs a callback's exception, and calls ``on_lost`` if no descriptor is free: a
    message or connection that is lost for lack of one reaches only a successor.
    """
    from gpuserve_worker.protocol import datagram

    def log(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if datagram.is_starved(context.get("exception")):
            logger.critical("the %s has no free descriptor, and exits to be replaced", what)
            on_lost()

    return log


def _before_imports(title: bytes) -> None:
    """Prepare the process before its imports. The kernel kills the process when its parent dies."""
    # numpy's OpenBLAS starts a thread for each core, which spins, and a front multiplies no matrices.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()  # imported objects stay: looking for garbage meanwhile takes an eighth of the start-up
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_NAME, title)
    libc.mallopt(_M_MMAP_THRESHOLD, _REUSED_NBYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_NBYTES)
    # The heaps of other threads keep this much each when the threads end, and ``malloc_trim`` does not
    # release it.
    libc.mallopt(_M_ARENA_MAX, 1)
    faulthandler.enable()
    # A terminal's Ctrl-C goes to the whole foreground group, and a service manager's SIGTERM or SIGHUP to the
    # whole control group. Only the supervisor acts on them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _after_imports() -> None:
    """Tune the process after its imports, before the event loop runs."""
    from gpuserve.front.ipc.heap_memory import GC_THRESHOLDS, pause_full_collections
    from gpuserve.front.net.admission import raise_descriptor_limit

    raise_descriptor_limit()
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()  # modules stay, so collections need not visit them
    gc.callbacks.append(pause_full_collections)
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


def skip_package_code(name: str) -> None:
    """Make ``import name.module`` skip the package's own code. Raises ModuleNotFoundError."""
    if name in sys.modules:
        return
    found = importlib.util.find_spec(name)  # imports the enclosing packages, but not this one
    if found is None or found.submodule_search_locations is None:
        return
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = list(found.submodule_search_locations)
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    parent, _, attribute = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], attribute, package)


def exit_process(status: int) -> NoReturn:
    """Flush the log, and end the process at once."""
    logging.shutdown()
    os._exit(status)


def apply_settings(settings: ServerSettings) -> None:
    """Configure logging by the settings, and start the event-loop watchdog if it is wanted."""
    from gpuserve.config.settings.logs import configure

    configure(settings.log_format, settings.log_settings())
    if limit_s := turn_limit_s():
        from gpuserve.front.event_loop_watchdog import watch_event_loop

        watch_event_loop(limit_s)
