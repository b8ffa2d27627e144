"""The sections of a check, in the order in which they run, and what each may take.

The figures come first, on a device that no fault has touched; the faults come last.
"""

from __future__ import annotations

from typing import Final

from benchmarks.gpu.section import Section


def _section(name: str, title: str, budget_s: float, *, required: bool = True) -> Section:
    module = name.replace("-", "_")
    return Section(name, title, f"benchmarks.gpu.{module}:run", budget_s, required)


SECTIONS: Final = (
    _section("bandwidth", "copies of the worker against copies from page-locked memory", 25),
    _section("overlap", "copies and compute at the same time", 35),
    _section("networks", "networks in torch, through the server and in a bare loop", 80),
    _section("instances", "1, 2 and 4 instances on one GPU", 45),
    _section("cuda-ipc", "requests whose tensors stay on the device", 30),
    _section("sentences", "sentence embeddings, through the server and in a bare loop", 30),
    _section("peers", "other servers on the same network", 25, required=False),
    _section("profile", "streams and copies of requests on a timeline", 25),
    _section("device-tests", "the tests of tests/device on this machine", 130),
    _section("faults", "what goes wrong on a device, and what is left of it", 50),
)
#: For all of them together; starting and reporting come on top.
BUDGET_S: Final = 460.0
