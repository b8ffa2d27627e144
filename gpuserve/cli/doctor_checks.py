"""The checks of ``gpuserve doctor``. A value that cannot be read here is None or "", and is no fault."""

from __future__ import annotations

import ctypes
import enum
import fcntl
import os
import platform
import re
import resource
import select
import shutil
import socket
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuserve.cli.devices_report import device_headline, device_notes
from gpuserve.cli.preflight import device_problems, import_problems
from gpuserve.config.load import Configuration, trace_problems
from gpuserve.config.problems import ConfigProblems, Problem
from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.triton.load import load_target
from gpuserve.devices.mps import missing_daemon
from gpuserve.devices.names import CPU, OFF, ON
from gpuserve.devices.placement import n_processors
from gpuserve.model.placement import ServerDevices, cores_of_instances, installed_cupy, n_threads, overloads
from gpuserve.supervisor.control.operator_client import PortHolder, holder_of, listening_names, running
from gpuserve_worker.memory.segments import available_nbytes

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
#: The default size in a container.
_SMALL_SHM_NBYTES: Final = 64 * _MIB
#: A front and one idle worker take about a tenth of this.
_LITTLE_NBYTES: Final = 1 * _GIB
_TOO_LITTLE_NBYTES: Final = 256 * _MIB
#: Descriptors of the front besides those of connections (``front/net/admission.py``).
_SPARE_DESCRIPTORS: Final = 256
#: Clock sources that are read without a system call.
_QUICK_CLOCKS: Final = frozenset({"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"})
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?(?:>=([0-9.]+))?")
#: For a process that tries a GPU.
_PROBE_TIMEOUT_S: Final = 30.0
#: More than the size of ``struct timex``, whose first member is ``modes``.
_TIMEX_NBYTES: Final = 256
#: The result of adjtimex if the clock is not synchronized.
_TIME_ERROR: Final = 5


