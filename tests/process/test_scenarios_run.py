"""The scenarios' deployments and load clients against a real server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.load import GrpcLoad, LoadFailed, missing
from benchmarks.peers import PeerCache
from benchmarks.scenarios.loads import Schedule, paced, periodic
from benchmarks.scenarios.scenario import (
    DeployedGpuServe,
    Effort,
    Executions,
    Site,
    SleepingModel,
    row,
)
from benchmarks.servers.server import RunningServer, ServerFailed

_BATCH_S = 0.02
_SLEEP, _ECHO = row("sleep"), row("echo")
_LOAD = GrpcLoad(_ECHO, 2, 4, requests=200)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    cache = PeerCache(tmp_path_factory.mktemp("bench"), Path("/usr/bin/python3"))
    site = Site(DeployedGpuServe, cache, Effort(1, 1.0, 1), lambda _line: None)
    with site.serving([SleepingModel("sleep", _BATCH_S, 2, 4), SleepingModel("echo", 0.0)]) as server:
        yield server


def test_every_request_of_a_schedule_has_a_latency(one: RunningServer) -> None:
    schedule = periodic(rate_hz=20.0, seconds=0.5, connections=3, seed=1)
    run = paced(one, _ECHO, _ECHO.check(one), schedule)
    assert len(run.latency_s) == len(run.late_s) == 30
    assert all(
        0 < late_s <= latency_s < math.inf
        for late_s, latency_s in zip(run.late_s, run.latency_s, strict=True)
    )
    assert run.took_s >= schedule.at_s[-1]


def test_a_latency_runs_from_the_time_at_which_the_request_was_due(one: RunningServer) -> None:
    answer = _SLEEP.check(one)
    # Nine at once: two instances take four rows each, so the ninth waits for a second batch.
    run = paced(one, _SLEEP, answer, Schedule((0.0,) * 9, (0,) * 9))
    assert min(run.latency_s) >= _BATCH_S
    assert max(run.latency_s) >= 2 * _BATCH_S


def test_the_server_counts_what_was_sent(one: RunningServer) -> None:
    answer, before = _SLEEP.check(one), Executions.read(one, "sleep")
    paced(one, _SLEEP, answer, Schedule((0.0,) * 8, (0,) * 8))
    done = Executions.read(one, "sleep").since(before)
    assert done.rows == 8
    assert done.compute_s >= done.batches * _BATCH_S


def test_a_wrong_answer_fails_the_run(one: RunningServer) -> None:
    with pytest.raises(LoadFailed, match="is not the right one of 3"):
        paced(one, _ECHO, b"no!", Schedule((0.0,), (0,)))


@pytest.mark.skipif(missing(_LOAD) is not None, reason="h2load is not on PATH")
def test_so_many_requests_are_answered_in_a_closed_loop(one: RunningServer) -> None:
    result = _LOAD.run(one, 0.0, _ECHO.check(one))
    assert result.answers == 200


@pytest.mark.thorough
def test_a_model_that_is_not_there_is_no_answer(one: RunningServer) -> None:
    with pytest.raises(ServerFailed, match="model nobody"):
        row("nobody").check(one)
