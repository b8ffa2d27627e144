"""Monitored ingress processes: choice for a connection, restarts, counts, and the limit of their number."""

from __future__ import annotations

import asyncio
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuserve import Server
from gpuserve.config.load import load_file
from gpuserve.config.problems import ConfigProblems
from gpuserve.config.settings.checks import compare_settings
from gpuserve.config.settings.server import GRPCIO, ServerSettings
from gpuserve.config.settings.values import (
    AUTO,
    DESCRIPTORS_PER_INGRESS,
    ingress_processes_problem,
    read_ingress_processes,
)
from gpuserve.core.errors import ConfigError
from gpuserve.devices.placement import n_processors
from gpuserve.front.ingress.channel_messages import IngressStatus
from gpuserve.front.ingress.ingress_process import STATUS_S, StatusReporter
from gpuserve.front.ingress.monitored_ingress import SILENT_S, IngressTally, RestartBackoff, choose_ingress
from gpuserve.front.net.admission import Admission, Limits, ingress_share
from gpuserve.front.net.server import IngressRow
from gpuserve.front.observability.metrics.prometheus import page
from gpuserve.front.process.listeners import connection_families

SAID = IngressStatus(0, 0, 0, 0, 0.0, 0, 0, {}, {}, {}, 0, 0, 0, 0, {})


@dataclass
class Candidate:
    n_open: int
    last_heard_at: float


def test_the_process_with_the_fewest_connections_that_is_not_silent_gets_the_next() -> None:
    candidates = [Candidate(2, 0.0), Candidate(1, 0.0), Candidate(1, 0.0)]
    assert choose_ingress(candidates, 1.0) is candidates[1]
    assert choose_ingress([], 1.0) is None
    silent, busy = Candidate(0, 0.0), Candidate(9, SILENT_S)
    assert choose_ingress([silent, busy], SILENT_S) is busy
    assert choose_ingress([silent, busy], 9 * SILENT_S) is silent, "all are silent"


def test_a_process_restarts_at_once_and_with_backoff_if_it_dies_young() -> None:
    patience = RestartBackoff()
    assert [patience.pause_s(0.5, came_up=False) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert patience.pause_s(60.0, came_up=True) == 0
    assert [patience.pause_s(0.5, came_up=True) for _ in range(3)] == [0.25, 0.25, 0.25]
    assert [patience.pause_s(0.5, came_up=False) for _ in range(2)] == [0.25, 1]


def test_counts_of_a_dead_process_are_kept_and_sent_to_the_next() -> None:
    tally = IngressTally()
    assert (tally.counts.n_requests, tally.counts.n_held, tally.counts.late) == (0, 0, {})
    tally.record(SAID._replace(n_requests=7, cpu_s=1.5, n_held=3, late={"idle": 2}, intake_refused=1))
    tally.end()
    tally.restarted(1)
    assert (tally.counts.n_requests, tally.counts.n_held, tally.counts.restarts) == (7, 0, 1)
    assert (tally.counts.late, tally.counts.cpu_s) == ({"idle": 2}, 1.5)
    told = tally.counted
    counts = {"refused": {}, "late": {"idle": 2}, "limited": {}, "intake_refused": 1, "reclaimed": {}}
    assert told == {"n_requests": 7, "cpu_s": 1.5, **counts}
    tally.record(SAID._replace(**told | {"n_requests": 8}))
    assert (tally.counts.n_requests, tally.counts.restarts) == (8, 1)


def test_a_process_unaware_of_the_notice_counts_all_its_connections() -> None:
    tally = IngressTally()
    assert tally.n_unaware(0, 5) == 0
    assert tally.n_unaware(1, 5) == 5
    tally.record(SAID._replace(notice=1, n_unaware=2))
    assert tally.n_unaware(1, 5) == 2
    assert tally.n_unaware(2, 5) == 5


def test_the_metrics_are_sums() -> None:
    admission = Admission(n_descriptors=1 << 16)
    admission.admit("10.0.0.1", 5)
    admission.late["idle"] = 1
    counts = IngressTally().counts._replace(
        n_requests=10, cpu_s=0.5, restarts=1, n_streams=2, unsent_nbytes=100, refused={"streams": 1}
    )
    rows = [IngressRow(n, 9, "UP", 4, counts._replace(late={"idle": 2, "head": n})) for n in range(2)]
    lines = set(page(connection_families(admission, rows)).decode().splitlines())
    assert lines >= {
        "gpuserve_connections 1",
        "gpuserve_streams 4",
        "gpuserve_connections_unsent_bytes 200",
        'gpuserve_connections_refused_total{reason="streams"} 2',
        'gpuserve_connections_late_total{reason="idle"} 5',
        'gpuserve_connections_late_total{reason="head"} 1',
        'gpuserve_door_connections{door="1"} 4',
        'gpuserve_door_requests_total{door="0"} 10',
        'gpuserve_door_cpu_seconds_total{door="0"} 0.5',
        'gpuserve_door_restarts_total{door="1"} 1',
    }
    assert b"gpuserve_door_" not in page(connection_families(admission))


@pytest.mark.thorough
async def test_the_state_of_a_drain_is_sent_when_it_changes() -> None:
    """Without a change the state is sent a few times a second."""
    looks = iter([3, 3, 2, 2, 2, 0])
    said: list[IngressStatus] = []
    loop = asyncio.get_running_loop()
    reports = StatusReporter(lambda: SAID._replace(notice=1, n_unaware=next(looks, 0)), said.append)
    began = loop.time()
    reports.report_now()
    async with asyncio.timeout(5):
        while not said or said[-1].n_unaware:  # noqa: ASYNC110 - no event announces the state
            await asyncio.sleep(0.001)
    took_s = loop.time() - began
    reports.close()
    assert took_s < STATUS_S
    assert [one.n_unaware for one in said] == [3, 2, 0]


def test_processes_share_the_limits_of_one() -> None:
    settings = ServerSettings(ingress_processes=3, max_unsent_nbytes=100, max_half_requests=10)
    part = ingress_share(settings)
    assert (part.max_unsent_nbytes, part.max_half_requests, part.max_streams) == (34, 4, 5462)
    assert part.max_connections == settings.max_connections
    admission = Admission(Limits(max_connections=100), n_descriptors=32, n_spare=0, n_processes=4)
    assert sum(admission.admit("10.0.0.1", 3) for _ in range(100)) == 75, "the part of one address"


# ---- the setting ----------------------------------------------------------------------------------


def configured(tmp_path: Path, **server: Any) -> ServerSettings:
    file = tmp_path / "config.yaml"
    model = "{name: m, callable: pkg.mod:f, inputs: [], outputs: [{name: y, dtype: FP32, shape: [1]}]}"
    keys = "".join(f"  {key}: {value}\n" for key, value in server.items())
    file.write_text(f"server:\n{keys}models: [{model}]\n")
    return load_file(str(file), {}).settings


def test_auto_is_a_part_of_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, expected in ((1, 1), (7, 1), (8, 2), (16, 4), (128, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=n: set(range(n)))
        assert read_ingress_processes(AUTO) == expected
        assert configured(tmp_path, ingress_processes="auto").ingress_processes == expected
        assert Server(ingress_processes=AUTO)._settings.ingress_processes == expected


@pytest.mark.parametrize(
    ("files", "processors"),
    [
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "max 100000\n"}, 16.0),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16.0),
        ({"cpu.max": "9900000 100000\n"}, 16.0),
        ({}, 16.0),
    ],
)
def test_a_container_has_the_processors_of_its_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], processors: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert n_processors(str(tmp_path)) == processors


