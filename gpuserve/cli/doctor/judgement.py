"""From facts to findings: what each means for a server, and what to do about it. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from gpuserve.cli.doctor.facts import Facts, Package, Port

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
#: What a container is given where nobody says otherwise.
_SMALL_SHM_NBYTES: Final = 64 * _MIB
#: A front and one worker that does nothing take about a tenth of this.
_LITTLE_NBYTES: Final = 1 * _GIB
_TOO_LITTLE_NBYTES: Final = 256 * _MIB
#: Descriptors that are not for connections (``front/exchange/limits.py``).
_SPARE_DESCRIPTORS: Final = 256
#: Clocks that are read without a call into the kernel.
_QUICK_CLOCKS: Final = frozenset({"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"})


class Severity(enum.Enum):
    """How bad a finding is: with a fault a server does not start, or not as it was meant."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


class Judgement(NamedTuple):
    """One thing that was looked at. ``advice`` is what to do, "" for nothing."""

    level: Severity
    topic: str
    text: str
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "level": self.level.value}


def findings(facts: Facts) -> list[Judgement]:
    """Everything that was looked at, the machine first and the configuration last."""
    return [
        *_python(facts),
        *_kernel(facts),
        *_gpus(facts),
        *_processors(facts),
        *_memory(facts),
        *_limits(facts),
        *_clock(facts),
        *_servers(facts),
        *map(_port, facts.ports),
        *_config(facts),
    ]


def has_fault(found: Iterable[Judgement]) -> bool:
    return any(one.level is Severity.FAULT for one in found)


# ---- this Python ------------------------------------------------------------------------------


def _python(facts: Facts) -> Iterator[Judgement]:
    if facts.is_supported:
        yield Judgement(Severity.OK, "python", facts.python)
    else:
        advice = "run gpuserve with CPython 3.11 or later"
        yield Judgement(Severity.FAULT, "python", f"{facts.python} is not supported", advice)
    wrong = [one for one in facts.packages if not one.version or is_older(one.version, one.least)]
    for package in wrong:
        yield _package(package)
    if not wrong:
        named = ", ".join(f"{one.name} {one.version}" for one in facts.packages)
        yield Judgement(Severity.OK, "packages", named)


def _package(package: Package) -> Judgement:
    what = (
        f"{package.name} {package.version} is installed" if package.version else f"there is no {package.name}"
    )
    wanted = f"{package.name}>={package.least}" if package.least else package.name
    return Judgement(
        Severity.FAULT, "packages", f"{what}, and gpuserve needs {wanted}", f"pip install '{wanted}'"
    )


def is_older(version: str, least: str) -> bool:
    """Whether a version is below another, by their leading numbers."""
    return bool(least) and _numbers(version) < _numbers(least)


def _numbers(version: str) -> list[int]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return [int(one) for one in leading[0].split(".")] if leading else []


# ---- the machine ------------------------------------------------------------------------------


def _kernel(facts: Facts) -> Iterator[Judgement]:
    for one in facts.lacking:
        yield Judgement(
            Severity.FAULT,
            "kernel",
            f"{facts.kernel} does not offer {one}, without which no server runs",
            "use Linux 5.4 or later; a sandbox such as gVisor, or a seccomp profile, has to let it through",
        )
    if not facts.lacking:
        yield Judgement(Severity.OK, "kernel", facts.kernel)


def _gpus(facts: Facts) -> Iterator[Judgement]:
    if not facts.has_driver:
        yield Judgement(Severity.OK, "gpus", f"{facts.gpus}: models run on the CPU")
    elif facts.gpu_notes:
        text = f"{facts.gpus}: {'; '.join(facts.gpu_notes)}"
        yield Judgement(Severity.WARNING, "gpus", text, "gpuserve devices shows what there is")
    else:
        yield Judgement(Severity.OK, "gpus", facts.gpus)


def _processors(facts: Facts) -> Iterator[Judgement]:
    text = f"{facts.processors:g} of {facts.machine_processors} may be used"
    if facts.processors < 1:
        advice = "give the container a processor at least: --cpus, or resources.limits.cpu"
        yield Judgement(
            Severity.WARNING, "processors", f"{text}: front and workers wait for each other", advice
        )
    else:
        yield Judgement(Severity.OK, "processors", text)