class Severity(enum.Enum):
    """The severity of a finding: after a fault a server does not start, or does not run as configured."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


class DoctorFinding(NamedTuple):
    """A finding about one checked thing. ``advice`` says what to do, "" for nothing."""

    level: Severity
    topic: str
    text: str
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "level": self.level.value}


_ok = partial(DoctorFinding, Severity.OK)
_warning = partial(DoctorFinding, Severity.WARNING)
_fault = partial(DoctorFinding, Severity.FAULT)


def all_findings(config: str | None) -> list[DoctorFinding]:
    """Return all findings, those about the machine first and those about the target of ``serve`` last."""
    devices, settings, of_config = ServerDevices(), ServerSettings(), list[DoctorFinding]()
    if config is not None:
        try:
            configuration = load_target(config, os.environ)
        except ConfigProblems as error:
            of_config = list(_problem_findings(error.problems))
        else:
            settings = configuration.settings
            of_config = list(_config_findings(config, configuration, devices))
    is_overcommit_strict = _file_text("/proc/sys/vm/overcommit_memory") == "2"
    clock_source = _file_text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    return [
        *_python_findings(),
        *package_findings(list(_packages())),
        *_kernel_findings(),
        *_gpu_findings(devices),
        processor_finding(n_processors(), os.cpu_count() or 1),
        *memory_findings(available_nbytes(), is_overcommit_strict, _commit_left_nbytes()),
        *shm_findings(),
        *limit_findings(settings.max_connections),
        *clock_findings(_is_clock_synchronized(), clock_source),
        *_server_findings(),
        *_port_findings(settings),
        *of_config,
    ]


def has_fault(found: Iterable[DoctorFinding]) -> bool:
    return any(one.level is Severity.FAULT for one in found)


def _python_findings() -> Iterator[DoctorFinding]:
    implementation = platform.python_implementation()
    python = f"{implementation} {platform.python_version()}, {platform.machine()}"
    if sys.version_info >= (3, 11) and implementation == "CPython":
        yield _ok("python", python)
    else:
        yield _fault("python", f"{python} is not supported", "run gpuserve with CPython 3.11 or later")


def _packages() -> Iterator[tuple[str, str, str]]:
    """Yield name, version ("": not installed) and least version ("": any) of each unconditional requirement
    of the installed distribution.
    """
    try:
        needed = metadata.requires("gpuserve") or []
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
        yield found[1], version, found[2] or ""


def package_findings(packages: Sequence[tuple[str, str, str]]) -> Iterator[DoctorFinding]:
    """Yield a fault for each package that is missing or too old: (name, version, least version)."""
    is_well = True
    for name, version, least in packages:
        if not version or is_older(version, least):
            is_well = False
            what = f"{name} {version} is installed" if version else f"there is no {name}"
            wanted = f"{name}>={least}" if least else name
            yield _fault("packages", f"{what}, and gpuserve needs {wanted}", f"pip install '{wanted}'")
    if is_well:
        yield _ok("packages", ", ".join(f"{name} {version}" for name, version, _ in packages))


def is_older(version: str, least: str) -> bool:
    """Return whether a version is below another, by their leading numbers."""
    return bool(least) and _version_numbers(version) < _version_numbers(least)


def _version_numbers(version: str) -> list[int]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return [int(one) for one in leading[0].split(".")] if leading else []


def _kernel_findings() -> Iterator[DoctorFinding]:
    kernel, is_well = f"{platform.system()} {platform.release()}", True
    advice = "use Linux 5.4 or later; a sandbox such as gVisor, or a seccomp profile, must allow the call"
    for name, attempt in {
        "sealed memory files (memfd_create)": _try_memfd,
        "handles of processes (pidfd_open)": _try_pidfd,
        "abstract sockets (AF_UNIX)": _try_abstract,
    }.items():
        try:
            attempt()
        except (OSError, AttributeError):
            is_well = False
            yield _fault("kernel", f"{kernel} lacks {name}, which every server needs", advice)
    if is_well:
        yield _ok("kernel", kernel)


def _try_memfd() -> None:
    descriptor = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, 4096)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
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


def _gpu_findings(devices: ServerDevices) -> Iterator[DoctorFinding]:
    inventory, cupy = devices.inventory(), installed_cupy()
    gpus = device_headline(inventory, cupy)
    if inventory.machine.driver is None:
        yield _ok("gpus", f"{gpus}: models run on the CPU")
    elif notes := list(device_notes(inventory, cupy)):
        yield _warning("gpus", f"{gpus}: {'; '.join(notes)}", "gpuserve devices shows details")
    else:
        yield _ok("gpus", gpus)
    if inventory.devices and cupy is not None:
        yield from _sharing_findings()


def _sharing_findings() -> Iterator[DoctorFinding]:
    """Try in a process of its own whether instances can share weights on the first GPU."""
    import subprocess  # most machines have no GPU

    command = [sys.executable, "-m", "gpuserve_worker.cuda.device.shared_memory"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return  # other findings say more about a GPU that does not answer
    if done.returncode:
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()] or [f"exit status {done.returncode}"]
        text = f"instances cannot share weights on the GPU, and each has a copy: {lines[-1]}"
        yield _warning("gpus", text)
    else:
        yield _ok("gpus", "instances can share weights on the GPU")


def processor_finding(processors: float, of_machine: int) -> DoctorFinding:
    text = f"{processors:g} of {of_machine} may be used"
    if processors < 1:
        advice = "give the container a processor at least: --cpus, or resources.limits.cpu"
        return _warning("processors", f"{text}: front and workers wait for each other", advice)
    return _ok("processors", text)


def memory_findings(
    available: int | None, is_overcommit_strict: bool, commit_left: int | None
) -> Iterator[DoctorFinding]:
    """Yield findings about the bytes that are available, and that may be reserved under strict overcommit."""
    if available is not None:
        level = Severity.WARNING if available < _LITTLE_NBYTES else Severity.OK
        level = Severity.FAULT if available < _TOO_LITTLE_NBYTES else level
        advice = "" if level is Severity.OK else "give the machine, or the control group, more memory"
        text = f"{_size_text(available)} can be reserved by requests, answers and models"
        yield DoctorFinding(level, "memory", text, advice)
    if is_overcommit_strict:
        left = "" if commit_left is None else f", {_size_text(commit_left)} are left"
        text = f"vm.overcommit_memory is 2: reserved memory counts at once{left}, and CUDA reserves much"
        yield _warning("memory", text, "sysctl vm.overcommit_memory=0, if nothing else needs it")


def _commit_left_nbytes() -> int | None:
    """Return how many bytes may still be reserved under strict overcommit, or None."""
    lines = dict(line.split(":", 1) for line in _file_text("/proc/meminfo").splitlines() if ":" in line)
    try:
        limit, used = (int(lines[name].split()[0]) * 1024 for name in ("CommitLimit", "Committed_AS"))
    except (KeyError, ValueError):
        return None
    return max(0, limit - used)


def shm_findings(folder: str = "/dev/shm") -> Iterator[DoctorFinding]:
    try:
        nbytes = shutil.disk_usage(folder).total
    except OSError:
        return
    text = f"/dev/shm has {_size_text(nbytes)}"
    if nbytes > _SMALL_SHM_NBYTES:
        yield _ok("shm", text)
    else:
        text += ": gpuserve itself needs none of it, but clients' system shared memory and PyTorch's "
        advice = "docker run --shm-size=1g, or a volume of medium Memory at /dev/shm"
        yield _warning("shm", f"{text}DataLoader do", advice)


def limit_findings(max_connections: int) -> Iterator[DoctorFinding]:
    most, locked = (resource.getrlimit(one)[1] for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    needed = max_connections + _SPARE_DESCRIPTORS
    if 0 <= most < needed:
        fits = max(0, most - _SPARE_DESCRIPTORS)
        text = f"a process may have {most} open files: about {fits} connections, of {max_connections}"
        yield _warning("nofile", text, f"ulimit -Hn {needed}, or LimitNOFILE={needed}")
    else:
        yield _ok("nofile", f"a process may have {'any number of' if most < 0 else most} open files")
    what = "any amount of memory" if locked < 0 else _size_text(locked)
    yield _ok("memlock", f"a process may lock {what}; gpuserve itself locks none")


def clock_findings(is_synchronized: bool | None, source: str) -> Iterator[DoctorFinding]:
    if is_synchronized is False:
        text = (
            "the clock is not synchronized: traces and logs of several machines do not match, and "
            "certificates may seem expired"
        )
        yield _warning("clock", text, "run an NTP client, such as chrony")
    else:
        yield _ok("clock", "synchronized" if is_synchronized else "unknown whether the clock is synchronized")
    if source and source not in _QUICK_CLOCKS:
        text = f"the clock source is {source}: each reading is a system call"
        yield _warning("clock", text, "boot with clocksource=tsc, if the processor's TSC is stable")


def _is_clock_synchronized() -> bool | None:
    """Return whether the kernel considers its clock synchronized, or None if unknown."""
    adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(_TIMEX_NBYTES))  # mode 0 only reads
    return None if state < 0 else state != _TIME_ERROR


def _server_findings() -> Iterator[DoctorFinding]:
    """Yield the servers of this machine; a process with several ports by the first of them."""
    own = running()
    if own:
        shown = ", ".join(f"{min(names)} (process {pid})" for (_, pid), names in sorted(own.items()))
        yield _ok("servers", f"of this user: {shown}")
    own_names = {name for names in own.values() for name in names}
    for name in listening_names(_file_text("/proc/net/unix")):
        if name not in own_names:
            text = f"of user {name.uid}: {name}, which only that user and root can operate"
            yield _ok("servers", text)


def _port_findings(settings: ServerSettings) -> Iterator[DoctorFinding]:
    for role, number in settings.ports.items():
        host = settings.host_of(role)
        address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
        problem = _listen_problem(host, number)
        yield port_finding(role, address, problem, holder_of(number) if problem else None)


def port_finding(role: str, address: str, problem: str, holder: PortHolder | None) -> DoctorFinding:
    text = f"{role}, {address}: {problem or 'free'}{f' by {holder}' if holder else ''}"
    if not problem:
        return _ok("ports", text)
    if holder is not None and holder.is_server:
        return _warning("ports", text, "stop that server before another one starts here")
    return _fault("ports", text, f"stop its owner, or choose another port: --{role}-port")


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


def _problem_findings(problems: Iterable[Problem], *, is_fatal: bool = True) -> Iterator[DoctorFinding]:
    for one in problems:
        yield (_fault if is_fatal else _warning)("config", str(one).partition("\n")[0])


def _config_findings(
    config: str, configuration: Configuration, devices: ServerDevices
) -> Iterator[DoctorFinding]:
    settings = configuration.settings
    problems = [*trace_problems(configuration), *import_problems(configuration)]
    found = list(_problem_findings([*problems, *device_problems(configuration, devices)]))
    broken = [one for error in configuration.broken.values() for one in error.problems]
    found += _problem_findings(broken, is_fatal=settings.exit_on_error)
    instances = [one for model in configuration.models for one in model.instances]
    processors, ingress_processes = n_processors(), settings.ingress_processes
    found += [_warning("config", one) for one in overloads(instances, processors, ingress_processes)]
    on_gpus = [one for one in instances if one.device != CPU]
    needs_mps = settings.mps == ON or any(one.gpu_share for one in on_gpus)
    if on_gpus and needs_mps and settings.mps != OFF and (text := missing_daemon()):
        found.append((_fault if settings.mps == ON else _warning)("config", f"mps: {text}"))
    yield from found or [_ok("config", f"{config} can be served here")]
    for model in configuration.models:
        # The requests of such a model share a batch only if their free sizes are equal.
        free = [one.name for one in model.inputs if -1 in one.shape and not one.ragged]
        if free and model.max_batch_size > 1 and model.batching.merge and not model.is_ensemble:
            text = f"requests share a batch if the sizes of {', '.join(free)} are equal"
            more = "for others see ragged inputs in docs/how-to/batching.md"
            yield _ok("config", f"model {model.name!r}: {text}; {more}")
    cores = cores_of_instances(processors, ingress_processes)
    threads = sorted({n_threads(one, instances, cores) for one in instances})
    shown = ", ".join(map(str, threads))
    yield _ok("config", f"threads of numerical libraries in an instance: {shown}")


def _size_text(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"


def _file_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def findings_as_text(found: Sequence[DoctorFinding], width: int) -> str:
    """Return a line for each finding, wrapped after its topic, advice below, and the number of problems."""
    levels, topics = max(len(one.value) for one in Severity), max(len(one.topic) for one in found)
    lines = []
    for level, topic, text, advice in found:
        head = f"{level.value:<{levels}}  {topic:<{topics}}  "
        rest = " " * len(head)
        paragraphs = [(line, rest if number else head, rest) for number, line in enumerate(text.split("\n"))]
        if advice:
            paragraphs.append((advice, f"{rest}→ ", f"{rest}  "))
        for paragraph, first, others in paragraphs:
            lines += textwrap.wrap(
                paragraph, width, initial_indent=first, subsequent_indent=others,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    counts = {kind: sum(one.level is kind for one in found) for kind in (Severity.FAULT, Severity.WARNING)}
    counted = [f"{n} {kind.value}{'s' if n != 1 else ''}" for kind, n in counts.items() if n]
    return "\n".join([*lines, "", ", ".join(counted) or "nothing is wrong"]) + "\n"
