"""The reference page names what there is: config keys, exit codes, metrics, status codes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from gpuserve.cli.exit_codes import ExitCode
from gpuserve.config.schema import json_schema
from gpuserve.config.settings.server import ServerSettings, live_settings
from gpuserve.core.event_log import FACTS
from gpuserve.front.observability.metrics.metrics_page import MetricsPage
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.server_status import STATUS
from gpuserve.model.options import rows

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = "\n".join(page.read_text() for page in sorted((REPOSITORY / "docs" / "reference").glob("*.md")))
SECURITY = (REPOSITORY / "SECURITY.md").read_text()


#: Each section of the page with the mapping of a file that it describes.
SECTIONS = {
    "### `server`": "ServerEntry",
    "### `server.trace`": "TraceEntry",
    "### `server.log`": "LogOptionsEntry",
    "### `server.memory`": "MemoryBudgetEntry",
    "### `models[]`": "ModelEntry",
    "### `models[].ensemble.steps[]`": "StepEntry",
    "### `models[].instances[]`": "InstancesEntry",
    "### `models[].instances[].resources`": "ResourcesEntry",
    "### `models[].instances[].rate_limiter`": "RateLimiterEntry",
    "### `models[].inputs[]`": "InputEntry",
    "### `models[].outputs[]`": "OutputEntry",
    "### `models[].batching`": "BatchingEntry",
    "### `models[].sequence_batching`": "SequenceBatchingEntry",
    "### `models[].sequence_batching.controls[]`": "SequenceControlEntry",
    "### `models[].queue`": "QueueEntry",
    "### `models[].queue.policy`, `models[].queue.policies.<level>`": "PolicyEntry",
    "### `models[].warmup[]`": "WarmupEntry",
    "### `models[].warmup[].inputs.<name>`": "WarmupInputEntry",
}


def bare(cell: str) -> str:
    """A cell of a table without backticks and links."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "")


@pytest.mark.parametrize(("section", "entry"), SECTIONS.items())
def test_every_key_is_described_as_the_schema_describes_it(section: str, entry: str) -> None:
    """A row may say more after the schema's words."""
    _, _, text = PAGE.partition(f"\n{section}\n")
    cells = [line.split(" | ") for line in text.partition("\n#")[0].splitlines() if line.startswith("| `")]
    rows = {key.strip("| `"): (default, bare(words)) for key, _, default, words in cells}
    properties = json_schema()["$defs"][entry]["properties"]
    assert set(rows) == set(properties)
    for key, said in properties.items():
        default, words = rows[key]
        assert words.startswith(said["description"].rstrip(".")), f"expected: {said['description']}"
        if isinstance(said.get("default"), bool | int | float):
            assert default == f"`{json.dumps(said['default'])}`", key


def test_the_settings_that_can_change_are_documented() -> None:
    _, _, section = PAGE.partition("#### Settings that can change\n")
    rows = [line.split("|")[1] for line in section.partition("###")[0].splitlines() if line.startswith("| `")]
    assert sorted(key for row in rows for key in row.split("`")[1::2]) == sorted(live_settings())


def test_what_one_client_can_hold_is_told_by_keys_that_there_are() -> None:
    """In the reference, and in the advice for networks of strangers."""
    _, _, section = PAGE.partition("### What one client can hold\n")
    _, _, advice = SECURITY.partition("## On a hostile network\n")
    text = section.partition("\n#")[0] + advice
    named = set(re.findall(r"`((?:max|min|head|idle|body|allowed|tls|remote|shared)_\w+)`", text))
    assert len(named) > 10
    assert named - set(rows(ServerSettings)) == set()


def test_files_of_the_threat_model_are_there() -> None:
    _, _, boundaries = SECURITY.partition("## Trust boundaries\n")
    paths = re.findall(r"`([\w./-]+(?:/|\.py))`", boundaries.partition("\n### ")[0])
    places = (REPOSITORY, REPOSITORY / "gpuserve")
    assert len(paths) > 20
    assert [path for path in paths if not any((place / path).exists() for place in places)] == []


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
    text = asyncio.run(MetricsPage(lambda: [metrics], "0").page()).decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    documented = {name for name in names if f"`{name.removesuffix('_created')}" in PAGE}
    assert names - documented - {name for name in names if name.endswith("_created")} == set()


def test_every_event_is_described_with_its_facts() -> None:
    _, _, text = PAGE.partition("\n### Events of a running server\n")
    cells = [line.strip("| ").split(" | ") for line in text.partition("\n#")[0].splitlines()]
    found = {
        kind.strip("`"): facts
        for kind, _, facts in (row for row in cells if len(row) == 3 and row[0].startswith("`"))
    }
    assert {kind: tuple(bare(facts).split(", ")) for kind, facts in found.items()} == {
        kind.value: facts for kind, facts in FACTS.items()
    }
