"""The example of a Triton model repository."""

from __future__ import annotations

import subprocess

import pytest
from serving import GPUSERVE, JSON_LOG, serving
from test_examples import CLIENT_TIMEOUT_S, EXAMPLES, run_client
from test_examples_calls import printed

pytestmark = pytest.mark.thorough

MODELS = str(EXAMPLES / "triton_repository" / "models")


def test_the_client_prints_what_the_readme_says() -> None:
    with serving(GPUSERVE, "serve", MODELS, *JSON_LOG) as server:
        assert run_client("triton_repository", server) == printed("triton_repository")


def test_the_repository_is_right() -> None:
    done = subprocess.run(
        [GPUSERVE, "check", MODELS], capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
