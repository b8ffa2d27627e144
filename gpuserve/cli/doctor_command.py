"""``gpuserve doctor``: findings on whether a server would run well on this machine, each with advice.
``doctor_facts`` gathers the facts.
"""

from __future__ import annotations

import enum
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from gpuserve.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from gpuserve.cli.doctor_facts import ConfigProblem, Facts, Package, Port
    from gpuserve.config.load import Configuration
    from gpuserve.config.problems import Problem
    from gpuserve.model.placement import ServerDevices


def doctor(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET", help="A target of serve, whose ports, packages and devices are checked."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Check what a server needs of this machine, and advise on problems.

    Python, its packages, the kernel, GPUs and their driver, processors and memory of the control group,
    limits, the clock, other servers, ports; with a config file also the needs of its models. Each finding is
    ok, a warning or a fault; after a fault the exit status is 1. Nothing is changed.

    Examples:
      gpuserve doctor
      gpuserve doctor config.yaml --json
    """
    found = doctor_findings(_gather_facts(config))
    if as_json:
        sys.stdout.write(json.dumps(findings_as_json(found), indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(findings_as_text(found, shutil.get_terminal_size().columns))
    if has_fault(found):
        raise typer.Exit(ExitCode.RUNTIME_FAILURE)


def _gather_facts(config: str | None) -> Facts:
    from gpuserve.cli.doctor_facts import gather_facts
    from gpuserve.config.problems import ConfigProblems
    from gpuserve.config.settings.server import ServerSettings
    from gpuserve.config.triton.load import load_target
    from gpuserve.model.placement import ServerDevices

    devices, settings = ServerDevices(), ServerSettings()
    problems: list[ConfigProblem] = []
    if config is not None:
        try:
            configuration = load_target(config, os.environ)
        except ConfigProblems as error:
            problems = _config_problems(error.problems)
        else:
            settings = configuration.settings
            problems = _configuration_problems(configuration, devices)
    return gather_facts(settings, devices, config, problems)


def _configuration_problems(configuration: Configuration, devices: ServerDevices) -> list[ConfigProblem]:
    """Return what the models of a configuration lack here, and the broken models of a repository."""
    from gpuserve.cli.preflight import device_problems, import_problems, trace_problems

    broken = [one for error in configuration.broken.values() for one in error.problems]
    wrong = [
        *trace_problems(configuration),
        *import_problems(configuration),
        *device_problems(configuration, devices),
    ]
    return [*_config_problems(wrong), *_config_problems(broken, fatal=configuration.settings.exit_on_error)]


def _config_problems(problems: Iterable[Problem], *, fatal: bool = True) -> list[ConfigProblem]:
    from gpuserve.cli.doctor_facts import ConfigProblem

    return [ConfigProblem(str(one).partition("\n")[0], fatal) for one in problems]


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


def doctor_findings(facts: Facts) -> list[DoctorFinding]:
    """Return all findings, those about the machine first and those about the configuration last."""
    return [
        *_python_findings(facts),
        *_kernel_findings(facts),
        *_gpu_findings(facts),
        *_processor_findings(facts),
        *_memory_findings(facts),
        *_limit_findings(facts),
        *_clock_findings(facts),
        *_server_findings(facts),
        *map(_port_finding, facts.ports),
        *_config_findings(facts),
    ]


def has_fault(found: Iterable[DoctorFinding]) -> bool:
    return any(one.level is Severity.FAULT for one in found)


# ---- this Python ------------------------------------------------------------------------------


def _python_findings(facts: Facts) -> Iterator[DoctorFinding]:
    if facts.is_supported:
        yield DoctorFinding(Severity.OK, "python", facts.python)
    else:
        advice = "run gpuserve with CPython 3.11 or later"
        yield DoctorFinding(Severity.FAULT, "python", f"{facts.python} is not supported", advice)
    wrong = [one for one in facts.packages if not one.version or is_older(one.version, one.least)]
    for package in wrong:
        yield _package_finding(package)
    if not wrong:
        named = ", ".join(f"{one.name} {one.version}" for one in facts.packages)
        yield DoctorFinding(Severity.OK, "packages", named)


def _package_finding(package: Package) -> DoctorFinding:
    what = (
        f"{package.name} {package.version} is installed" if package.version else f"there is no {package.name}"
    )
    wanted = f"{package.name}>={package.least}" if package.least else package.name
    return DoctorFinding(
        Severity.FAULT, "packages", f"{what}, and gpuserve needs {wanted}", f"pip install '{wanted}'"
    )


def is_older(version: str, least: str) -> bool:
    """Return whether a version is below another, by their leading numbers."""
    return bool(least) and _version_numbers(version) < _version_numbers(least)


def _version_numbers(version: str) -> list[int]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return [int(one) for one in leading[0].split(".")] if leading else []


# ---- the machine ------------------------------------------------------------------------------


def _kernel_findings(facts: Facts) -> Iterator[DoctorFinding]:
    for one in facts.lacking:
        yield DoctorFinding(
            Severity.FAULT,
            "kernel",
            f"{facts.kernel} lacks {one}, which every server needs",
            "use Linux 5.4 or later; a sandbox such as gVisor, or a seccomp profile, must allow the call",
        )
    if not facts.lacking:
        yield DoctorFinding(Severity.OK, "kernel", facts.kernel)


def _gpu_findings(facts: Facts) -> Iterator[DoctorFinding]:
    if not facts.has_driver:
        yield DoctorFinding(Severity.OK, "gpus", f"{facts.gpus}: models run on the CPU")
    elif facts.gpu_notes:
        text = f"{facts.gpus}: {'; '.join(facts.gpu_notes)}"
        yield DoctorFinding(Severity.WARNING, "gpus", text, "gpuserve devices shows details")
    else:
        yield DoctorFinding(Severity.OK, "gpus", facts.gpus)


def _processor_findings(facts: Facts) -> Iterator[DoctorFinding]:
    text = f"{facts.processors:g} of {facts.machine_processors} may be used"
    if facts.processors < 1:
        advice = "give the container a processor at least: --cpus, or resources.limits.cpu"
        yield DoctorFinding(
            Severity.WARNING, "processors", f"{text}: front and workers wait for each other", advice
        )
    else:
        yield DoctorFinding(Severity.OK, "processors", text)


def _memory_findings(facts: Facts) -> Iterator[DoctorFinding]:
    available = facts.available_nbytes
    if available is not None:
        level = Severity.WARNING if available < _LITTLE_NBYTES else Severity.OK
        level = Severity.FAULT if available < _TOO_LITTLE_NBYTES else level
        advice = "" if level is Severity.OK else "give the machine, or the control group, more memory"
        text = f"{_size_text(available)} can be reserved by requests, answers and models"
        yield DoctorFinding(level, "memory", text, advice)
    if facts.is_overcommit_strict:
        left = (
            "" if facts.commit_left_nbytes is None else f", {_size_text(facts.commit_left_nbytes)} are left"
        )
        yield DoctorFinding(
            Severity.WARNING,
            "memory",
            f"vm.overcommit_memory is 2: reserved memory counts at once{left}, and CUDA reserves much",
            "sysctl vm.overcommit_memory=0, if nothing else needs it",
        )
    if facts.shm_nbytes is not None:
        yield _shm_finding(facts.shm_nbytes)


def _shm_finding(nbytes: int) -> DoctorFinding:
    text = f"/dev/shm has {_size_text(nbytes)}"
    if nbytes > _SMALL_SHM_NBYTES:
        return DoctorFinding(Severity.OK, "shm", text)
    return DoctorFinding(
        Severity.WARNING,
        "shm",
        f"{text}: gpuserve itself needs none of it, but clients' system shared memory and PyTorch's "
        "DataLoader do",
        "docker run --shm-size=1g, or a volume of medium Memory at /dev/shm",
    )


def _limit_findings(facts: Facts) -> Iterator[DoctorFinding]:
    _, most = facts.open_files
    needed = facts.max_connections + _SPARE_DESCRIPTORS
    if 0 <= most < needed:
        fits = max(0, most - _SPARE_DESCRIPTORS)
        text = f"a process may have {most} open files: about {fits} connections, of {facts.max_connections}"
        yield DoctorFinding(Severity.WARNING, "nofile", text, f"ulimit -Hn {needed}, or LimitNOFILE={needed}")
    else:
        yield DoctorFinding(
            Severity.OK, "nofile", f"a process may have {'any number of' if most < 0 else most} open files"
        )
    locked = facts.locked_nbytes[1]
    what = "any amount of memory" if locked < 0 else _size_text(locked)
    yield DoctorFinding(Severity.OK, "memlock", f"a process may lock {what}; gpuserve itself locks none")


def _clock_findings(facts: Facts) -> Iterator[DoctorFinding]:
    if facts.is_clock_synchronized is False:
        text = (
            "the clock is not synchronized: traces and logs of several machines do not match, and "
            "certificates may seem expired"
        )
        yield DoctorFinding(Severity.WARNING, "clock", text, "run an NTP client, such as chrony")
    else:
        known = "" if facts.is_clock_synchronized is None else "synchronized"
        yield DoctorFinding(Severity.OK, "clock", known or "unknown whether the clock is synchronized")
    if facts.clock_source and facts.clock_source not in _QUICK_CLOCKS:
        text = f"the clock source is {facts.clock_source}: each reading is a system call"
        yield DoctorFinding(
            Severity.WARNING, "clock", text, "boot with clocksource=tsc, if the processor's TSC is stable"
        )


# ---- other servers, ports, the configuration -----------------------------------------------------


def _server_findings(facts: Facts) -> Iterator[DoctorFinding]:
    own = [f"{one.address} (process {one.pid})" for one in facts.servers if one.pid]
    if own:
        yield DoctorFinding(Severity.OK, "servers", f"of this user: {', '.join(own)}")
    for one in facts.servers:
        if not one.pid:
            text = f"of user {one.uid}: {one.address}, which only that user and root can operate"
            yield DoctorFinding(Severity.OK, "servers", text)


def _port_finding(port: Port) -> DoctorFinding:
    where = f"{port.role}, {port.address}"
    if not port.problem:
        return DoctorFinding(Severity.OK, "ports", f"{where}: free")
    by = f" by {port.holder}" if port.holder else ""
    text = f"{where}: {port.problem}{by}"
    if port.by_server:
        return DoctorFinding(
            Severity.WARNING, "ports", text, "stop that server before another one starts here"
        )
    advice = f"stop its owner, or choose another port: --{port.role}-port"
    return DoctorFinding(Severity.FAULT, "ports", text, advice)


def _config_findings(facts: Facts) -> Iterator[DoctorFinding]:
    for one in facts.config_problems:
        level = Severity.FAULT if one.fatal else Severity.WARNING
        yield DoctorFinding(level, "config", one.text, "")
    if facts.config is not None and not facts.config_problems:
        yield DoctorFinding(Severity.OK, "config", f"{facts.config} can be served here")


def _size_text(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"


_LEVEL_WIDTH: Final = max(len(level.value) for level in Severity)


def findings_as_json(found: Sequence[DoctorFinding]) -> dict[str, Any]:
    return {"ok": not has_fault(found), "findings": [one.as_json() for one in found]}


def findings_as_text(found: Sequence[DoctorFinding], width: int) -> str:
    """Return a line for each finding, wrapped after its topic, advice below, and last the number of faults
    and warnings.
    """
    topics = max(len(one.topic) for one in found)
    lines = [line for one in found for line in _finding_lines(one, topics, width)]
    return "\n".join([*lines, "", _summary(found)]) + "\n"


def _finding_lines(finding: DoctorFinding, topics: int, width: int) -> Iterator[str]:
    head = f"{finding.level.value:<{_LEVEL_WIDTH}}  {finding.topic:<{topics}}  "
    rest = " " * len(head)
    for number, paragraph in enumerate(finding.text.split("\n")):
        yield from _wrapped(paragraph, rest if number else head, rest, width)
    if finding.advice:
        yield from _wrapped(finding.advice, f"{rest}→ ", f"{rest}  ", width)


def _wrapped(text: str, head: str, rest: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(found: Sequence[DoctorFinding]) -> str:
    counts = {level: sum(one.level is level for one in found) for level in (Severity.FAULT, Severity.WARNING)}
    counted = [
        f"{count} {level.value}{'s' if count != 1 else ''}" for level, count in counts.items() if count
    ]
    return ", ".join(counted) or "nothing is wrong"