@pytest.mark.parametrize("name", ["ingress_processes", "doors"])
def test_a_number_is_taken_as_it_is_also_by_the_former_name_of_the_key(tmp_path: Path, name: str) -> None:
    assert configured(tmp_path, **{name: 3}).ingress_processes == 3
    found = load_file(str(tmp_path / "config.yaml"), {f"GPUSERVE_SERVER__{name.upper()}": "2"})
    assert found.settings.ingress_processes == 2
    assert Server(**{name: 3}).settings.ingress_processes == 3
    with pytest.raises(
        ConfigProblems, match=rf"^[^ ]*config.yaml:\d+:\d+: server\.{name}: expected an integer"
    ):
        configured(tmp_path, **{name: -1})


def test_both_names_of_the_key_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="given by both of its names"):
        Server(doors=3, ingress_processes=3)
    with pytest.raises(ConfigProblems, match=r"'ingress_processes' is already given in line \d+ as 'doors'"):
        configured(tmp_path, doors=3, ingress_processes=3)


MANY = 1 << 24


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        (0, "at least 1"),
        (-2, "at least 1"),
        (1.5, "an integer"),
        ("many", "'auto'"),
        ("true", "an integer"),
        (MANY, f"each ingress process takes {DESCRIPTORS_PER_INGRESS}: expected at most .*, got {MANY}"),
    ],
)
def test_a_wrong_number_is_refused(tmp_path: Path, processes: Any, expected: str) -> None:
    with pytest.raises(ConfigProblems, match=expected):
        configured(tmp_path, ingress_processes=processes)
    given = True if processes == "true" else processes
    with pytest.raises(ConfigError, match=expected.replace("an integer", "integer")):
        Server(ingress_processes=given)


def test_grpcio_has_its_connections_in_the_front(tmp_path: Path) -> None:
    text = "ingress_processes: transport grpcio has none, expected 1, got 2"
    with pytest.raises(ConfigProblems, match=text):
        configured(tmp_path, ingress_processes=2, transport=GRPCIO)
    with pytest.raises(ConfigError, match=text):
        Server(ingress_processes=2, transport=GRPCIO)
    assert configured(tmp_path, ingress_processes=1, transport=GRPCIO).ingress_processes == 1


def test_there_may_be_as_many_as_there_are_descriptors_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 512))
    assert ingress_processes_problem(8, "native") is None
    assert ingress_processes_problem(9, "native") == (
        "ingress_processes: a process may have 512 open files (RLIMIT_NOFILE), of which each "
        "ingress process takes 64: expected at most 8, got 9"
    )


def test_they_cannot_change_while_the_server_runs() -> None:
    (refusal,) = compare_settings(ServerSettings(), ServerSettings(ingress_processes=2)).refused
    text = "cannot change while the server runs: 1 stays, the file says 2"
    assert refusal.text == f"server.ingress_processes: {text}"
