"""``scripts/attack`` in its short form: the server holds, and what it does not hold is seen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from serving import REPOSITORY

from benchmarks.attacks.limits import MIB, Finding, Limits
from benchmarks.attacks.watched import Held

#: The tests share the machine with others: that a client waits is no fault here, that it gets no answer is.
PATIENCE_MS = "4000"


def attack(names: str, seconds: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "benchmarks.attacks", "--seconds", seconds, "--p99-ms", PATIENCE_MS)
    return subprocess.run(
        [*command, "--attacks", names],
        cwd=REPOSITORY,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.parametrize(
    ("names", "seconds"),
    [
        ("priority", "0.3"),
        pytest.param("slow-heads,rapid-reset,continuation,empty-data", "1", marks=pytest.mark.thorough),
        pytest.param(
            "settings,dribble,open-streams,empty-lines,made-you-reset", "1", marks=pytest.mark.thorough
        ),
    ],
)
def test_a_client_beside_an_attacker_is_served(names: str, seconds: str) -> None:
    done = attack(names, seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ")[0].strip("| ") for line in done.stdout.splitlines()[2:]]
    assert rows == names.split(",")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "most_mib"),
    [("claims-http", 300), ("bombs-unary", 300), ("closed-windows", 600), ("half-requests", 300)],
)
def test_what_an_attacker_took_is_given_back_when_it_has_gone(name: str, most_mib: int) -> None:
    """A tenth of the attack takes as much: the limits are met within a second. Ten later it is back."""
    done = attack(name, "1")
    (row,) = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:3]]
    held = dict(zip(("before", "peak", "after"), map(int, row[7:10]), strict=True))
    assert held["peak"] - held["before"] < most_mib, done.stdout
    assert held["after"] - held["before"] < 64, done.stdout


CALM = Held(100 * MIB, 40)
QUICK = [0.001] * 99


@pytest.mark.parametrize(
    ("latencies_s", "errors", "peak", "after", "broken"),
    [
        ([*QUICK, 0.3], {}, CALM, CALM, []),
        ([*QUICK, 0.3, 0.3], {}, CALM, CALM, ["p99"]),
        ([], {}, CALM, CALM, ["p99"]),
        (QUICK, {"refused": 1}, None, None, ["errors"]),
        (QUICK, {}, Held(400 * MIB, 4000), CALM, []),
        (QUICK, {}, Held(401 * MIB, 40), CALM, ["memory"]),
        (QUICK, {}, CALM, Held(165 * MIB, 40), ["not given back"]),
        (QUICK, {}, CALM, Held(100 * MIB, 57), ["not given back"]),
    ],
)
def test_what_is_not_held(
    latencies_s: list[float], errors: dict[str, int], peak: Held | None, after: Held | None, broken: list[str]
) -> None:
    finding = Finding("one", latencies_s, errors, CALM, peak, after)
    assert finding.broken(Limits()) == broken
    assert finding.row(Limits())[1] == ", ".join(broken)
