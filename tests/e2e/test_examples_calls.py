"""The examples of callables and their requests: each does what its README says."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from serving import GPUSERVE, serving
from test_examples import CLIENT_TIMEOUT_S, EXAMPLES, run_client, serve


def program(example: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / example / "serve.py")]


def printed(example: str) -> list[str]:
    """What the README says that the client prints."""
    readme = (EXAMPLES / example / "README.md").read_text()
    shown = re.search(r"```console\n\$ python examples/\S+client\.py[^\n]*\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    return shown[1].splitlines()


def test_words_come_one_by_one_and_stories_at_once() -> None:
    with serving(*serve("streaming")) as server:
        lines = run_client("streaming", server, "The", "SIGTERM", "--count", "8")
        url = f"http://{server.http}/v2/models/words/generate_stream"
        curl = subprocess.run(
            ["curl", "-sN", url, "-d", '{"prompt": "The", "count": 3}'],
            capture_output=True,
            text=True,
            timeout=CLIENT_TIMEOUT_S,
            check=True,
        )
    told, *at_once, took = lines
    assert len(told.split()) == 8
    assert told.strip() == at_once[0]  # the same prompt, the same story
    assert len(at_once) == 2
    assert re.fullmatch(r"2 stories of 8 words at once: \d+\.\d s", took)
    events = [json.loads(line.removeprefix("data: ")) for line in curl.stdout.splitlines() if line]
    assert [event["word"] for event in events] == told.split()[:3]


@pytest.mark.parametrize("example", ["parameters_and_headers", "strings_and_bytes"])
def test_a_client_prints_what_its_readme_says(example: str) -> None:
    arguments = ["ada"] if example == "parameters_and_headers" else []
    with serving(*serve(example)) as server:
        assert run_client(example, server, *arguments) == printed(example)


def test_every_instance_answers() -> None:
    with serving(*program("multi_instance"), "--instances", "2") as server:
        lines = run_client("multi_instance", server, "--requests", "40")
    shares = [re.fullmatch(r"instance (\d): (\d+) requests", line) for line in lines]
    assert [share and share[1] for share in shares] == ["0", "1"]
    assert sum(int(share[2]) for share in shares if share) == 40


def test_a_model_learns_while_it_is_asked() -> None:
    with serving(*program("multi_model")) as server:
        lines = run_client("multi_model", server, "--lessons", "2")
    right = [int(line.split()[3]) for line in lines]
    assert lines[0].startswith("after 0 lessons: ")
    assert right[0] < 80
    assert right[2] > 90


def test_the_examples_are_checked_as_their_users_would() -> None:
    for example in ("streaming", "parameters_and_headers", "strings_and_bytes"):
        config = str(EXAMPLES / example / "config.yaml")
        done = subprocess.run([GPUSERVE, "check", config], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
