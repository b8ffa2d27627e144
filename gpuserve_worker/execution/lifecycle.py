"""Life of a worker process: its end, its name, its CPU affinity, its reports to the supervisor, and its
imports.

A worker ends when the supervisor sends ``Stop`` (after the running batch), when the boot socket closes or the
parent dies (at once), or when its own code fails. User code may change signal handlers, the current directory
and the standard streams; nothing here depends on them after ``prepare_process``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import io
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final, NoReturn

from gpuserve_worker.inference.running_requests import current_request_ids
from gpuserve_worker.memory.weights_port import SealedObject
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.sealed_memory import ExportedMemory, SealedMemory
from gpuserve_worker.protocol.wire import (
    Ending,
    Imported,
    LoadWeights,
    Log,
    Phase,
    ReleaseWeights,
    Sleep,
    Stop,
    Unrecoverable,
    Wake,
    WantWeights,
    Weights,
    WeightsFailed,
)

EXIT_STOPPED: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
#: Exit status if this process cannot use its device: a new process may be able to, this one cannot.
EXIT_DEVICE: Final = 3
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_TITLE_NBYTES: Final = 15


def prepare_process() -> None:
    """Prepare the process before user code: parent's life, signals, streams, arguments, ``__main__``."""
    die_with_parent()
    sys.argv = [""]  # as an embedded interpreter, so that user code parses none of our descriptors
    sys.modules["__main__"] = type(sys)("__main__")
    # The supervisor handles Ctrl-C and SIGHUP. User code may replace these handlers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.stderr is not None:
        faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def die_with_parent() -> None:
    """Make the kernel send SIGKILL when the parent dies, even while user code holds the GIL in C. In a
    container the parent is often pid 1, so only a change of the parent's pid shows that the parent died
    during the call. If it died before, the boot socket is at its end and nothing is loaded.
    """
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


def set_title(title: str) -> None:
    _prctl(_PR_SET_NAME, ctypes.c_char_p(title.encode()[:_TITLE_NBYTES]))


def _prctl(option: int, argument: ctypes.c_char_p | int) -> None:
    value = argument if isinstance(argument, ctypes.c_char_p) else ctypes.c_ulong(argument)
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def leave(status: int) -> NoReturn:
    """End the process at once after flushing its output: libraries of a lost device would block or abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # user code may have replaced the stream
            stream.flush()
    os._exit(status)


def close_in_children(*links: Link) -> None:
    """Close links in forked children, which would hide the worker's end and could send in its name."""
    for link in links:
        os.register_at_fork(after_in_child=link.close)


def end_child(reason: object, *_: object) -> NoReturn:
    """End a forked child that has left the inference callable, with its own status if by ``sys.exit()``."""
    if isinstance(reason, SystemExit):
        leave(reason.code if isinstance(reason.code, int) else int(reason.code is not None))
    with suppress(OSError):  # user code may have closed the descriptor
        os.write(2, _LEFT_BY_CHILD)
    leave(EXIT_FAILED)


_LEFT_BY_CHILD: Final = (
    b"ended a forked process that left the inference callable: expected os._exit() in it\n"
)
#: ``logging.INFO`` and so on, without an import of the module.
_INFO: Final = 20
_WARNING: Final = 30
_ERROR: Final = 40


class Reporter:
    """The sender of the worker's phases and log records to its supervisor."""

    def __init__(self, boot: Link) -> None:
        self._boot = boot

    def phase(self, name: str) -> None:
        """Report the loading phase. Raise ``OSError`` if the supervisor is gone."""
        self._boot.send(Phase(name))

    def imported(self, files: tuple[str, ...]) -> None:
        """Report the imported user files. Raise ``OSError`` if the supervisor is gone."""
        self._boot.send(Imported(files))

    # A log record is dropped if the socket is full, so that inference never waits for the log.

    def log(self, level: int, text: str) -> None:
        self._boot.try_send(Log(level, text, "", current_request_ids()))

    def error(self, text: str, traceback: str = "") -> None:
        self._boot.try_send(Log(_ERROR, text, traceback, current_request_ids()))

    def warning(self, text: str, traceback: str = "") -> None:
        self._boot.try_send(Log(_WARNING, text, traceback, current_request_ids()))

    def info(self, text: str) -> None:
        self.log(_INFO, text)

    def unrecoverable(self, text: str) -> None:
        """Report that no further inference is possible here. Raise ``OSError`` if the supervisor is gone."""
        self._boot.send(Unrecoverable(text))

    def ending(self, text: str) -> None:
        """Report why this process is about to exit. Raise ``OSError`` if the supervisor is gone."""
        self._boot.send(Ending(text))


