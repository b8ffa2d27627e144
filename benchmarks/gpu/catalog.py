"""The sections of a check, in the order in which they run, and what each may take.

The facts come first; then the figures, on a device that no fault has touched; the faults come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from benchmarks.gpu.running.section import Section

#: Each fits into ten minutes.
FACTS: Final = "facts"
REPORT: Final = "report"
PARTS: Final = (FACTS, REPORT)
#: For a part, with what comes before its first section; starting the check and reporting come on top.
PART_BUDGET_S: Final = 550.0


def _section(name: str, title: str, budget_s: float, *, part: str = REPORT, required: bool = True) -> Section:
    module = name.replace("-", "_")
    return Section(name, title, f"benchmarks.gpu.sections.{module}:run", budget_s, required, part)


SECTIONS: Final = (
    _section("facts", "what the device, its driver and its libraries do", 75, part=FACTS),
    _section("bandwidth", "copies of the worker against copies from page-locked memory", 25),
    _section("overlap", "copies and compute at the same time", 35),
    _section("networks", "networks in torch, through the server and in a bare loop", 70),
    _section("instances", "1, 2 and 4 instances on one GPU", 40),
    _section("cuda-ipc", "requests whose tensors stay on the device", 35),
    _section("sentences", "sentence embeddings, through the server and in a bare loop", 30),
    _section("peers", "other servers and a bare loop on the same network", 60, required=False),
    _section("profile", "streams and copies of requests on a timeline", 25),
    _section("device-tests", "the tests of tests/device on this machine", 260, part=FACTS),
    _section("faults", "what goes wrong on a device, and what is left of it", 50, part=FACTS),
)


def stretched(sections: Sequence[Section], budget_s: float) -> tuple[Section, ...]:
    """The same, each with so much more time as there is for all: on a fresh machine everything is cold."""
    factor = max(1.0, budget_s / sum(one.budget_s for one in sections))
    return tuple(replace(one, budget_s=one.budget_s * factor) for one in sections)
