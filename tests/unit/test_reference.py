"""What the documentation says of config keys, exit codes, metrics, status codes, names and PyTriton is so."""

from __future__ import annotations

import asyncio
import importlib
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


def test_the_settings_that_can_change_exit_codes_and_statuses_are_documented() -> None:
    _, _, section = PAGE.partition("#### Settings that can change\n")
    rows = [line.split("|")[1] for line in section.partition("###")[0].splitlines() if line.startswith("| `")]
    assert sorted(key for row in rows for key in row.split("`")[1::2]) == sorted(live_settings())
    rows = [f"| {code.value} | {http} | {grpc} |" for code, (http, grpc) in STATUS.items()]
    assert [row for row in (*rows, *(f"| {code.value} | " for code in ExitCode)) if row not in PAGE] == []


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


def test_every_metric_is_documented() -> None:
    names = ("queue_requests", "running_requests", "saturation", "arena_bytes", "arena_blocks")
    metrics = ModelMetrics("m", "1", lambda: {f"gpuserve_{name}": 0.0 for name in names})
    text = asyncio.run(MetricsPage(lambda: [metrics], "0").page()).decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert [one for one in names if not one.endswith("_created") and f"`{one}" not in PAGE] == []


def test_every_event_is_described_with_its_facts() -> None:
    _, _, text = PAGE.partition("\n### Events of a running server\n")
    cells = [line.strip("| ").split(" | ") for line in text.partition("\n#")[0].splitlines()]
    rows = [row for row in cells if len(row) == 3 and row[0].startswith("`")]
    found = {kind.strip("`"): tuple(bare(facts).split(", ")) for kind, _, facts in rows}
    assert found == {kind.value: facts for kind, facts in FACTS.items()}


#: The start of a row's first cell, and the program in ``tests/programs`` that shows that it is true.
PROGRAMS = {
    "`pytriton.model_config.ModelConfig`": "configured.py",
    "`pytriton.decorators.batch`": "grouping.py",
    "`pytriton.client.ModelClient`": "clients.py",
    "`client.unload_model()`": "same.py",
    "Protected endpoints": "same.py",
    "State shared by two binds": "shared_state.py",
    "Coroutines and generators": "same.py",
    "Warm-ups": "same.py",
    "Metrics": "same.py",
    "`http_port`": "add_sub.py",
    "`http_header_forward_pattern`": "parameters.py",
}
CALLED = re.compile(r'(?:run|serving)\(\s*"(\w+\.py)"')


def test_each_row_that_says_the_same_has_a_program() -> None:
    page = (REPOSITORY / "docs" / "migration.md").read_text().partition("# Coming from Triton")[0]
    rows = [line.strip("| ") for line in page.splitlines() if line.startswith("|")]
    same = [row for row in rows if row.rpartition(" | ")[2].startswith("the same")]
    lacking = [row for row in same if not row.startswith(tuple(PROGRAMS))]
    assert not lacking, "write a program in tests/programs for each"
    assert [one for one in PROGRAMS if not any(row.startswith(one) for row in same)] == []
    tests = Path(REPOSITORY, "tests", "e2e", "test_pytriton_programs.py").read_text()
    assert set(PROGRAMS.values()) <= set(CALLED.findall(tests))
    for program in set(PROGRAMS.values()):
        text = (REPOSITORY / "tests" / "programs" / program).read_text()
        assert "gpuserve" not in text, f"{program} runs with PyTriton too"


# ---- names that docs/stability.md promises ----


#: The public names of the last version. One that goes is taken out here with its entry in the changelog, once
#: it was deprecated; new ones are added when a version is released.
RECORD = Path(__file__).parent / "data" / "public_names.txt"


def promised() -> list[str]:
    """The modules in the row of the page that names them."""
    page = (REPOSITORY / "docs" / "stability.md").read_text()
    (row,) = (line for line in page.splitlines() if "`__all__` of" in line)
    return re.findall(r"`(gpuserve[\w.]*)`", row)


def names_of(module: str) -> list[str]:
    return [f"{module}.{name}" for name in importlib.import_module(module).__all__]


def test_the_reference_shows_the_modules_that_are_promised() -> None:
    page = (REPOSITORY / "docs" / "api.md").read_text()
    shown = re.findall(r"made of the code: public names, ([\w.]+)", page)
    assert sorted(shown) == sorted(promised())


def test_no_public_name_goes_unsaid() -> None:
    recorded = RECORD.read_text().split()
    assert len(recorded) > 80
    gone = set(recorded) - {name for module in promised() for name in names_of(module)}
    assert gone == set(), "docs/stability.md says how a name goes"
