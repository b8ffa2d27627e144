"""What a worker process sets for its own start, and that user code finds all as it would be without."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

#: As the process begins; without descriptors it ends with a usage error, after all is imported.
PROGRAM = """
import gc, json, os, sys
usual, before = gc.get_threshold(), list(sys.path)
sys.argv = ["gpuserve_worker"]
from gpuserve_worker.__main__ import main
status = main()
same = gc.isenabled() and gc.get_threshold() == usual and sys.path == before
print(json.dumps([status, same, gc.get_freeze_count() > 0, os.environ["OPENBLAS_THREAD_TIMEOUT"]]))
"""


@pytest.mark.parametrize(("given", "expected"), [({}, "20"), ({"OPENBLAS_THREAD_TIMEOUT": "26"}, "26")])
def test_a_worker_starts_without_spinning_and_the_collector_is_as_ever_for_user_code(
    given: dict[str, str], expected: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_THREAD_TIMEOUT"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**environment, **given},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == [2, True, True, expected]
