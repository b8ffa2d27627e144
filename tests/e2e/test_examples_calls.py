"""The examples of callables and their requests: each does what its README says."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from exploring import variants
from processes import finished
from serving import GPUSERVE, Addresses, serving
from test_examples import EXAMPLES, post, run_client, serve

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
    done = finished(command, check=True)
    return done.stdout


class Example(NamedTuple):
    """An example whose server runs."""

    name: str
    server: Addresses

    def client(self, *arguments: str) -> list[str]:
        return run_client(self.name, self.server, *arguments)

    def outputs(self, model: str, *inputs: Any, **more: Any) -> Any:
        url = f"http://{self.server.http}/v2/models/{model}/infer"
        return post(url, json.dumps({"inputs": inputs, **more}))["outputs"]


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest) -> Iterator[Example]:
    with serving(*serve(request.param)) as server:
        yield Example(request.param, server)


def of(*names: str) -> Any:
    """The tests of these examples, for each of which one server is started."""
    return pytest.mark.parametrize("example", variants(*names), indirect=True)


def tensor(name: str, datatype: str, rows: list[list[Any]]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(np.shape(rows)), "data": rows}


@of("streaming")
def test_a_story_is_the_same_word_by_word_at_once_and_over_http(example: Example) -> None:
    told, *at_once, took = example.client("The", "SIGTERM", "--count", "8")
    assert len(told.split()) == 8
    assert told.strip() == at_once[0]
    assert len(at_once) == 2
    assert re.fullmatch(r"2 at once, 8 words each: \d+\.\d s", took)
    events = [line.removeprefix("data: ") for line in curl("streaming", example.server).splitlines() if line]
    assert [json.loads(event)["word"] for event in events] == told.split()[:3]


@of("streaming")
def test_words_come_when_they_are_made(example: Example) -> None:
    count = 20
    with DecoupledModelClient(f"grpc://{example.server.grpc}", "slow_words") as client:
        inputs = np.array([b"The"], dtype=object), np.array([count], dtype=np.int32)
        arrivals_s = [time.monotonic() for _ in client.infer_sample(*inputs)]
    assert len(arrivals_s) == count
    assert arrivals_s[-1] - arrivals_s[0] > (count - 1) * SECONDS_A_WORD / 2


@of("streaming")
def test_stories_are_told_at_the_same_time(example: Example) -> None:
    prompts, count = [str(number) for number in range(16)], 20
    took = example.client(*prompts, "--count", str(count))[-1]
    assert float(took.split()[-2]) < len(prompts) * count * SECONDS_A_WORD / 2


@of("streaming")
@pytest.mark.parametrize("model", ["words", "slow_words"])
def test_each_row_of_a_request_is_told_its_own_story(example: Example, model: str) -> None:
    prompts = np.array([[b"The"], [b"SIGTERM"]], dtype=object)
    counts = np.array([[1], [3]], dtype=np.int32)
    with DecoupledModelClient(f"grpc://{example.server.grpc}", model) as client:
        alone = [
            [response["word"][0] for response in client.infer_sample(prompt, count)]
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        together = [response["word"][:, 0].tolist() for response in client.infer_batch(prompts, counts)]
    assert [len(words) for words in alone] == [1, 3]
    assert [list(words) for words in zip(*together, strict=True)] == [[*alone[0], b"", b""], alone[1]]


@of("streaming")
def test_a_prompt_that_is_no_text_begins_a_story(example: Example) -> None:
    inputs = np.array([b"\xff\xfe"], dtype=object), np.array([2], dtype=np.int32)
    with DecoupledModelClient(f"grpc://{example.server.grpc}", "words") as client:
        assert len(list(client.infer_sample(*inputs))) == 2


@of(
    *("ensemble", "parameters_and_headers", "strings_and_bytes", "calls_between_models"),
    *("optional_inputs", "grouping", "sequences"),
)
def test_a_client_prints_what_its_readme_says(example: Example) -> None:
    arguments = ["ada"] if example.name == "parameters_and_headers" else []
    assert example.client(*arguments) == printed(example.name)


@pytest.mark.thorough
@of("shared_memory")
def test_images_come_and_go_through_shared_memory(example: Example) -> None:
    right, faster = example.client()
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
@of("sequences")
def test_a_sequence_by_curl(example: Example) -> None:
    outputs = {one["name"]: one["data"] for one in json.loads(curl("sequences", example.server))["outputs"]}
    assert outputs == {"mean": [20.5], "count": [1]}


@pytest.mark.thorough
@of("optional_inputs")
@pytest.mark.parametrize(
    ("image", "cut_percent", "more", "expected"),
    [
        ([[0, 100, 200]] * 2, [[0], [0]], [tensor("gamma", "FP32", [[1], [2]])], [0, 128, 255, 0, 64, 255]),
        ([[0, 100, 200]] * 3, [[-5], [200], [0]], [], [0, 128, 255, 0, 0, 255, 0, 128, 255]),
    ],
    ids=["different numbers", "cuts of any size"],
)
def test_images_of_one_request(
    example: Example, image: Any, cut_percent: Any, more: list[Any], expected: list[int]
) -> None:
    inputs = tensor("image", "UINT8", [[row] for row in image]), tensor("cut_percent", "FP32", cut_percent)
    (found,) = example.outputs("contrast", *inputs, *more)
    assert found["data"] == expected


@pytest.mark.thorough
@of("grouping")
def test_rows_of_one_request_may_want_different_counts(example: Example) -> None:
    inputs = (
        tensor("name", "BYTES", [["pink"], ["navy"], ["pink"]]),
        tensor("count", "INT32", [[1], [2], [0]]),
    )
    (names,) = example.outputs("nearest_colours", *inputs, outputs=[{"name": "names"}])
    assert names["shape"] == [3, 2]
    assert names["data"] == ["pink", "", "navy", "blue", "", ""]


@pytest.mark.thorough
@of("parameters_and_headers")
def test_a_header_over_http_reaches_the_model(example: Example) -> None:
    answer = json.loads(curl("parameters_and_headers", example.server))
    (output,) = answer["outputs"]
    assert output["data"] == ["Guten Tag, Ada (acme)"]
    assert answer["parameters"] == {"language": "de", "names": 1}


@pytest.mark.thorough
@of("parameters_and_headers")
@pytest.mark.parametrize("protocol", variants("grpc", "http"))
def test_a_header_goes_before_a_parameter_of_its_name(example: Example, protocol: str) -> None:
    name, claimed = np.array([b"ada"], dtype=object), {"x-tenant": "somebody"}
    with ModelClient(f"{protocol}://{getattr(example.server, protocol)}", "greeting") as client:
        with_header = client.infer_sample(name, parameters=claimed, headers={"x-tenant": "acme"})
        without = client.infer_sample(name, parameters=claimed)
    assert with_header["greeting"].tolist() == [b"Hello, Ada (acme)"]
    assert without["greeting"].tolist() == [b"Hello, Ada (somebody)"]


@pytest.mark.thorough
@of("strings_and_bytes")
def test_text_that_is_not_utf_8_does_not_fail_what_is_beside_it(example: Example) -> None:
    texts = np.array([[b"one two"], [b"\xff"]], dtype=object)
    with ModelClient(f"grpc://{example.server.grpc}", "describe") as client:
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
    checked = ["streaming", "parameters_and_headers", "strings_and_bytes", "ensemble", "shared_memory"]
    checked += ["calls_between_models", "optional_inputs", "grouping", "sequences"]
    paths = [EXAMPLES / name / "config.yaml" for name in checked]
    for path in (*paths, EXAMPLES / "triton_repository" / "models"):
        done = finished([GPUSERVE, "check", str(path)])
        assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@of("parameters_and_headers")
def test_a_forwarded_header_stands_over_a_key_of_the_body(example: Example) -> None:
    url = f"http://{example.server.http}/v2/models/greeting/generate"
    command = ["curl", "-s", url, "-H", "x-tenant: acme", "-d", '{"name": "ada", "x-tenant": "forged"}']
    done = finished(command, check=True)
    assert json.loads(done.stdout)["greeting"] == "Hello, Ada (acme)"