def _memory(facts: Facts) -> Iterator[Judgement]:
    available = facts.available_nbytes
    if available is not None:
        level = Severity.WARNING if available < _LITTLE_NBYTES else Severity.OK
        level = Severity.FAULT if available < _TOO_LITTLE_NBYTES else level
        advice = "" if level is Severity.OK else "give the machine, or the control group, more memory"
        text = f"{_size(available)} can be reserved by requests, answers and models"
        yield Judgement(level, "memory", text, advice)
    if facts.is_overcommit_strict:
        left = "" if facts.commit_left_nbytes is None else f", {_size(facts.commit_left_nbytes)} are left"
        yield Judgement(
            Severity.WARNING,
            "memory",
            f"vm.overcommit_memory is 2: what is reserved counts at once{left}, and CUDA reserves much",
            "sysctl vm.overcommit_memory=0, if nothing else needs it",
        )
    if facts.shm_nbytes is not None:
        yield _shm(facts.shm_nbytes)


def _shm(nbytes: int) -> Judgement:
    text = f"/dev/shm has {_size(nbytes)}"
    if nbytes > _SMALL_SHM_NBYTES:
        return Judgement(Severity.OK, "shm", text)
    return Judgement(
        Severity.WARNING,
        "shm",
        f"{text}: gpuserve itself needs none of it, but clients' system shared memory and PyTorch's "
        "DataLoader do",
        "docker run --shm-size=1g, or a volume of medium Memory at /dev/shm",
    )


def _limits(facts: Facts) -> Iterator[Judgement]:
    _, most = facts.open_files
    needed = facts.max_connections + _SPARE_DESCRIPTORS
    if 0 <= most < needed:
        fits = max(0, most - _SPARE_DESCRIPTORS)
        text = f"a process may have {most} open files: about {fits} connections, of {facts.max_connections}"
        yield Judgement(Severity.WARNING, "nofile", text, f"ulimit -Hn {needed}, or LimitNOFILE={needed}")
    else:
        yield Judgement(Severity.OK, "nofile", f"a process may have {_count(most)} open files")
    locked = facts.locked_nbytes[1]
    what = "any amount of memory" if locked < 0 else _size(locked)
    yield Judgement(Severity.OK, "memlock", f"a process may lock {what}; gpuserve itself locks none")


def _clock(facts: Facts) -> Iterator[Judgement]:
    if facts.is_clock_synchronized is False:
        text = (
            "the clock is not synchronized: traces and logs of several machines do not fit, and certificates "
            "may seem expired"
        )
        yield Judgement(Severity.WARNING, "clock", text, "run an NTP client, such as chrony")
    else:
        known = "" if facts.is_clock_synchronized is None else "synchronized"
        yield Judgement(
            Severity.OK, "clock", known or "this machine does not tell whether it is synchronized"
        )
    if facts.clock_source and facts.clock_source not in _QUICK_CLOCKS:
        text = f"the clock source is {facts.clock_source}: each look at the clock is a call into the kernel"
        yield Judgement(
            Severity.WARNING, "clock", text, "boot with clocksource=tsc, where the processor's is stable"
        )


# ---- other servers, ports, the configuration -----------------------------------------------------


def _servers(facts: Facts) -> Iterator[Judgement]:
    own = [f"{one.address} (process {one.pid})" for one in facts.servers if one.pid]
    if own:
        yield Judgement(Severity.OK, "servers", f"of this user: {', '.join(own)}")
    for one in facts.servers:
        if not one.pid:
            text = f"of user {one.uid}: {one.address}, which only that user and root can operate"
            yield Judgement(Severity.OK, "servers", text)


def _port(port: Port) -> Judgement:
    where = f"{port.role}, {port.address}"
    if not port.problem:
        return Judgement(Severity.OK, "ports", f"{where}: free")
    by = f" by {port.holder}" if port.holder else ""
    text = f"{where}: {port.problem}{by}"
    if port.by_server:
        return Judgement(
            Severity.WARNING, "ports", text, "that server has to end before another one starts here"
        )
    advice = f"end what has it, or choose another: --{port.role}-port"
    return Judgement(Severity.FAULT, "ports", text, advice)


def _config(facts: Facts) -> Iterator[Judgement]:
    for one in facts.config_problems:
        level = Severity.FAULT if one.fatal else Severity.WARNING
        yield Judgement(level, "config", one.text, "")
    if facts.config is not None and not facts.config_problems:
        yield Judgement(Severity.OK, "config", f"{facts.config} can be served here")


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"


def _count(number: int) -> str:
    return "any number of" if number < 0 else str(number)
