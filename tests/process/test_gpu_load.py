"""The load clients of the GPU check, on a server without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from processes import children

from benchmarks.gpu.running.section import Effort, Findings, SectionFailed, Site
from benchmarks.gpu.served.client import with_bytes
from benchmarks.gpu.served.load import Loaded, load_clients
from benchmarks.gpu.served.serving import Model, serving, tensor

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
