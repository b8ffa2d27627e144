"""How the interpreter of a front is set up, and that of a door. What they do is not known here."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib.util
import logging
import os
import signal
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from gpuserve.config.settings.server import ServerSettings

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_PR_SET_PDEATHSIG: Final = 1
#: A request leaves nothing in a cycle. Python's default of 700 would look every twenty requests.
_YOUNG_OBJECTS: Final = 5000
#: A full collection after so many of the middle generation. It takes a few milliseconds, since modules
#: are frozen; with 50, what was in use during an earlier collection waited for it and grew to 6 MB.
_OLD_COLLECTIONS: Final = 10
#: Request bodies up to this size are reused by malloc. glibc's default (128 KiB, dynamic) maps and faults
#: every 1 MiB body anew, which halved the throughput of such requests. Larger ones are given back at once:
#: they left holes in the heap, and twelve of 100 MiB that grew side by side kept 280 MiB when they had gone.
_REUSED_NBYTES: Final = 4 << 20
#: And so much free memory is kept.
_KEPT_NBYTES: Final = 32 << 20
#: How long the loop waits for another thread that computes. With Python's default, 5 ms, each system call of
#: the loop while a long JSON is read gave the thread as long.
_SWITCH_S: Final = 0.0001
#: For tests: the milliseconds of CPU that a turn of the loop may take, and the file that names longer ones.
_TURN_LIMIT: Final = "GPUSERVE_TURN_LIMIT_MS"
_TURN_FILE: Final = "GPUSERVE_TURN_FILE"


def begin() -> None:
    """What comes first, before the process imports what it needs. It ends with the one that started it."""
    # numpy's OpenBLAS starts a thread a core, which spins for a while, and a front multiplies no matrices.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()  # what is imported stays: to look for garbage meanwhile is an eighth of the start
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.mallopt(_M_MMAP_THRESHOLD, _REUSED_NBYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_NBYTES)
    # The heaps of other threads keep so much each at their end, which ``malloc_trim`` leaves there.
    libc.mallopt(_M_ARENA_MAX, 1)
    faulthandler.enable()
    # A terminal's Ctrl-C goes to the whole foreground group, a service manager's SIGTERM to the whole
    # control group, and so it is with SIGHUP; only the supervisor acts on them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def settle() -> None:
    """What comes when all is imported, before the loop runs."""
    from gpuserve.front.exchange.limits import raise_descriptor_limit

    raise_descriptor_limit()
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()  # modules stay; collections need not walk them
    gc.set_threshold(_YOUNG_OBJECTS, 20, _OLD_COLLECTIONS)
    gc.enable()


def make_bare(name: str) -> None:
    """Have ``import name.module`` leave the package's own code out, in this process from now on: to the
    import system it is then a namespace package. ModuleNotFoundError: it is not installed.
    """
    if name in sys.modules:
        return
    found = importlib.util.find_spec(name)  # which imports the packages around it, and not this one
    if found is None or found.submodule_search_locations is None:
        return
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = list(found.submodule_search_locations)
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    parent, _, attribute = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], attribute, package)


def leave(status: int) -> NoReturn:
    """End the process at once, with its log written."""
    logging.shutdown()
    os._exit(status)


def set_up(settings: ServerSettings) -> None:
    """Log as the settings say, and report long turns after the present one, if a variable asks for that."""
    from gpuserve.config.settings.logs import configure

    configure(settings.log_format, settings.log_level)
    if limit_ms := os.environ.get(_TURN_LIMIT):
        from gpuserve.front.turn_limit import limit_turns

        limit_turns(float(limit_ms) / 1e3, os.environ.get(_TURN_FILE, ""))
