"""The command line of ``scripts/gpu_check``: which sections, how long, and where the report goes.

Exit codes: 0 every required section could be run (a goal that is not reached is a result), 1 one failed or
there is no GPU, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.catalog import BUDGET_S, PARTS, SECTIONS, stretched
from benchmarks.gpu.machine import GPU, NoMachine, describe
from benchmarks.gpu.report import JSON_FILE, Report, earlier
from benchmarks.gpu.running_sections import run_sections
from benchmarks.gpu.section import Effort, Outcome, Section, Site

_ROOT: Final = Path(__file__).resolve().parent.parent.parent
_DOCUMENTS: Final = ("gpu_report.md", "gpu_timeline.md", "gpu_timeline.svg", "gpu_overlap.svg")
#: How much of each log the one log file takes over.
_LOG_NBYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line said. ``others`` are sections that an earlier run may have left in ``out``."""

    sections: tuple[Section, ...]
    others: tuple[Section, ...]
    budget_s: float
    out: Path
    stand_in: bool
    docs: bool


def main(arguments: Sequence[str]) -> int:
    """Run the check; returns the exit code."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    options = parse(arguments)
    with _environment(options) as environment:
        try:
            machine = describe(environment)
        except NoMachine as error:
            say(f"error: {error}")
            return 1
        for name, value in machine.items():
            say(f"{name}: {value}")
        if GPU not in machine:
            say("error: this machine shows no NVIDIA GPU")
            return 1
        return _check(options, machine, environment)


def parse(arguments: Sequence[str]) -> Options:
    """The options; ends the program with 2 on a usage error."""
    names = ", ".join(one.name for one in SECTIONS)
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description="Check this server on a machine with an NVIDIA GPU."
    )
    parser.add_argument("--only", metavar="SECTION", type=_sections, help=f"some of {names}, by commas")
    parser.add_argument("--part", choices=PARTS, help="half of them; both into the same DIR make one report")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="default: %(default)g")
    parser.add_argument("--out", type=Path, default=_ROOT / ".cache/gpu_check", metavar="DIR")
    parser.add_argument("--docs", action="store_true", help="put report and timeline into docs/ as well")
    parser.add_argument(
        "--publish", metavar="DIR", type=Path, help="run nothing: put those of DIR into docs/"
    )
    parser.add_argument("--python", metavar="PATH", help="use its packages and install nothing")
    parser.add_argument("--wheels", metavar="DIR", help="with --python: wheels of what it lacks")
    parser.add_argument("--stand-in", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--parse-only", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.docs and (given.stand_in or given.only):
        parser.error("--docs takes a run of all sections on a GPU")
    if given.only and given.part:
        parser.error("--only and --part exclude each other")
    if given.publish is not None:
        sys.exit(publish(given.publish))
    if given.parse_only:
        sys.exit(0)
    part = tuple(one for one in SECTIONS if given.part in (None, one.part))
    others = () if given.only else tuple(one for one in SECTIONS if one not in part)
    sections = stretched(given.only or part, given.budget_s)
    return Options(sections, others, given.budget_s, given.out.absolute(), given.stand_in, given.docs)


def publish(folder: Path) -> int:
    """Put an earlier report into docs/, if it is whole and of a GPU; returns the exit code."""
    try:
        document = json.loads((folder / JSON_FILE).read_text())
    except (OSError, ValueError) as error:
        say(f"error: {folder} has no report: {error}")
        return 1
    missing = [one.name for one in SECTIONS if one.name not in document["sections"]]
    if document["stand_in"] or missing:
        why = "is of the stand-in" if document["stand_in"] else f"lacks {', '.join(missing)}"
        say(f"error: the report in {folder} {why}; expected one of all sections, run on a GPU")
        return 1
    for name in _DOCUMENTS:
        if (folder / name).exists():
            shutil.copyfile(folder / name, _ROOT / "docs" / name)
    return 0


def say(line: str) -> None:
    """One line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def _check(options: Options, machine: Mapping[str, str], environment: Mapping[str, str]) -> int:
    began_at = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    effort = Effort.small() if options.stand_in else Effort.full()
    found = [] if options.stand_in else earlier(options.out, machine, options.others)
    order = [one.name for one in SECTIONS]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        site = Site(Path(folder), effort, options.stand_in)
        for one in run_sections(options.sections, site, options.budget_s, say, environment):
            found = sorted((*found, one), key=lambda found: order.index(found.section.name))
            _keep_files(Path(folder), options.out)
            # After each section: a run that is killed keeps what it had.
            report = Report(machine, effort, options.stand_in, time.monotonic() - began_at, found)
            markdown_file, _ = report.write(options.out)
            if one.outcome is Outcome.FAILED:
                say(f"FAILED: {one.section.name}: {one.reason}")
    say(f"report: {markdown_file}")
    return publish(options.out) if options.docs and not report.failed else int(report.failed)


def _keep_files(folder: Path, out: Path) -> None:
    """What sections made for the docs, and all logs in one file."""
    for name in _DOCUMENTS:
        if (folder / name).exists():
            shutil.copyfile(folder / name, out / name)
    with (out / "gpu_check.log").open("wb") as log:
        for one in sorted(folder.rglob("*.log")):
            log.write(f"==== {one.relative_to(folder)} ====\n".encode())
            log.write(one.read_bytes()[-_LOG_NBYTES:] + b"\n")


@contextmanager
def _environment(options: Options) -> Iterator[Mapping[str, str]]:
    """What the sections' processes get besides the environment of this one."""
    if not options.stand_in:
        yield {}
        return
    from benchmarks.gpu.stand_in import simulated

    with simulated() as environment:
        yield environment


def _sections(text: str) -> tuple[Section, ...]:
    """Those of these names, in the order of the catalog."""
    names = text.split(",")
    known = [one.name for one in SECTIONS]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
    return tuple(one for one in SECTIONS if one.name in names)


if __name__ == "__main__":
    os.chdir(_ROOT)
    sys.exit(main(sys.argv[1:]))
