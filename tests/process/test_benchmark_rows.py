"""Rows of the benchmarks on this server alone: one that cannot run is found here, not by whoever measures the
peers as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import gevent
import numpy as np
import pytest
from exploring import variants
from processes import children, wait_until

from benchmarks import load, processes
from benchmarks.gpu.running.section import Effort, Findings, SectionFailed, Site
from benchmarks.gpu.served.client import with_bytes
from benchmarks.gpu.served.load import Loaded, load_clients
from benchmarks.gpu.served.serving import Model, serving, tensor
from benchmarks.peers import PeerCache
from benchmarks.rounds import LoadedServer
from benchmarks.rows import ROWS, WITHOUT, Row
from benchmarks.servers import GpuServe
from benchmarks.servers.server import running

_REPOSITORY = Path(__file__).resolve().parent.parent.parent
_PLAIN = [row for row in ROWS if row.load.option is None]
_WITH_OPTION = [row for row in ROWS if row.load.option is not None]
#: Requests of 64 MiB are left to those who measure.
_TIMED = [row for row in _PLAIN if not row.least_s]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedServer]:
    # What tritonclient keeps as long as the process lives: for HTTP, and for shared memory.
    gevent.get_hub()
    resource_tracker.ensure_running()
    folder = tmp_path_factory.mktemp("bench")
    ours = GpuServe(PeerCache(folder))
    ours.prepare()
    with running(ours, folder) as one:
        yield LoadedServer(ours, {None: one})


@pytest.mark.parametrize("row", variants(*_TIMED), ids=lambda row: row.name)
def test_a_row_is_answered_right(server: LoadedServer, row: Row) -> None:
    assert server.can_run(row)
    server.check(row)


class Spinning(GpuServe):
    """Stands for a server that uses CPU time while nobody asks it."""

    spins = True


def states(pid: int) -> set[str]:
    """The states of a process and its descendants; T is stopped."""
    found = [Path(f"/proc/{one.pid}/stat").read_text() for one in processes.tree(pid)]
    return {text.rpartition(")")[2].split()[0] for text in found}


def test_a_server_that_spins_is_paused_except_while_it_is_measured(tmp_path: Path) -> None:
    spinning = Spinning(PeerCache(tmp_path))
    spinning.prepare()
    with running(spinning, tmp_path) as one:
        subject = LoadedServer(spinning, {None: one})
        wait_until(lambda: states(one.pid) == {"T"}, "it is paused", 10.0)
        subject.check(ROWS[0])
        wait_until(lambda: states(one.pid) == {"T"}, "it is paused again", 10.0)


def ran(rows: list[Row], folder: Path) -> set[tuple[str, str]]:
    """The rows, by name and server, of which the command has a value."""
    names = [row.name for row in rows if load.missing(row.load) is None]
    if not names:
        pytest.skip("neither h2load nor wrk is on PATH")
    report = folder / "report.json"
    command = ["--servers", "gpuserve", "--rows", ",".join(names), "--rounds", "1", "--seconds", "1"]
    command += ["--json", str(report), "--cache", str(folder)]
    subprocess.run([sys.executable, "-m", "benchmarks", *command], cwd=_REPOSITORY, check=True)
    found = json.loads(report.read_text())["rows"]
    assert sorted(found) == sorted(names)
    return {
        (name, one)
        for name, row in found.items()
        for one, column in row["servers"].items()
        if column["value"]
    }


@pytest.mark.thorough
def test_a_row_with_an_option_is_run_with_it_and_without_it(tmp_path: Path) -> None:
    found = ran(_WITH_OPTION, tmp_path)
    assert found == {(row.name, "gpuserve") for row in _WITH_OPTION} | {
        (row.name, WITHOUT) for row in _WITH_OPTION if row.has_baseline
    }


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_every_row_without_an_option_is_run(tmp_path: Path) -> None:
    found = {name for name, one in ran(_TIMED, tmp_path) if one == "gpuserve"}
    assert found == {row.name for row in _TIMED if load.missing(row.load) is None}


# ---- the load clients of the GPU check -----------------------------------------------------------


_SECONDS = 0.1


@pytest.mark.thorough
def test_clients_stay_up_from_one_load_to_the_next(tmp_path: Path) -> None:
    x, y = tensor("x", "float32", -1), tensor("y", "float32", -1)
    findings, site = Findings(tmp_path / "found.json"), Site(tmp_path, Effort.small(), stand_in=True)
    message = with_bytes("echo", {"x": np.ones(4, np.float32)})
    with (
        serving(site, "echo", [Model("echo", "device_models.py:Echo", [x], [y], device="cpu")]) as one,
        load_clients(findings, 2) as clients,
    ):
        first = clients.load(one, [message], _SECONDS, "one under way")
        before = children(_this_process())
        more = clients.load(one, [message] * 4, _SECONDS, "four under way")
        assert children(_this_process()) == before
        assert first.answers_per_s > 0
        assert 0 < more.median_latency_s < _SECONDS
        assert 0 < more.client_busy < 4
        unknown = with_bytes("nobody", {"x": np.ones(4, np.float32)})
        with pytest.raises(SectionFailed, match=r"the load failed: NOT_FOUND: .*nobody"):
            clients.load(one, [message, unknown], _SECONDS, "a model that is not there")


def _this_process() -> int:
    return int(Path("/proc/self").readlink().name)


@pytest.mark.parametrize(
    ("client", "machine", "limit"),
    [
        (0.5, 0.5, None),
        (0.9, 0.5, "a load client was busy for 90% of the time"),
        (0.5, 0.95, "the CPUs of the machine were busy for 95% of the time"),
    ],
)
def test_where_the_server_was_not_the_limit_is_said(client: float, machine: float, limit: str | None) -> None:
    assert Loaded(1.0, 1.0, client, machine).limit == limit
