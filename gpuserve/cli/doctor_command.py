"""``gpuserve doctor``: findings on whether a server would run well on this machine, each with advice."""

from __future__ import annotations

import enum
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from gpuserve.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from gpuserve.cli.doctor_facts import Facts
    from gpuserve.config.load import Configuration
    from gpuserve.config.problems import Problem


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
        findings = {"ok": not has_fault(found), "findings": [one.as_json() for one in found]}
        sys.stdout.write(json.dumps(findings, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(findings_as_text(found, shutil.get_terminal_size().columns))
    if has_fault(found):
        raise typer.Exit(ExitCode.RUNTIME_FAILURE)


def _gather_facts(config: str | None) -> Facts:
    from gpuserve.cli.doctor_facts import ConfigProblem, gather_facts
    from gpuserve.cli.preflight import device_problems, import_problems, trace_problems
    from gpuserve.config.problems import ConfigProblems
    from gpuserve.config.settings.server import OFF, ON, ServerSettings
    from gpuserve.config.triton.load import load_target
    from gpuserve.devices.mps import missing_daemon
    from gpuserve.devices.names import CPU
    from gpuserve.devices.placement import n_processors
    from gpuserve.model.placement import ServerDevices
    from gpuserve.model.threads import cores_of_instances, n_threads, overload

    devices, settings = ServerDevices(), ServerSettings()
    problems: list[Problem] = []
    broken: list[Problem] = []
    notes: list[str] = []
    overloads: list[str] = []
    missing: list[ConfigProblem] = []
    if config is not None:
        try:
            found = load_target(config, os.environ)
        except ConfigProblems as error:
            problems = list(error.problems)
        else:
            settings = found.settings
            broken = [one for error in found.broken.values() for one in error.problems]
            problems = [*trace_problems(found), *import_problems(found), *device_problems(found, devices)]
            notes = list(_shape_notes(found))
            instances = [one for model in found.models for one in model.instances]
            cores = cores_of_instances(n_processors(), settings.doors)
            overloads = [text for text in (overload(instances, cores),) if text]
            on_gpus = [one for one in instances if one.device != CPU]
            needs_mps = settings.mps == ON or any(one.gpu_share for one in on_gpus)
            if on_gpus and needs_mps and settings.mps != OFF and (text := missing_daemon()):
                missing.append(ConfigProblem(f"mps: {text}", settings.mps == ON))
            threads = sorted({n_threads(one, instances, cores) for one in instances})
            notes.append(f"threads of numerical libraries in an instance: {', '.join(map(str, threads))}")
    fatal = [
        *(True for _ in problems),
        *(settings.exit_on_error for _ in broken),
        *(False for _ in overloads),
    ]
    texts = [str(one).partition("\n")[0] for one in (*problems, *broken, *overloads)]
    problems_found = [*map(ConfigProblem, texts, fatal), *missing]
    return gather_facts(settings, devices, config, problems_found, notes)


def _shape_notes(configuration: Configuration) -> Iterator[str]:
    """Yield the models whose requests share a batch only if their free sizes are equal."""
    for model in configuration.models:
        free = [one.name for one in model.inputs if -1 in one.shape and not one.ragged]
        if free and model.max_batch_size > 1 and model.batching.merge and not model.is_ensemble:
            yield (
                f"model {model.name!r}: requests share a batch if the sizes of {', '.join(free)} are equal; "
                "for others see ragged inputs in docs/how-to/batching.md"
            )


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


_ok = partial(DoctorFinding, Severity.OK)
_warning = partial(DoctorFinding, Severity.WARNING)
_fault = partial(DoctorFinding, Severity.FAULT)


def doctor_findings(facts: Facts) -> list[DoctorFinding]:
    """Return all findings, those about the machine first and those about the configuration last."""
    machine = (_kernel_findings, _gpu_findings, _processor_findings, _memory_findings, _limit_findings)
    kinds = (_python_findings, *machine, _clock_findings, _server_findings, _port_findings, _config_findings)
    return [one for kind in kinds for one in kind(facts)]


def has_fault(found: Iterable[DoctorFinding]) -> bool:
    return any(one.level is Severity.FAULT for one in found)


def _python_findings(facts: Facts) -> Iterator[DoctorFinding]:
    if facts.is_supported:
        yield _ok("python", facts.python)
    else:
        yield _fault("python", f"{facts.python} is not supported", "run gpuserve with CPython 3.11 or later")
    wrong = [one for one in facts.packages if not one.version or is_older(one.version, one.least)]
    for one in wrong:
        what = f"{one.name} {one.version} is installed" if one.version else f"there is no {one.name}"
        wanted = f"{one.name}>={one.least}" if one.least else one.name
        yield _fault("packages", f"{what}, and gpuserve needs {wanted}", f"pip install '{wanted}'")
    if not wrong:
        yield _ok("packages", ", ".join(f"{one.name} {one.version}" for one in facts.packages))


def is_older(version: str, least: str) -> bool:
    """Return whether a version is below another, by their leading numbers."""
    return bool(least) and _version_numbers(version) < _version_numbers(least)


def _version_numbers(version: str) -> list[int]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return [int(one) for one in leading[0].split(".")] if leading else []


def _kernel_findings(facts: Facts) -> Iterator[DoctorFinding]:
    advice = "use Linux 5.4 or later; a sandbox such as gVisor, or a seccomp profile, must allow the call"
    for one in facts.lacking:
        yield _fault("kernel", f"{facts.kernel} lacks {one}, which every server needs", advice)
    if not facts.lacking:
        yield _ok("kernel", facts.kernel)


def _gpu_findings(facts: Facts) -> Iterator[DoctorFinding]:
    if not facts.has_driver:
        yield _ok("gpus", f"{facts.gpus}: models run on the CPU")
    elif facts.gpu_notes:
        text = f"{facts.gpus}: {'; '.join(facts.gpu_notes)}"
        yield _warning("gpus", text, "gpuserve devices shows details")
    else:
        yield _ok("gpus", facts.gpus)


def _processor_findings(facts: Facts) -> Iterator[DoctorFinding]:
    text = f"{facts.processors:g} of {facts.machine_processors} may be used"
    if facts.processors < 1:
        advice = "give the container a processor at least: --cpus, or resources.limits.cpu"
        yield _warning("processors", f"{text}: front and workers wait for each other", advice)
    else:
        yield _ok("processors", text)


def _memory_findings(facts: Facts) -> Iterator[DoctorFinding]:
    available = facts.available_nbytes
    if available is not None:
        level = Severity.WARNING if available < _LITTLE_NBYTES else Severity.OK
        level = Severity.FAULT if available < _TOO_LITTLE_NBYTES else level
        advice = "" if level is Severity.OK else "give the machine, or the control group, more memory"
        text = f"{_size_text(available)} can be reserved by requests, answers and models"
        yield DoctorFinding(level, "memory", text, advice)
    if facts.is_overcommit_strict:
        left_nbytes = facts.commit_left_nbytes
        left = "" if left_nbytes is None else f", {_size_text(left_nbytes)} are left"
        text = f"vm.overcommit_memory is 2: reserved memory counts at once{left}, and CUDA reserves much"
        yield _warning("memory", text, "sysctl vm.overcommit_memory=0, if nothing else needs it")
    if facts.shm_nbytes is not None:
        text = f"/dev/shm has {_size_text(facts.shm_nbytes)}"
        if facts.shm_nbytes > _SMALL_SHM_NBYTES:
            yield _ok("shm", text)
        else:
            text += ": gpuserve itself needs none of it, but clients' system shared memory and PyTorch's "
            advice = "docker run --shm-size=1g, or a volume of medium Memory at /dev/shm"
            yield _warning("shm", f"{text}DataLoader do", advice)


def _limit_findings(facts: Facts) -> Iterator[DoctorFinding]:
    _, most = facts.open_files
    needed = facts.max_connections + _SPARE_DESCRIPTORS
    if 0 <= most < needed:
        fits = max(0, most - _SPARE_DESCRIPTORS)
        text = f"a process may have {most} open files: about {fits} connections, of {facts.max_connections}"
        yield _warning("nofile", text, f"ulimit -Hn {needed}, or LimitNOFILE={needed}")
    else:
        yield _ok("nofile", f"a process may have {'any number of' if most < 0 else most} open files")
    locked = facts.locked_nbytes[1]
    what = "any amount of memory" if locked < 0 else _size_text(locked)
    yield _ok("memlock", f"a process may lock {what}; gpuserve itself locks none")


def _clock_findings(facts: Facts) -> Iterator[DoctorFinding]:
    if facts.is_clock_synchronized is False:
        text = (
            "the clock is not synchronized: traces and logs of several machines do not match, and "
            "certificates may seem expired"
        )
        yield _warning("clock", text, "run an NTP client, such as chrony")
    else:
        known = "" if facts.is_clock_synchronized is None else "synchronized"
        yield _ok("clock", known or "unknown whether the clock is synchronized")
    if facts.clock_source and facts.clock_source not in _QUICK_CLOCKS:
        text = f"the clock source is {facts.clock_source}: each reading is a system call"
        yield _warning("clock", text, "boot with clocksource=tsc, if the processor's TSC is stable")


def _server_findings(facts: Facts) -> Iterator[DoctorFinding]:
    own = [f"{one.address} (process {one.pid})" for one in facts.servers if one.pid]
    if own:
        yield _ok("servers", f"of this user: {', '.join(own)}")
    for one in facts.servers:
        if not one.pid:
            text = f"of user {one.uid}: {one.address}, which only that user and root can operate"
            yield _ok("servers", text)


def _port_findings(facts: Facts) -> Iterator[DoctorFinding]:
    for port in facts.ports:
        by = f" by {port.holder}" if port.holder else ""
        text = f"{port.role}, {port.address}: {port.problem or 'free'}{by}"
        if not port.problem:
            yield _ok("ports", text)
        elif port.by_server:
            yield _warning("ports", text, "stop that server before another one starts here")
        else:
            yield _fault("ports", text, f"stop its owner, or choose another port: --{port.role}-port")


def _config_findings(facts: Facts) -> Iterator[DoctorFinding]:
    for one in facts.config_problems:
        yield (_fault if one.fatal else _warning)("config", one.text)
    if facts.config is not None and not facts.config_problems:
        yield _ok("config", f"{facts.config} can be served here")
    for note in facts.config_notes:
        yield _ok("config", note)


def _size_text(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"


_LEVEL_WIDTH: Final = max(len(level.value) for level in Severity)


def findings_as_text(found: Sequence[DoctorFinding], width: int) -> str:
    """Return a line for each finding, wrapped after its topic, advice below, and the number of problems."""
    topics = max(len(one.topic) for one in found)
    lines = [line for one in found for line in _finding_lines(one, topics, width)]
    return "\n".join([*lines, "", _summary(found)]) + "\n"


def _finding_lines(finding: DoctorFinding, topics: int, width: int) -> Iterator[str]:
    head = f"{finding.level.value:<{_LEVEL_WIDTH}}  {finding.topic:<{topics}}  "
    rest = " " * len(head)
    texts = finding.text.split("\n")
    paragraphs = [(text, rest if number else head, rest) for number, text in enumerate(texts)]
    if finding.advice:
        paragraphs.append((finding.advice, f"{rest}→ ", f"{rest}  "))
    for text, first, others in paragraphs:
        yield from textwrap.wrap(
            text, width, initial_indent=first, subsequent_indent=others,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip


def _summary(found: Sequence[DoctorFinding]) -> str:
    kinds = (Severity.FAULT, Severity.WARNING)
    counts = [(sum(one.level is kind for one in found), kind.value) for kind in kinds]
    counted = [f"{count} {word}{'s' if count != 1 else ''}" for count, word in counts if count]
    return ", ".join(counted) or "nothing is wrong"
