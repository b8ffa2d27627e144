"""The reference page names what there is: config keys, exit codes, metrics, status codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuserve.cli.exit_codes import ExitCode
from gpuserve.config.model_entry import ModelEntry
from gpuserve.config.server_entry import ServerEntry
from gpuserve.front.endpoint.status import STATUS
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.metrics_page import MetricsPage
from gpuserve.live_settings import LIVE

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference.md").read_text()


@pytest.mark.parametrize("key", [*ServerEntry.model_fields, *ModelEntry.model_fields])
def test_every_config_key_is_documented(key: str) -> None:
    assert f"| `{key}` |" in PAGE


def test_the_settings_that_can_change_are_documented() -> None:
    _, _, section = PAGE.partition("#### Settings that can change\n")
    rows = [line.split("|")[1] for line in section.partition("###")[0].splitlines() if line.startswith("| `")]
    assert sorted(key for row in rows for key in row.split("`")[1::2]) == sorted(LIVE)


def test_every_exit_code_is_documented() -> None:
    assert all(f"| {code.value} | " in PAGE for code in ExitCode)


def test_every_status_is_documented() -> None:
    rows = [f"| {code.value} | {http} | {grpc} |" for code, (http, grpc) in STATUS.items()]
    assert [row for row in rows if row not in PAGE] == []


def test_every_metric_is_documented() -> None:
    gauges = dict.fromkeys(
        (
            "gpuserve_queue_requests",
            "gpuserve_running_requests",
            "gpuserve_saturation",
            "gpuserve_arena_bytes",
            "gpuserve_arena_blocks",
        ),
        0.0,
    )
    metrics = ModelMetrics("m", "1", lambda: gauges)
    text = MetricsPage(lambda: [metrics], "0").render().decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    documented = {name for name in names if f"`{name.removesuffix('_created')}" in PAGE}
    assert names - documented - {name for name in names if name.endswith("_created")} == set()