class SupervisorReceiver:
    """The receiver of the supervisor's messages, and the port to its shared weights. ``on_stop`` handles
    ``Stop``: it exits the process until a loop exists that can finish its batch, because loading user code
    cannot be interrupted otherwise.
    """

    def __init__(self, boot: Link, *, may_sleep: bool) -> None:
        self._boot = boot
        self.may_sleep = may_sleep
        self._replies: deque[SealedObject | None] = deque()
        self._n_replies = threading.Semaphore(0)
        #: Held by the thread whose request for weights is not answered.
        self._requesting = threading.Lock()
        self.on_stop: Callable[[], None] = functools.partial(os._exit, EXIT_STOPPED)
        #: Called for ``Sleep`` and ``Wake``, which the supervisor sends to loaded workers only.
        self.on_sleep: Callable[[], None] = self.on_stop
        self.on_wake: Callable[[], None] = self.on_stop

    def start(self) -> None:
        """Start the receiving thread, which is the only receiver from now on."""
        threading.Thread(target=self._listen, name="gpuserve-supervision", daemon=True).start()

    def _listen(self) -> None:
        try:
            while (received := self._boot.receive()) is not None:
                message, fds = received
                if isinstance(message, Stop):
                    self.on_stop()
                elif isinstance(message, Sleep):
                    self.on_sleep()
                elif isinstance(message, Wake):
                    self.on_wake()
                elif isinstance(message, LoadWeights):
                    self._on_weights(None)
                elif isinstance(message, Weights):
                    self._on_weights(_sealed_object(message, fds))  # a local variable would keep the memory
        finally:
            # Also if this thread fails: a worker that cannot be stopped must not stay alive.
            os._exit(EXIT_FAILED)

    def _on_weights(self, weights: SealedObject | None) -> None:
        self._replies.append(weights)
        self._n_replies.release()

    def request(self, key: str) -> SealedObject | None:
        with self._requesting:
            self._boot.send(WantWeights(key))
            self._n_replies.acquire()
            return self._replies.popleft()

    def publish(self, key: str, weights: SealedObject | None) -> None:
        if weights is None:
            self._boot.send(WeightsFailed(key))
        elif weights.device is None:
            self._boot.send(Weights(key, weights.ranges), (weights.memory.fd,))
        else:
            message = Weights(key, weights.ranges, weights.device.uuid, weights.device.nbytes)
            self._boot.send(message, (weights.memory.fd, weights.device.fd))

    def release(self, key: str) -> None:
        self._boot.send(ReleaseWeights(key))


def _sealed_object(message: Weights, fds: Sequence[int]) -> SealedObject:
    device = ExportedMemory(fds[1], message.device_nbytes, message.device) if message.device else None
    return SealedObject(SealedMemory(fds[0]), message.ranges, device)


#: Delay of a report after an import, so that imports triggered by the import are reported with it.
SETTLE_S: Final = 0.2
#: Limit of reported files, because a message is one datagram; no project has so many hand-written files.
MOST_FILES: Final = 500
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_SCHEME: Final = ("stdlib", "platstdlib", "purelib", "platlib")
_PACKAGES: Final = ("gpuserve", "gpuserve_worker")


