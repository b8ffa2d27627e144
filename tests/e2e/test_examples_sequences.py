"""The example of sequences."""

from __future__ import annotations

import json
import subprocess

import pytest
from serving import GPUSERVE, serving
from test_examples import CLIENT_TIMEOUT_S, EXAMPLES, run_client, serve
from test_examples_calls import curl, printed

pytestmark = pytest.mark.thorough


def test_the_client_prints_what_the_readme_says() -> None:
    with serving(*serve("sequences")) as server:
        assert run_client("sequences", server) == printed("sequences")
        answer = json.loads(curl("sequences", server))
    outputs = {one["name"]: one["data"] for one in answer["outputs"]}
    assert outputs == {"mean": [20.5], "count": [1]}


def test_the_config_is_right() -> None:
    command = [GPUSERVE, "check", str(EXAMPLES / "sequences" / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
