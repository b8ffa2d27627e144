"""``gpuserve doctor``: what a value means, and that the values of this machine can be had."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuserve.cli import doctor_checks as checks
from gpuserve.cli.app import run
from gpuserve.cli.doctor_checks import DoctorFinding, Severity
from gpuserve.cli.exit_codes import ExitCode
from gpuserve.supervisor.control.operator_client import PortHolder, holder_of, listening_inodes

GIB = 1 << 30


def packages(*installed: tuple[str, str, str]) -> list[DoctorFinding]:
    return list(checks.package_findings(installed))


def memory(available: int | None, strict: bool = False, left: int | None = None) -> list[DoctorFinding]:
    return list(checks.memory_findings(available, strict, left))


def port(problem: str, holder: PortHolder | None = None) -> list[DoctorFinding]:
    return [checks.port_finding("grpc", "0.0.0.0:80", problem, holder)]


@pytest.mark.parametrize(
    ("found", "level", "topic", "said", "advice"),
    [
        (packages(("numpy", "2.0.1", "1.26"), ("rich", "14", "")), "ok", "packages", "numpy 2.0.1, rich", ""),
        (
            packages(("numpy", "1.9.3", "1.26"), ("rich", "14", "")),
            "fault", "packages", "numpy 1.9.3 is installed, and gpuserve needs numpy>=1.26",
            "pip install 'numpy>=1.26'",
        ),
        (packages(("rich", "", "")), "fault", "packages", "there is no rich", "install 'rich'"),
        ([checks.processor_finding(2.0, 8)], "ok", "processors", "2 of 8 may be used", ""),
        ([checks.processor_finding(0.5, 8)], "warning", "processors", "0.5 of 8 may be used", "--cpus"),
        (memory(4 * GIB), "ok", "memory", "4.0 GiB can be reserved", ""),
        (memory(GIB // 2), "warning", "memory", "512 MiB can be reserved", "more memory"),
        (memory(GIB // 8), "fault", "memory", "128 MiB can be reserved", "more memory"),
        (memory(None, True, 3 * GIB), "warning", "memory", "3.0 GiB are left", "vm.overcommit_memory=0"),
        (list(checks.clock_findings(True, "tsc")), "ok", "clock", "synchronized", ""),
        (list(checks.clock_findings(None, "")), "ok", "clock", "unknown", ""),
        (list(checks.clock_findings(False, "tsc")), "warning", "clock", "is not synchronized", "chrony"),
        (
            list(checks.clock_findings(True, "hpet"))[1:],
            "warning", "clock", "the clock source is hpet", "clocksource=tsc",
        ),
        (port(""), "ok", "ports", "grpc, 0.0.0.0:80: free", ""),
        (port("permission denied"), "fault", "ports", "grpc, 0.0.0.0:80: permission denied", "--grpc-port"),
        (
            port("address already in use", PortHolder(7, "nginx", False)),
            "fault", "ports", "address already in use by nginx, process 7", "--grpc-port",
        ),
        (
            port("address already in use", PortHolder(7, "gpuserve", True)),
            "warning", "ports", "by the gpuserve server, process 7", "stop that server",
        ),
    ],
)  # fmt: skip
def test_findings(found: list[DoctorFinding], level: str, topic: str, said: str, advice: str) -> None:
    ((its_level, its_topic, text, its_advice),) = found
    assert (its_level.value, its_topic) == (level, topic)
    assert said in text
    assert advice in its_advice
    assert bool(its_advice) == (level != "ok")
    assert checks.has_fault(found) == (level == "fault")


def test_memory_that_is_not_known_is_no_fault() -> None:
    assert memory(None) == []


def test_open_files_for_the_connections() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few, _ = checks.limit_findings(16)
    assert (few.level, few.topic) == (Severity.OK, "nofile")
    if most >= 0:
        many, _ = checks.limit_findings(most)
        assert f"{most} open files: about {most - 256} connections, of {most}" in many.text
        assert many.advice == f"ulimit -Hn {most + 256}, or LimitNOFILE={most + 256}"


def test_shared_memory(tmp_path: Path) -> None:
    assert list(checks.shm_findings(str(tmp_path / "absent"))) == []
    (found,) = checks.shm_findings(str(tmp_path))
    assert found.topic == "shm"


def test_nothing_is_wider_than_the_terminal() -> None:
    found = [
        checks.port_finding("http", "0.0.0.0:8000", "address already in use", PortHolder(7, "a" * 20, False)),
        *checks.clock_findings(False, "tsc"),
        *memory(4 * GIB),
    ]
    text = checks.findings_as_text(found, 60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.endswith("\n1 fault, 1 warning\n")
    assert "→ stop its owner" in text
    assert checks.findings_as_text(memory(4 * GIB), 80).endswith("\n\nnothing is wrong\n")


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [("1.9", "1.26", True), ("2.0", "1.26", False), ("1.26.0", "1.26", False), ("dev", "1", True)],
)
def test_versions(version: str, least: str, older: bool) -> None:
    assert checks.is_older(version, least) is older


# ---- this machine -------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_who_has_a_port(taken: int) -> None:
    name = Path("/proc/self/comm").read_text().strip()
    assert holder_of(taken) == PortHolder(os.getpid(), name, False)
    assert str(PortHolder(os.getpid(), "gpuserve", True)) == "a server of this very program"
    line = "  0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 77 1"
    assert [*listening_inodes(f"head\n{line}\n", 8080)] == ["77"]
    assert [*listening_inodes(f"head\n{line}\n".replace(" 0A ", " 01 "), 8080)] == []


def test_the_verb(taken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "config.yaml").write_text(
        f"server: {{http_port: {taken}, grpc_port: 0, metrics_port: 0}}\n"
        "models: [{name: m, callable: empty.py:nothing, inputs: [], outputs: []}]\n"
    )
    assert run(["doctor", str(tmp_path / "config.yaml"), "--json"]) == ExitCode.RUNTIME_FAILURE
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert {one["topic"] for one in document["findings"]} >= {
        "python", "packages", "kernel", "gpus", "processors", "clock", "nofile", "memlock", "ports", "config",
    }  # fmt: skip
    faults = {(one["topic"], one["text"]) for one in document["findings"] if one["level"] == "fault"}
    told = [text for topic, text in faults if topic == "ports"]
    assert len(told) == 1
    assert f"http, 0.0.0.0:{taken}: address already in use by " in told[0]
    assert any(topic == "config" and "has no attribute 'nothing'" in text for topic, text in faults)