class ImportWatch:
    """A reporter of newly imported user files, for a server that watches files. The standard library,
    site-packages and gpuserve are not user files.

    The object is the first of Python's module finders. It finds no module, but is called at every new import.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._begun = threading.Event()
        self._told: tuple[str, ...] = ()

    def start(self) -> None:
        """Report the files imported by now, and later imports as they come."""
        self._tell()
        sys.meta_path.insert(0, self)
        threading.Thread(target=self._follow, name="gpuserve-imports", daemon=True).start()

    def find_spec(self, _name: str, _path: object = None, _target: object = None) -> None:
        self._begun.set()

    def report_failed(self, error: BaseException) -> None:
        """Report the files that a failed load imported, and the files in the error's traceback."""
        self._tell(_files_of(error))

    def _tell(self, more: Iterable[str] = ()) -> None:
        files = tuple(user_files([*_module_files(), *more]))[:MOST_FILES]
        if files != self._told:
            self._told = files
            self._reporter.imported(files)

    def _follow(self) -> None:
        pause = threading.Event()
        while self._begun.wait():
            pause.wait(SETTLE_S)
            self._begun.clear()
            try:
                self._tell()
            except OSError:  # the supervisor is gone, so this process ends too
                return


def user_files(files: Iterable[str]) -> list[str]:
    """Return the existing files that belong to the user, without duplicates, in order."""
    import sysconfig  # most servers do not watch files

    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    roots = {os.path.join(own, one) for one in _PACKAGES} | {sysconfig.get_path(one) for one in _SCHEME}
    prefixes = tuple(f"{root}{os.sep}" for root in roots if root)
    found = {os.path.abspath(one) for one in files if one.endswith((".py", ".so"))}
    return sorted(
        one
        for one in found
        if not one.startswith(prefixes) and _INSTALLED.isdisjoint(one.split(os.sep)) and os.path.isfile(one)
    )


def _files_of(error: BaseException | None) -> list[str]:
    """Return the files of an error's frames and causes; failed imports are not in ``sys.modules``."""
    found: list[str] = []
    while error is not None:
        if isinstance(error, SyntaxError) and error.filename:
            found.append(error.filename)
        frames = error.__traceback__
        while frames is not None:
            found.append(frames.tb_frame.f_code.co_filename)
            frames = frames.tb_next
        error = error.__cause__ or error.__context__
    return found


def _module_files() -> list[str]:
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return [one for one in files if isinstance(one, str)]


#: Number of the system call ``set_mempolicy`` by machine; the C library has no wrapper.
_SYSCALL: Final = {"x86_64": 238, "aarch64": 237}
#: Memory comes from the preferred node, and from others when that is full.
_MPOL_PREFERRED: Final = 1
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind_near_gpu(cpus: Collection[int], numa_node: int) -> list[str]:
    """Run on these CPUs (empty: no change) and prefer memory of this NUMA node (-1: any). Return the
    refusals, for the log.

    Called before user code is imported, which may start threads. A container may forbid either setting; the
    worker then only runs slower.
    """
    refused = []
    if cpus:
        refused.append(_keep_to(cpus))
    if numa_node >= 0:
        refused.append(_prefer_memory_of(numa_node))
    return [one for one in refused if one]


def _keep_to(cpus: Collection[int]) -> str:
    """Set the CPU affinity of every thread of the process: threads of numpy's libraries run already."""
    allowed = os.sched_getaffinity(0)
    chosen = allowed.intersection(cpus)
    if not chosen:
        return (
            f"the worker may use none of the CPUs that are next to its GPU ({ranges(cpus)}), and stays on "
            f"{ranges(allowed)}"
        )
    try:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # the thread has ended meanwhile
                os.sched_setaffinity(int(thread), chosen)
    except OSError as error:
        return f"the worker cannot keep to the CPUs that are next to its GPU: {error.strerror}"
    return ""


def _prefer_memory_of(numa_node: int) -> str:
    import platform  # most workers have no GPU

    number = _SYSCALL.get(platform.machine())
    if number is None:
        return f"the worker cannot choose the memory of NUMA node {numa_node} on a machine of this kind"
    words = (ctypes.c_ulong * (numa_node // _WORD_BITS + 1))()
    words[numa_node // _WORD_BITS] = 1 << numa_node % _WORD_BITS
    # The kernel expects one bit more than there are and ignores the last one.
    bits = ctypes.c_ulong(len(words) * _WORD_BITS + 1)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_PREFERRED), words, bits) != 0:
        why = os.strerror(ctypes.get_errno())
        return f"the worker cannot prefer the memory of its GPU's NUMA node {numa_node}: {why}"
    return ""


def ranges(cpus: Iterable[int]) -> str:
    """Return CPU numbers as text: (0, 1, 2, 8) becomes ``0-2,8``."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)
