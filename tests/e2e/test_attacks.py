"""``scripts/attack`` in its short form: the server holds, and a broken limit is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import finished
from serving import REPOSITORY

from benchmarks.attacks.attacked import Held
from benchmarks.attacks.limits import MIB, Finding, Judgement, Limits, compared, markdown

#: The tests share the machine with others: a client that waits is no failure here, one without an answer is.
PATIENCE_MS = "4000"


def attack(names: str, seconds: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "benchmarks.attacks", "--seconds", seconds, "--p99-ms", PATIENCE_MS)
    return finished([*command, "--attacks", names, *flags], cwd=REPOSITORY, env=dict(os.environ))


def attacks_of(table: str) -> list[str]:
    rows = [line for line in table.splitlines()[2:] if line.startswith("| ")]
    return [row.split(" | ")[0].strip("| ") for row in rows]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("names", "seconds", "flags"),
    [
        ("priority", "0.3", ()),
        pytest.param("slow-heads,rapid-reset,continuation,empty-data", "1", (), marks=pytest.mark.thorough),
        pytest.param(
            "settings,dribble,open-streams,empty-lines,made-you-reset", "1", (), marks=pytest.mark.thorough
        ),
        pytest.param(
            "ping,pipelined,claims-http", "1", ("--ingress-processes", "2"), marks=pytest.mark.thorough
        ),
        pytest.param("openai-json-none", "1", (), marks=pytest.mark.thorough),
    ],
)
def test_a_client_beside_an_attacker_is_served(names: str, seconds: str, flags: tuple[str, ...]) -> None:
    done = attack(names, seconds, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert attacks_of(done.stdout) == names.split(",")


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


@pytest.mark.thorough
def test_a_server_with_half_a_cpu_is_attacked_or_the_refusal_is_said(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = attack("ping", "1", "--cpu", "0.5", "--json", str(results))
    if done.returncode == 2:
        assert done.stderr.startswith("This machine refuses a control group with 0.5 CPUs: ")
        assert not results.exists()
        return
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(results.read_text())
    assert found["attack"] == "ping"
    assert found["requests"] > 25


def test_a_running_server_is_not_attacked_in_ways_that_need_another_one() -> None:
    done = attack("ping,poison,reload-chain", "1", "--url", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "poison, reload-chain" in done.stderr


CALM = Held(100 * MIB, 40)
QUICK = [0.001] * 99


def finding(**seen: Any) -> Finding:
    values: dict[str, Any] = {
        **{"attack": "one", "seconds": 1.0, "limits": Limits(), "latencies_s": QUICK, "errors": {}},
        **{"before": CALM, "peak": CALM, "after": CALM},
    }
    return Finding(**{**values, **seen})


@pytest.mark.parametrize(
    ("seen", "broken"),
    [
        ({"latencies_s": [*QUICK, 0.3]}, []),
        ({"latencies_s": [*QUICK, 0.3, 0.3]}, ["p99"]),
        ({"latencies_s": [*QUICK, 0.3, 0.3], "limits": Limits(p99_ms=500.0)}, []),
        ({"latencies_s": []}, ["p99", "few requests"]),
        ({"seconds": 10.0}, ["few requests"]),
        ({"errors": {"refused": 1}, "before": None, "peak": None, "after": None}, ["errors"]),
        ({"peak": Held(400 * MIB, 4000)}, []),
        ({"peak": Held(401 * MIB, 40)}, ["memory"]),
        ({"after": Held(197 * MIB, 40)}, ["not given back"]),
        ({"after": Held(100 * MIB, 57)}, ["not given back"]),
        ({"requests_held": 1}, ["blocks lost"]),
        ({"judgements": [Judgement("in time", True), Judgement("too late", False)]}, ["judged"]),
    ],
)
def test_what_is_not_held(seen: dict[str, Any], broken: list[str]) -> None:
    one = finding(**seen)
    assert one.broken == broken
    assert one.row[1] == ", ".join(broken)
    assert one.document["broken"] == broken


def test_errors_and_judgements_stand_below_the_table() -> None:
    text = markdown([finding(errors={"refused": 3}, judgements=[Judgement("status was late", False)])])
    assert text.endswith("\n\n- one: 3 times refused\n- one: BAD: status was late\n")


def test_earlier_results_stand_beside_the_new_ones() -> None:
    earlier = finding(latencies_s=[*QUICK, 0.5, 0.5], peak=Held(450 * MIB, 40)).document
    rows = compared([finding(), finding(attack="new")], [json.loads(json.dumps(earlier))]).splitlines()[2:]
    assert rows == ["| one |  | 500.0 | 1.0 | 350 | 0 | p99, memory |", "| new |  |  | 1.0 |  | 0 |  |"]
