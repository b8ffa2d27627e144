"""The command line of ``scripts/gpu_check``: which sections, how long, and where the report goes.

Exit codes: 0 every required section could be run (a goal that is not reached is a result), 1 one failed or
there is no GPU, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.command_line import exit_on_sigterm, names_of, say
from benchmarks.gpu import ROOT, simulated
from benchmarks.gpu.running.machine import GPU, NoMachine, describe, warmed
from benchmarks.gpu.running.one_by_one import Listener, run_sections
from benchmarks.gpu.running.report import JSON_FILE, MARKDOWN_FILE, Report, earlier
from benchmarks.gpu.running.section import (
    PART_BUDGET_S,
    PARTS,
    SECTIONS,
    Effort,
    Found,
    Outcome,
    Site,
    stretched,
)

_DOCUMENTS: Final = ("gpu_report.md", "gpu_timeline.md", "gpu_timeline.svg", "gpu_overlap.svg")
#: In ``--out``: a folder for each section, with its log and those of its servers.
_FILES: Final = "files"
#: What the first imports may take of the time.
_COLD_PART: Final = 0.5


def main(arguments: Sequence[str]) -> int:
    began_at = time.monotonic()
    exit_on_sigterm()
    options = parse(arguments)
    with simulated() if options.stand_in else nullcontext({}) as environment:
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
        cold = warmed(environment, options.budget_s * _COLD_PART)
        say(f"first imports: {cold}")
        try:
            effort = Effort.small() if options.stand_in else Effort.full()
            return _Check(options, {**machine, "first imports": cold}, environment, began_at, effort).run()
        finally:  # also where the time of the run is over
            if options.archive is not None:
                with tarfile.open(options.archive, "w:gz") as archive:
                    archive.add(options.out, options.out.name)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = tuple(one.name for one in SECTIONS)
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description="Check this server on a machine with an NVIDIA GPU."
    )
    parser.add_argument(
        "--only", metavar="SECTION", type=names_of(names), help=f"some of {', '.join(names)}, by commas"
    )
    parser.add_argument("--part", choices=PARTS, help="half of them; runs into the same DIR make one report")
    parser.add_argument("--budget-s", type=float, help=f"default: {PART_BUDGET_S:g} for each part")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache/gpu_check", metavar="DIR")
    parser.add_argument("--archive", metavar="FILE", type=Path, help="put DIR into this .tgz, at any end")
    parser.add_argument("--docs", action="store_true", help="put report and timeline into docs/ as well")
    parser.add_argument(
        "--publish", metavar="DIR", type=Path, help="run nothing: put those of DIR into docs/"
    )
    parser.add_argument("--python", metavar="PATH", help="use its packages and install nothing")
    parser.add_argument("--wheels", metavar="DIR", help="with --python: wheels of what it lacks")
    parser.add_argument("--stand-in", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--parse-only", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.docs and given.stand_in:
        parser.error("--docs takes a run of all sections on a GPU")
    if given.only and given.part:
        parser.error("--only and --part exclude each other")
    if given.publish is not None:
        sys.exit(publish(given.publish))
    if given.parse_only:
        sys.exit(0)
    given.sections = tuple(
        one for one in SECTIONS if given.part in (None, one.part) and one.name in (given.only or names)
    )
    given.budget_s = given.budget_s or PART_BUDGET_S * len({one.part for one in given.sections})
    given.out = given.out.absolute()
    return given


def publish(folder: Path) -> int:
    """Put an earlier report into docs/, if it is whole and of a GPU; returns the exit code."""
    try:
        document = json.loads((folder / JSON_FILE).read_text())
    except (OSError, ValueError) as error:
        say(f"error: {folder} has no report: {error}")
        return 1
    whole = {name for name, one in document["sections"].items() if one["outcome"] != Outcome.UNDER_WAY.value}
    missing = [one.name for one in SECTIONS if one.name not in whole]
    if document["stand_in"] or missing:
        why = "is of the stand-in" if document["stand_in"] else f"lacks {', '.join(missing)}"
        say(f"error: the report in {folder} {why}; expected one of all sections, run on a GPU")
        return 1
    _copy_documents(folder, ROOT / "docs")
    return 0


@dataclass(slots=True)
class _Check:
    """A run of the options' sections, whose report is in ``out`` from the first finding on."""

    options: argparse.Namespace
    machine: Mapping[str, str]
    environment: Mapping[str, str]
    began_at: float
    effort: Effort
    found: dict[str, Found] = field(default_factory=dict)

    def run(self) -> int:
        options, left_s = self.options, self.options.budget_s - (time.monotonic() - self.began_at)
        files = options.out / _FILES
        files.mkdir(parents=True, exist_ok=True)
        # An earlier run may have left other sections in ``out``.
        others = tuple(one for one in SECTIONS if one not in options.sections)
        for one in earlier(options.out, self.machine, others, stand_in=options.stand_in):
            self.found[one.section.name] = one
        sections = stretched(options.sections, left_s)
        site = Site(files, self.effort, options.stand_in)
        for one in run_sections(sections, site, left_s, Listener(say, self._report), self.environment):
            self._report(one)
            _copy_documents(files / one.section.name, options.out)
            if one.outcome is Outcome.FAILED:
                say(f"FAILED: {one.section.name}: {one.reason}")
        say(f"report: {options.out / MARKDOWN_FILE}")
        failed = any(one.failed for one in self.found.values())
        published = publish(options.out) if options.docs else 0
        return int(failed or published)

    def _report(self, one: Found) -> None:
        """After each finding: a run that is killed keeps what it had."""
        self.found[one.section.name] = one
        known = [self.found[name] for name in (one.name for one in SECTIONS) if name in self.found]
        took_s = time.monotonic() - self.began_at
        Report(self.machine, self.effort, self.options.stand_in, took_s, known).write(self.options.out)


def _copy_documents(folder: Path, out: Path) -> None:
    for name in _DOCUMENTS:
        if (folder / name).exists():
            shutil.copyfile(folder / name, out / name)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
