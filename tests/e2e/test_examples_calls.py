"""The examples of callables and their requests: each does what its README says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from exploring import variants
from serving import GPUSERVE, Addresses, serving
from test_examples import CLIENT_TIMEOUT_S, EXAMPLES, run_client, serve

from gpuserve.client import DecoupledModelClient, ModelClient

#: How long the slow writer of the streaming example takes.
SECONDS_A_WORD = 0.02


def program(example: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / example / "serve.py")]


def printed(example: str, run: int = 0) -> list[str]:
    """What the README says that the client prints, at the first run that it shows or a later one."""
    readme = (EXAMPLES / example / "README.md").read_text()
    command = r"```console\n\$ (?:python|gpuserve run) examples/\S+client\.py[^\n]*\n(.*?)```"
    shown: list[str] = re.findall(command, readme, re.DOTALL)
    return shown[run].splitlines()


def curl(example: str, server: Addresses) -> str:
    """The answer to the curl command of the README."""
    readme = (EXAMPLES / example / "README.md").read_text()
    shown = re.search(r"^\$ (curl .*?)\n```", readme, re.DOTALL | re.MULTILINE)
    assert shown is not None
    command = shlex.split(shown[1].replace("localhost:8000", server.http))
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def stories() -> Iterator[Addresses]:
    """The server of the streaming example."""
    with serving(*serve("streaming")) as server:
        yield server


def test_a_story_is_the_same_word_by_word_at_once_and_over_http(stories: Addresses) -> None:
    told, *at_once, took = run_client("streaming", stories, "The", "SIGTERM", "--count", "8")
    assert len(told.split()) == 8
    assert told.strip() == at_once[0]
    assert len(at_once) == 2
    assert re.fullmatch(r"2 at once, 8 words each: \d+\.\d s", took)
    events = [line.removeprefix("data: ") for line in curl("streaming", stories).splitlines() if line]
    assert [json.loads(event)["word"] for event in events] == told.split()[:3]


def test_words_come_when_they_are_made(stories: Addresses) -> None:
    count = 20
    with DecoupledModelClient(f"grpc://{stories.grpc}", "slow_words") as client:
        inputs = np.array([b"The"], dtype=object), np.array([count], dtype=np.int32)
        arrivals_s = [time.monotonic() for _ in client.infer_sample(*inputs)]
    assert len(arrivals_s) == count
    assert arrivals_s[-1] - arrivals_s[0] > (count - 1) * SECONDS_A_WORD / 2


def test_stories_are_told_at_the_same_time(stories: Addresses) -> None:
    prompts, count = [str(number) for number in range(16)], 20
    took = run_client("streaming", stories, *prompts, "--count", str(count))[-1]
    assert float(took.split()[-2]) < len(prompts) * count * SECONDS_A_WORD / 2


@pytest.mark.parametrize("model", ["words", "slow_words"])
def test_each_row_of_a_request_is_told_its_own_story(stories: Addresses, model: str) -> None:
    prompts = np.array([[b"The"], [b"SIGTERM"]], dtype=object)
    counts = np.array([[1], [3]], dtype=np.int32)
    with DecoupledModelClient(f"grpc://{stories.grpc}", model) as client:
        alone = [
            [response["word"][0] for response in client.infer_sample(prompt, count)]
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        together = [response["word"][:, 0].tolist() for response in client.infer_batch(prompts, counts)]
    assert [len(words) for words in alone] == [1, 3]
    assert [list(words) for words in zip(*together, strict=True)] == [[*alone[0], b"", b""], alone[1]]


def test_a_prompt_that_is_no_text_begins_a_story(stories: Addresses) -> None:
    inputs = np.array([b"\xff\xfe"], dtype=object), np.array([2], dtype=np.int32)
    with DecoupledModelClient(f"grpc://{stories.grpc}", "words") as client:
        assert len(list(client.infer_sample(*inputs))) == 2


@pytest.mark.parametrize(
    "example", variants("ensemble", "parameters_and_headers", "strings_and_bytes", "calls_between_models")
)
def test_a_client_prints_what_its_readme_says(example: str) -> None:
    arguments = ["ada"] if example == "parameters_and_headers" else []
    with serving(*serve(example)) as server:
        assert run_client(example, server, *arguments) == printed(example)


@pytest.mark.thorough
def test_images_come_and_go_through_shared_memory() -> None:
    with serving(*serve("shared_memory")) as server:
        right, faster = run_client("shared_memory", server)
    assert right == printed("shared_memory")[0]
    assert re.fullmatch(r"\d+\.\d times as fast as in messages", faster)
    assert float(faster.split()[0]) > 1.2


@pytest.mark.thorough
def test_every_instance_answers() -> None:
    with serving(*program("multi_instance"), "--instances", "2") as server:
        lines = run_client("multi_instance", server, "--requests", "40")
    shares = [re.fullmatch(r"instance (\d): (\d+) requests", line) for line in lines]
    assert [share and share[1] for share in shares] == ["0", "1"]
    assert sum(int(share[2]) for share in shares if share) == 40


@pytest.mark.thorough
def test_a_model_learns_while_it_is_asked() -> None:
    with serving(*program("multi_model")) as server:
        lines = run_client("multi_model", server)
        later = run_client("multi_model", server, "--lessons", "0")
    found = [re.fullmatch(r"lessons: (\d), right: (\d+) of 100", line) for line in lines + later]
    assert [line and line[1] for line in found] == [*"01234", "0"]
    right = [int(line[2]) for line in found if line]
    assert right[0] < 70 < right[1] < right[4]
    assert right[5] > 90  # what it learnt stays in the server


@pytest.mark.thorough
def test_a_header_over_http_reaches_the_model() -> None:
    with serving(*serve("parameters_and_headers")) as server:
        answer = json.loads(curl("parameters_and_headers", server))
    (output,) = answer["outputs"]
    assert output["data"] == ["Guten Tag, Ada (acme)"]
    assert answer["parameters"] == {"language": "de", "names": 1}


@pytest.mark.thorough
@pytest.mark.parametrize("protocol", variants("grpc", "http"))
def test_a_header_goes_before_a_parameter_of_its_name(protocol: str) -> None:
    name, claimed = np.array([b"ada"], dtype=object), {"x-tenant": "somebody"}
    with (
        serving(*serve("parameters_and_headers")) as server,
        ModelClient(f"{protocol}://{getattr(server, protocol)}", "greeting") as client,
    ):
        with_header = client.infer_sample(name, parameters=claimed, headers={"x-tenant": "acme"})
        without = client.infer_sample(name, parameters=claimed)
    assert with_header["greeting"].tolist() == [b"Hello, Ada (acme)"]
    assert without["greeting"].tolist() == [b"Hello, Ada (somebody)"]


@pytest.mark.thorough
def test_text_that_is_not_utf_8_does_not_fail_what_is_beside_it() -> None:
    texts = np.array([[b"one two"], [b"\xff"]], dtype=object)
    with (
        serving(*serve("strings_and_bytes")) as server,
        ModelClient(f"grpc://{server.grpc}", "describe") as client,
    ):
        summaries = client.infer_batch(texts)["summary"][:, 0].tolist()
    assert summaries[0] == b"2 words, first one"
    assert summaries[1] == "1 words, first \N{REPLACEMENT CHARACTER}".encode()


def test_the_index_has_every_example() -> None:
    linked = re.findall(r"^\| \[(\w+)\]\((\w+)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert all(name == folder for name, folder in linked)
    assert sorted(folder for _, folder in linked) == sorted(
        readme.parent.name for readme in EXAMPLES.glob("*/README.md")
    )


@pytest.mark.thorough
def test_the_examples_are_checked_as_their_users_would() -> None:
    checked = ("streaming", "parameters_and_headers", "strings_and_bytes", "ensemble")
    for example in (*checked, "calls_between_models", "shared_memory"):
        config = str(EXAMPLES / example / "config.yaml")
        done = subprocess.run([GPUSERVE, "check", config], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_forwarded_header_stands_over_a_key_of_the_body() -> None:
    with serving(*serve("parameters_and_headers")) as server:
        url = f"http://{server.http}/v2/models/greeting/generate"
        command = ["curl", "-s", url, "-H", "x-tenant: acme", "-d", '{"name": "ada", "x-tenant": "forged"}']
        done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=True)
    assert json.loads(done.stdout)["greeting"] == "Hello, Ada (acme)"
