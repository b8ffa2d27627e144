"""The tests of ``tests/device`` on this machine's GPU. Those that need what only the stand-in for CUDA can do
(a lost GPU, a hanging driver), or a second GPU, are skipped by themselves.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu import ROOT
from benchmarks.gpu.running.section import Check, Findings, SectionFailed, SectionSkipped, Site

_TESTS: Final = ROOT / "tests/device"
_NEEDED: Final = ("pytest", "hypothesis")
_PROCESSES: Final = 8
#: These leave the device in an error, or ask for all of its memory: no other test may share it with them.
_ALONE: Final = "test_faults"
#: Others that happen to be installed are left out: some refuse to run beside these.
_PLUGINS: Final = ("xdist", "pytest_timeout", "_hypothesis_pytestplugin")
_NO_OTHERS: Final = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
_REAL_GPU: Final = {"GPUSERVE_TEST_REAL_GPU": "1"}
#: For one test, which must not take the time of all.
_TEST_TIMEOUT_S: Final = 45
_POLL_S: Final = 0.5
#: Of the failed ones, in the report; the JSON has all.
_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Batch:
    """Tests that are run together: those that a mark selects, of these files."""

    name: str
    mark: str
    files: Sequence[Path]
    processes: int = _PROCESSES


def run(site: Site, findings: Findings) -> None:
    """See ``section.py``. Raises SectionSkipped: pytest is missing; SectionFailed: a test failed, or there
    was none.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise SectionSkipped(f"{' and '.join(missing)} cannot be imported")
    files = sorted(_TESTS.glob("test_*.py"))
    if not files:
        raise SectionFailed(f"there are no tests in {_TESTS.relative_to(ROOT)}")
    wrong = [sentence for one in batches(files, site.stand_in) for sentence in run_batch(site, findings, one)]
    if wrong:
        raise SectionFailed("; ".join(wrong))


def batches(files: Sequence[Path], stand_in: bool) -> list[Batch]:
    """What is told first is known first; the stand-in shows with some of them that each of these runs."""
    alone = [one for one in files if one.name.startswith(_ALONE)]
    shared = [one for one in files if one not in alone]
    if stand_in:
        return [
            Batch("tests that share the device", "not thorough", shared[:1], 2),
            Batch("tests that have it for themselves", "", alone[-1:], 1),
        ]
    return [
        Batch("tests that share the device", "not thorough", shared),
        Batch("tests that have it for themselves", "", alone, 1),
        Batch("thorough tests that share the device", "thorough", shared),
    ]


def run_batch(site: Site, findings: Findings, batch: Batch) -> Iterator[str]:
    """Run these tests and tell of them as they end; a sentence where they did not all pass."""
    seen = site.folder / f"{batch.name.replace(' ', '-')}.jsonl"
    process = subprocess.Popen(
        [*_command(seen, batch), *map(str, batch.files)],
        env={**os.environ, **_NO_OTHERS, **({} if site.stand_in else _REAL_GPU)},
        cwd=ROOT,
    )
    told = 0
    try:
        while (status := process.poll()) is None:
            time.sleep(_POLL_S)
            if len(cases := list(_cases(seen))) > told:
                told = len(cases)
                _tell(findings, batch.name, cases)
    except BaseException:  # this section is ended: so are the tests, in order
        process.send_signal(signal.SIGINT)
        raise
    cases = list(_cases(seen))
    _tell(findings, batch.name, cases)
    for reason, number in Counter(reason for _, outcome, reason in cases if outcome == "skipped").items():
        findings.skip(f"{number} of the {batch.name}", reason)
    if status:
        yield f"{batch.name}: pytest ended with status {status}"


def _command(seen: Path, batch: Batch) -> list[str]:
    """Warnings fail no test here: versions of libraries are those of the machine."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-rs", "-W", "default"]
    command += ["-m", batch.mark, "-p", "benchmarks.gpu.served.test_results", f"--results-file={seen}"]
    plugins = [name for name in _PLUGINS if importlib.util.find_spec(name) is not None]
    command += [word for name in plugins for word in ("-p", name)]
    if "xdist" in plugins:
        command += ["-n", str(batch.processes), "--dist", "loadfile"]  # a file's tests may share a server
    if "pytest_timeout" in plugins:
        command.append(f"--timeout={_TEST_TIMEOUT_S}")
    return [*command, "-p", "no:cacheprovider"]


def _cases(seen: Path) -> Iterator[tuple[str, str, str]]:
    """Name, outcome and reason of each test that has ended: the last word of its phases."""
    lines = seen.read_text().splitlines() if seen.exists() else []
    found: dict[str, tuple[str, str]] = {}
    for one in map(json.loads, lines):
        if one["outcome"] != "passed" or one["test"] not in found:
            found[one["test"]] = one["outcome"], one["reason"]
    yield from ((test, *ended) for test, ended in found.items())


def _tell(findings: Findings, name: str, cases: list[tuple[str, str, str]]) -> None:
    """In the place of what was told of them before."""
    counts = Counter(outcome for _, outcome, _ in cases)
    seen = f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    failed = [case for case in cases if case[1] == "failed"]
    checks = [Check(name, not failed, seen)]
    checks += [Check(f"{name}: {test}", right=False, seen=reason) for test, _, reason in failed[:_SHOWN]]
    facts: dict[str, Any] = {name: [list(case) for case in cases]}
    findings.replace_checks(name, checks, facts)
