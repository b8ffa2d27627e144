"""Facts about this machine for ``gpuserve doctor``. A fact that cannot be read is None or ""."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import re
import resource
import select
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from gpuserve.cli.devices_report import device_headline, device_notes
from gpuserve.config.settings.server import ServerSettings
from gpuserve.devices.placement import n_processors
from gpuserve.model.placement import ServerDevices, installed_cupy
from gpuserve.supervisor.control.operator_client import holder_of, listening_names, running
from gpuserve_worker.memory.segments import available_nbytes


class Package(NamedTuple):
    """A package that gpuserve needs. ``version`` is "" if it is not installed, ``least`` "" for any."""

    name: str
    version: str
    least: str


class Port(NamedTuple):
    """A port of the server. ``problem`` is why the server cannot listen on it, "" if it can; ``holder`` is
    the process that has it, if known; ``by_server``: the holder is a gpuserve server of this user.
    """

    role: str
    address: str
    problem: str = ""
    holder: str = ""
    by_server: bool = False


class RunningServer(NamedTuple):
    """A server of this machine, found by its control socket. ``pid`` is 0 for another user's server."""

    uid: int
    address: str
    pid: int


class ConfigProblem(NamedTuple):
    """A problem of the configuration; ``fatal``: no server would start."""

    text: str
    fatal: bool


@dataclass(frozen=True)
class Facts:
    """Facts about the machine, this Python and the configuration. ``gpus`` is the headline of ``gpuserve
    devices``, and ``gpu_notes`` its notes about missing parts. Limits are soft and hard; -1 is no limit.
    """

    uid: int
    python: str
    is_supported: bool
    kernel: str
    packages: tuple[Package, ...]
    lacking: tuple[str, ...]
    gpus: str
    gpu_notes: tuple[str, ...]
    has_driver: bool
    shm_nbytes: int | None
    open_files: tuple[int, int]
    locked_nbytes: tuple[int, int]
    processors: float
    machine_processors: int
    available_nbytes: int | None
    is_overcommit_strict: bool
    commit_left_nbytes: int | None
    is_clock_synchronized: bool | None
    clock_source: str
    ports: tuple[Port, ...]
    servers: tuple[RunningServer, ...]
    max_connections: int
    config: str | None = None
    config_problems: tuple[ConfigProblem, ...] = ()
    config_notes: tuple[str, ...] = ()


_DISTRIBUTION: Final = "gpuserve"
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?(?:>=([0-9.]+))?")
_ROLES: Final = ("http", "grpc", "metrics", "health")
#: More than the size of ``struct timex``, whose first member is ``modes``.
_TIMEX_NBYTES: Final = 256
#: The result of adjtimex if the clock is not synchronized.
_TIME_ERROR: Final = 5


def gather_facts(
    settings: ServerSettings,
    devices: ServerDevices,
    config: str | None = None,
    config_problems: Sequence[ConfigProblem] = (),
    config_notes: Sequence[str] = (),
) -> Facts:
    """Return the facts about this machine, and whether a server with these settings could listen."""
    inventory, cupy = devices.inventory(), installed_cupy()
    return Facts(
        uid=os.geteuid(),
        python=f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}",
        is_supported=sys.version_info >= (3, 11) and platform.python_implementation() == "CPython",
        kernel=f"{platform.system()} {platform.release()}",
        packages=tuple(_packages()),
        lacking=tuple(_missing_kernel_features()),
        gpus=device_headline(inventory, cupy),
        gpu_notes=tuple(device_notes(inventory, cupy)),
        has_driver=inventory.machine.driver is not None,
        shm_nbytes=_shm_nbytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        locked_nbytes=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        processors=n_processors(),
        machine_processors=os.cpu_count() or 1,
        available_nbytes=available_nbytes(),
        is_overcommit_strict=_file_text("/proc/sys/vm/overcommit_memory") == "2",
        commit_left_nbytes=_commit_left_nbytes(),
        is_clock_synchronized=_is_clock_synchronized(),
        clock_source=_file_text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        ports=tuple(_ports(settings)),
        servers=tuple(_servers()),
        max_connections=settings.max_connections,
        config=config,
        config_problems=tuple(config_problems),
        config_notes=tuple(config_notes),
    )


def _packages() -> Iterator[Package]:
    """Yield the unconditional requirements of the installed distribution; nothing if it is not installed."""
    try:
        needed = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return
    for line in needed:
        found = _REQUIREMENT.match(line)
        if found is None or "extra ==" in line:
            continue
        try:
            version = metadata.version(found[1])
        except metadata.PackageNotFoundError:
            version = ""
        yield Package(found[1], version, found[2] or "")


def _missing_kernel_features() -> Iterator[str]:
    tried: dict[str, Callable[[], None]] = {
        "sealed memory files (memfd_create)": _try_memfd,
        "handles of processes (pidfd_open)": _try_pidfd,
        "abstract sockets (AF_UNIX)": _try_abstract,
    }
    for name, attempt in tried.items():
        try:
            attempt()
        except (OSError, AttributeError):
            yield name


def _try_memfd() -> None:
    descriptor = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, 4096)
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        )
    finally:
        os.close(descriptor)


def _try_pidfd() -> None:
    descriptor = os.pidfd_open(os.getpid())
    try:
        select.select([descriptor], [], [], 0)
    finally:
        os.close(descriptor)


def _try_abstract() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(b"")  # the kernel chooses an abstract name


def _shm_nbytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _commit_left_nbytes() -> int | None:
    """Return how many bytes may still be reserved under strict overcommit, or None."""
    lines = dict(line.split(":", 1) for line in _file_text("/proc/meminfo").splitlines() if ":" in line)
    try:
        limit, used = (int(lines[name].split()[0]) * 1024 for name in ("CommitLimit", "Committed_AS"))
    except (KeyError, ValueError):
        return None
    return max(0, limit - used)


def _is_clock_synchronized() -> bool | None:
    """Return whether the kernel considers its clock synchronized, or None if unknown."""
    adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(_TIMEX_NBYTES))  # mode 0 only reads
    return None if state < 0 else state != _TIME_ERROR


def _ports(settings: ServerSettings) -> Iterator[Port]:
    for role in _ROLES:
        number = getattr(settings, f"{role}_port")
        if number is None:
            continue
        host = settings.host_of(role)
        address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
        problem = _listen_problem(host, number)
        holder = holder_of(number) if problem else None
        by_server = holder is not None and holder.is_server
        yield Port(role, address, problem, str(holder) if holder else "", by_server)


def _listen_problem(host: str, port: int) -> str:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def _servers() -> Iterator[RunningServer]:
    """Yield the servers of this machine; a process with several ports by the first of them."""
    own = running()
    for (uid, pid), names in sorted(own.items()):
        yield RunningServer(uid, str(min(names)), pid)
    own_names = {name for names in own.values() for name in names}
    for name in listening_names(_file_text("/proc/net/unix")):
        if name not in own_names:
            yield RunningServer(name.uid, str(name), 0)


def _file_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""
