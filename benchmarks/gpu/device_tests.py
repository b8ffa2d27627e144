"""The tests of ``tests/device`` on this machine's GPU. Those that need what only the stand-in for CUDA can do
(a lost GPU, a hanging driver), or a second GPU, are skipped by themselves.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from benchmarks.gpu.section import Findings, SectionFailed, SectionSkipped, Site

_ROOT: Final = Path(__file__).resolve().parent.parent.parent
_TESTS: Final = _ROOT / "tests/device"
_NEEDED: Final = ("pytest", "hypothesis")
_PROCESSES: Final = 8
#: These fill the memory of the device, or lose it: no other test may share it with them.
_ALONE: Final = "test_faults"
#: Others that happen to be installed are left out: some refuse to run beside these.
_PLUGINS: Final = ("xdist", "pytest_timeout", "_hypothesis_pytestplugin")
_NO_OTHERS: Final = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
_REAL_GPU: Final = {"GPUSERVE_TEST_REAL_GPU": "1"}
#: Of the failed ones, in the report; the JSON has all.
_SHOWN: Final = 20


def run(site: Site, findings: Findings) -> None:
    """See ``section.py``.

    Raises:
        SectionSkipped: pytest is missing.
        SectionFailed: a test failed, or there was none.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise SectionSkipped(f"{' and '.join(missing)} cannot be imported")
    files = sorted(_TESTS.glob("test_*.py"))
    if not files:
        raise SectionFailed(f"there are no tests in {_TESTS.relative_to(_ROOT)}")
    wrong = list(_run(site, findings, files[:1])) if site.stand_in else []
    if not site.stand_in:
        alone = [one for one in files if one.name.startswith(_ALONE)]
        wrong += _run(site, findings, [one for one in files if one not in alone])
        wrong += _run(site, findings, alone, processes=1)
    if wrong:
        raise SectionFailed("; ".join(wrong))


def _run(site: Site, findings: Findings, files: Sequence[Path], processes: int = _PROCESSES) -> Iterator[str]:
    """Run these tests and tell of them; a sentence where they did not all pass."""
    name = "tests that share the device" if processes > 1 else "tests that have it for themselves"
    report = site.folder / f"device-tests-{processes}.xml"
    status = subprocess.run(
        [*_command(report, processes), *map(str, files)],
        env={**os.environ, **_NO_OTHERS, **({} if site.stand_in else _REAL_GPU)},
        cwd=_ROOT,
        check=False,
    ).returncode
    if report.exists():
        _tell(findings, name, list(_cases(report)))
    if status:
        yield f"{name}: pytest ended with status {status}"


def _command(report: Path, processes: int) -> list[str]:
    """Warnings fail no test here: versions of libraries are those of the machine."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-W", "default", f"--junitxml={report}"]
    plugins = [name for name in _PLUGINS if importlib.util.find_spec(name) is not None]
    command += [word for name in plugins for word in ("-p", name)]
    if "xdist" in plugins:
        command += ["-n", str(processes), "--dist", "loadfile"]  # a file's tests may share a server
    if "pytest_timeout" not in plugins:
        command += ["-o", "addopts=-q"]  # setup.cfg has an option of it, which would be an error
    return [*command, "-p", "no:cacheprovider"]


def _cases(report: Path) -> Iterator[tuple[str, str, str]]:
    """Name, outcome and reason of each test."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome, reason = "passed", ""
        for kind in ("skipped", "failure", "error"):
            if (found := case.find(kind)) is not None:
                outcome, reason = kind, (found.get("message") or "").partition("\n")[0]
        yield name, outcome, reason


def _tell(findings: Findings, name: str, cases: list[tuple[str, str, str]]) -> None:
    counts = Counter(outcome for _, outcome, _ in cases)
    failed = counts["failure"] + counts["error"]
    findings.keep(**{name: [list(case) for case in cases]})
    findings.check(
        name, not failed, f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped"
    )
    for test, outcome, reason in [case for case in cases if case[1] in {"failure", "error"}][:_SHOWN]:
        findings.check(test, False, f"{outcome}: {reason}")
    for reason, number in Counter(reason for _, outcome, reason in cases if outcome == "skipped").items():
        findings.skip(f"{number} test{'s' * (number > 1)}", reason)
