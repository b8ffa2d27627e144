"""What a test may leave behind: nothing. Processes, descriptors, shared memory and socket files are
counted before and after, and whatever is there too much is named.

A process of ours is told by a mark in its environment, which the children of the test inherit, and by
``gpuserve`` in its command line. Other tests may run at the same time: what they own is not counted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import secrets
import stat
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from ingress import INGRESS_PROCESSES
from processes import children, command_line, wait_ended, wait_until

MARK = "LEAK_CHECK_MARK"
#: What shared memory and sockets are called that a test makes itself; its mark comes next.
_OF_TESTS = "gpuserve-test-"
#: How long what a test has ended may take to be gone.
PATIENCE_S = float(os.environ.get("LEAK_PATIENCE_S", "15"))
_SHM = Path("/dev/shm")
#: CUDA's own, which it leaves there for a process that was killed: by whose user and by which process.
_OF_CUDA = re.compile(r"cuda\.shm\.[0-9a-f]+\.[0-9a-f]+\.[0-9]+")
#: Nodes of NVIDIA's driver, or of a simulated machine. Whoever has used CUDA has them open to its end.
_OF_DRIVER = re.compile(r".*/dev/nvidia(ctl|-uvm(-tools)?|-modeset|-caps/.+|[0-9]+)( \(deleted\))?")
#: grpc's own pollers, made at the first call of a process and kept; ours are told by other tests.
_POLLERS = frozenset({"anon_inode:[eventpoll]", "anon_inode:[eventfd]"})


@dataclass(frozen=True)
class Census:
    """What there is at one moment. ``mark`` is the value of ``MARK`` that the test's children have."""

    mark: str
    pids: frozenset[int]
    descriptors: frozenset[tuple[int, str]]
    shared_memory: frozenset[str]
    sockets: frozenset[str]
    #: A server of this process runs: some of what it has, it opens a second after its start.
    has_server: bool


def census(mark: str) -> Census:
    """Count what is there now, once a running server has its spare ingress process."""
    if _has_server() and INGRESS_PROCESSES > 1:
        wait_until(lambda: _n_ingress() > INGRESS_PROCESSES, "a spare ingress process")
    return Census(
        mark, frozenset(_pids()), _descriptors(), frozenset(os.listdir(_SHM)), _sockets(), _has_server()
    )


def leaks(before: Census, patience_s: float = PATIENCE_S) -> list[str]:
    """A line for everything that is left after ``patience_s`` and was not there before."""
    found = [f"process {pid}: {command_line(pid)}" for pid in wait_ended(processes(before), patience_s)]
    if not _leaked_files(before):
        return found
    gc.collect()  # what only a cycle keeps is not left behind, and this is too slow for every test
    try:
        wait_until(lambda: not _leaked_files(before), "nothing is left", patience_s)
    except AssertionError:
        found += _leaked_files(before)
    return found


def own_name() -> str:
    """A name for shared memory or a socket of the test that runs: no other test takes it for its own."""
    return f"{_OF_TESTS}{os.environ[MARK]}-{secrets.token_hex(4)}"


def processes(before: Census) -> list[int]:
    """Processes of gpuserve that descend from the test, and were not there before it began."""
    # To look into each of the others takes milliseconds, and there are thousands of tests.
    new = [pid for pid in _pids() if pid not in before.pids]
    return [pid for pid in new if _has_mark(pid, before.mark) and "gpuserve" in command_line(pid)]


def _leaked_files(before: Census) -> list[str]:
    new = _descriptors() - before.descriptors
    if new and before.has_server:
        published = _published()
        new = {one for one in new if one[1] not in published}
    descriptors = [f"descriptor {fd}: {target}" for fd, target in sorted(new)]
    shared = {one for one in os.listdir(_SHM) if not _is_anothers(one, before.mark)} - before.shared_memory
    mapped = _mapped_elsewhere() if shared else ""
    ours = [name for name in sorted(shared) if name not in mapped and not _OF_CUDA.fullmatch(name)]
    memory = [f"shared memory /dev/shm/{name}" for name in ours]
    sockets = [path for path in sorted(_sockets() - before.sockets) if not _is_anothers(path, before.mark)]
    return descriptors + memory + [f"socket file {path}" for path in sockets]


def _is_anothers(name: str, mark: str) -> bool:
    return _OF_TESTS in name and mark not in name


def _descriptors() -> frozenset[tuple[int, str]]:
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of this very listing
            continue
        is_poller = target in _POLLERS and "grpc._cython.cygrpc" in sys.modules
        if not is_poller and not _OF_DRIVER.fullmatch(target):
            found.add((fd, target))
    return frozenset(found)


def _has_server() -> bool:
    return any(one.name == "gpuserve-supervisor" for one in threading.enumerate())


def _n_ingress() -> int:
    """Return the number of ingress processes whose pidfd is open: the last descriptor of their start."""
    started = [pid for pid in children(os.getpid()) if "gpuserve.front.ingress" in command_line(pid)]
    return len(_pids_of_pidfds().intersection(started))


def _pids_of_pidfds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            lines = Path("/proc/self/fdinfo", name).read_text().splitlines()
            found.update(int(line.split()[1]) for line in lines if line.startswith("Pid:"))
    return found


def _published() -> frozenset[str]:
    """The descriptors by which servers of this process publish their events, and those of ZeroMQ itself."""
    name = f"@gpuserve/{os.geteuid()}/events/{os.getpid()}"
    lines = [line.split() for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines()]
    inodes = [columns[6] for columns in lines if columns[-1].partition(".")[0] == name]
    return _POLLERS | {f"socket:[{inode}]" for inode in inodes}


def _sockets() -> frozenset[str]:
    entries = list(os.scandir(tempfile.gettempdir()))
    for one in [entry for entry in entries if entry.name.startswith(_OF_TESTS) and entry.is_dir()]:
        with contextlib.suppress(FileNotFoundError):  # the runtime folder of a test, which may be another's
            entries += os.scandir(Path(one.path, "gpuserve"))
    return frozenset(entry.path for entry in entries if _is_socket(entry))


def _is_socket(entry: os.DirEntry[str]) -> bool:
    try:
        # A directory knows the kinds of its entries; to look into each costs a millisecond, for every test.
        if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) or entry.is_symlink():
            return False
        return stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
    except OSError:
        return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _has_mark(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _mapped_elsewhere() -> str:
    """The mappings of all other processes: a test that runs beside this one may use shared memory."""
    maps = []
    for pid in _pids():
        try:
            maps.append(Path(f"/proc/{pid}/maps").read_text())
        except OSError:
            continue
    return "".join(maps)
