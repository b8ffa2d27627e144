"""The examples of inputs that a request may leave out, and of requests that differ from each other."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from serving import GPUSERVE, serving
from test_examples import CLIENT_TIMEOUT_S, EXAMPLES, post, run_client, serve
from test_examples_calls import printed

pytestmark = pytest.mark.thorough

ASK_BY_HAND = """
import json, sys
import numpy as np
from colours import nearest

count = np.array([[2]], np.int32)
grey = {"light": np.array([[140]], np.float32), "count": count}
teal = {"name": np.array([[b"teal"]], object), "count": count}
answers = nearest([grey, teal, grey])
print(json.dumps([[name.decode() for name in answer["names"][0]] for answer in answers]))
"""


@pytest.mark.parametrize("example", ["optional_inputs", "grouping"])
def test_the_client_prints_what_the_readme_says(example: str) -> None:
    with serving(*serve(example)) as server:
        assert run_client(example, server) == printed(example)


@pytest.mark.parametrize("example", ["optional_inputs", "grouping"])
def test_the_config_is_right(example: str) -> None:
    command = [GPUSERVE, "check", str(EXAMPLES / example / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


def tensor(name: str, datatype: str, rows: list[list[Any]]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(np.shape(rows)), "data": rows}


@pytest.mark.thorough
def test_images_of_one_request_may_want_different_numbers() -> None:
    inputs = [
        tensor("image", "UINT8", [[[0, 100, 200]], [[0, 100, 200]]]),
        tensor("cut_percent", "FP32", [[0], [0]]),
        tensor("gamma", "FP32", [[1], [2]]),
    ]
    with serving(*serve("optional_inputs")) as server:
        url = f"http://{server.http}/v2/models/contrast/infer"
        (image,) = post(url, json.dumps({"inputs": inputs}))["outputs"]
    assert image["data"] == [0, 128, 255, 0, 64, 255]


@pytest.mark.thorough
def test_a_cut_of_any_size_is_an_image_and_no_error() -> None:
    inputs = [
        tensor("image", "UINT8", [[[0, 100, 200]]] * 3),
        tensor("cut_percent", "FP32", [[-5], [200], [0]]),
    ]
    with serving(*serve("optional_inputs")) as server:
        url = f"http://{server.http}/v2/models/contrast/infer"
        (image,) = post(url, json.dumps({"inputs": inputs}))["outputs"]
    assert image["data"] == [0, 128, 255, 0, 0, 255, 0, 128, 255]


@pytest.mark.thorough
def test_rows_of_one_request_may_want_different_counts() -> None:
    inputs = [
        tensor("name", "BYTES", [["pink"], ["navy"], ["pink"]]),
        tensor("count", "INT32", [[1], [2], [0]]),
    ]
    with serving(*serve("grouping")) as server:
        url = f"http://{server.http}/v2/models/nearest_colours/infer"
        answer = post(url, json.dumps({"inputs": inputs, "outputs": [{"name": "names"}]}))
    (names,) = answer["outputs"]
    assert names["shape"] == [3, 2]
    assert names["data"] == ["pink", "", "navy", "blue", "", ""]


def test_requests_with_other_inputs_are_grouped_by_hand() -> None:
    command = [sys.executable, "-c", ASK_BY_HAND]
    done = subprocess.run(
        command,
        cwd=EXAMPLES / "grouping",
        capture_output=True,
        text=True,
        timeout=CLIENT_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["grey", "silver"], ["teal", "grey"], ["grey", "silver"]]
