"""A plugin of pytest: ``--results-file FILE`` gets a line of JSON for each phase of a test as it ends (its
start only where it did not pass), so that a run that is killed keeps what it had.
"""

from __future__ import annotations

import json

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results-file")


def pytest_configure(config: pytest.Config) -> None:
    """Pytest's hook: the process that is told of all tests writes, those of xdist do not."""
    file = config.getoption("--results-file")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(file))


class _Writer:
    def __init__(self, file: str) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        line = {"test": report.nodeid, "outcome": report.outcome, "reason": _reason(report)}
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport) -> str:
    """The first line of what went wrong, or why the test was skipped."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # of a skipped one: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return f"{report.when}: {text.strip().partition(chr(10))[0]}"
