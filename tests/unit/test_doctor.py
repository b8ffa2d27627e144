"""``gpuserve doctor``: what facts mean, and that the facts of this machine can be had."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuserve.cli.app import run
from gpuserve.cli.doctor_command import Severity, doctor_findings, findings_as_text, has_fault, is_older
from gpuserve.cli.doctor_facts import ConfigProblem, Facts, Package, Port, RunningServer
from gpuserve.cli.exit_codes import ExitCode
from gpuserve.supervisor.control.operator_client import PortHolder, holder_of, listening_inodes

GIB = 1 << 30
WELL = Facts(
    uid=1000,
    python="CPython 3.11.7, x86_64",
    is_supported=True,
    kernel="Linux 6.1",
    packages=(Package("numpy", "2.0.1", "1.26"), Package("orjson", "3.10", "3.10")),
    lacking=(),
    gpus="NVIDIA driver 570.1, CUDA 12.8, cupy 14.0 for CUDA 12",
    gpu_notes=(),
    has_driver=True,
    shm_nbytes=8 * GIB,
    open_files=(1024, 1 << 20),
    locked_nbytes=(-1, -1),
    processors=2.0,
    machine_processors=8,
    available_nbytes=4 * GIB,
    is_overcommit_strict=False,
    commit_left_nbytes=None,
    is_clock_synchronized=True,
    clock_source="tsc",
    ports=(Port("http", "0.0.0.0:8000"),),
    servers=(),
    max_connections=16384,
    config="config.yaml",
)


def bad(facts: Facts) -> list[tuple[str, str, str, str]]:
    found = (one for one in doctor_findings(facts) if one.level is not Severity.OK)
    return [(one.level.value, one.topic, one.text, one.advice) for one in found]


def test_a_machine_that_is_well() -> None:
    assert bad(WELL) == []
    topics = {one.topic for one in doctor_findings(WELL)}
    assert topics == {
        "python", "packages", "kernel", "gpus", "processors", "memory", "shm", "nofile", "memlock", "clock",
        "ports", "config",
    }  # fmt: skip
    assert findings_as_text(doctor_findings(WELL), 80).endswith("\n\nnothing is wrong\n")


@pytest.mark.parametrize(
    ("changes", "level", "topic", "said", "advice"),
    [
        ({"is_supported": False}, "fault", "python", "is not supported", "CPython 3.11 or later"),
        (
            {"packages": (Package("numpy", "1.9.3", "1.26"),)},
            "fault", "packages", "numpy 1.9.3 is installed, and gpuserve needs numpy>=1.26",
            "pip install 'numpy>=1.26'",
        ),
        ({"packages": (Package("rich", "", ""),)}, "fault", "packages", "there is no rich", "install 'rich'"),
        ({"lacking": ("handles",)}, "fault", "kernel", "Linux 6.1 lacks handles", "5.4"),
        ({"gpu_notes": ("it is for CUDA 13",)}, "warning", "gpus", "it is for CUDA 13", "gpuserve devices"),
        ({"processors": 0.5}, "warning", "processors", "0.5 of 8 may be used", "--cpus"),
        ({"available_nbytes": GIB // 2}, "warning", "memory", "512 MiB can be reserved", "more memory"),
        ({"available_nbytes": GIB // 8}, "fault", "memory", "128 MiB can be reserved", "more memory"),
        (
            {"is_overcommit_strict": True, "commit_left_nbytes": 3 * GIB},
            "warning", "memory", "3.0 GiB are left", "vm.overcommit_memory=0",
        ),
        ({"shm_nbytes": 64 << 20}, "warning", "shm", "/dev/shm has 64 MiB", "--shm-size"),
        (
            {"open_files": (1024, 4096)},
            "warning", "nofile", "4096 open files: about 3840 connections, of 16384", "ulimit -Hn 16640",
        ),
        ({"is_clock_synchronized": False}, "warning", "clock", "is not synchronized", "chrony"),
        ({"clock_source": "hpet"}, "warning", "clock", "the clock source is hpet", "clocksource=tsc"),
        (
            {"ports": (Port("http", "0.0.0.0:80", "permission denied"),)},
            "fault", "ports", "http, 0.0.0.0:80: permission denied", "--http-port",
        ),
        (
            {"ports": (Port("grpc", ":1", "address already in use", "nginx, process 7"),)},
            "fault", "ports", "address already in use by nginx, process 7", "--grpc-port",
        ),
        (
            {"ports": (Port("grpc", ":1", "address already in use", "the gpuserve server", True),)},
            "warning", "ports", "by the gpuserve server", "stop that server",
        ),
        ({"config_problems": (ConfigProblem("no onnx", True),)}, "fault", "config", "no onnx", ""),
        ({"config_problems": (ConfigProblem("no onnx", False),)}, "warning", "config", "no onnx", ""),
    ],
)  # fmt: skip
def test_what_a_fact_means(changes: Any, level: str, topic: str, said: str, advice: str) -> None:
    facts = dataclasses.replace(WELL, **changes)
    ((its_level, its_topic, text, its_advice),) = bad(facts)
    assert (its_level, its_topic) == (level, topic)
    assert said in text
    assert advice in its_advice
    assert has_fault(doctor_findings(facts)) == (level == "fault")


def test_what_is_not_known_is_no_fault() -> None:
    unknown = dataclasses.replace(
        WELL, has_driver=False, gpus="no NVIDIA driver", shm_nbytes=None, available_nbytes=None,
        is_clock_synchronized=None, clock_source="", packages=(), config=None, open_files=(-1, -1),
    )  # fmt: skip
    assert bad(unknown) == []


def test_servers_of_others_are_told_apart() -> None:
    servers = (RunningServer(1000, "127.0.0.1:8000", 7), RunningServer(0, "0.0.0.0:9000", 0))
    said = [
        one.text
        for one in doctor_findings(dataclasses.replace(WELL, servers=servers))
        if one.topic == "servers"
    ]
    assert said == [
        "of this user: 127.0.0.1:8000 (process 7)",
        "of user 0: 0.0.0.0:9000, which only that user and root can operate",
    ]


def test_nothing_is_wider_than_the_terminal() -> None:
    ports = (Port("http", "0.0.0.0:8000", "address already in use", "a" * 20),)
    text = findings_as_text(
        doctor_findings(dataclasses.replace(WELL, ports=ports, is_clock_synchronized=False)), 60
    )
    assert max(map(len, text.splitlines())) <= 60
    assert text.endswith("\n1 fault, 1 warning\n")
    assert "\n                     → stop its owner" in text


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [("1.9", "1.26", True), ("2.0", "1.26", False), ("1.26.0", "1.26", False), ("dev", "1", True)],
)
def test_versions(version: str, least: str, older: bool) -> None:
    assert is_older(version, least) is older


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
    faults = {(one["topic"], one["text"]) for one in document["findings"] if one["level"] == "fault"}
    told = [text for topic, text in faults if topic == "ports"]
    assert len(told) == 1
    assert f"http, 0.0.0.0:{taken}: address already in use by " in told[0]
    assert any(topic == "config" and "has no attribute 'nothing'" in text for topic, text in faults)
