"""Each row of "Coming from PyTriton" that says "the same" has a program that runs with PyTriton too."""

from __future__ import annotations

import re
from pathlib import Path

from serving import REPOSITORY

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
