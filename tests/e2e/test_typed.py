"""Functions with types, served as their users do it and asked by tritonclient."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import write_config
from exploring import variants
from processes import finished
from serving import GPUSERVE, JSON_LOG, REPOSITORY, Addresses, serving
from test_examples import EXAMPLES, run_client
from test_examples_calls import printed
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

MODELS = REPOSITORY / "tests" / "models" / "typed.py"
HELLO = """\
from gpuserve.typed import Float32, batch

@batch(max_batch_size=64)
def double(x: Float32) -> Float32:
    return 2 * x
"""
WRONG = {"misnamed": {"outputs": [{"name": "y", "dtype": "float32", "shape": [-1]}]}}


def entries() -> Iterator[dict[str, Any]]:
    for name in (
        "classify",
        "moments",
        "negate",
        "count",
        "count_later",
        "scale",
        "misnamed",
        "Climb",
        "Halve",
    ):
        yield {"name": name, "callable": f"{MODELS}:{name}", **WRONG.get(name, {})}
    said_otherwise = [{"name": "x", "dtype": "float32", "shape": [3]}]
    yield {
        "name": "shifted",
        "callable": f"{MODELS}:Shifted",
        "kwargs": {"by": 10.0},
        "inputs": said_otherwise,
        "max_batch_size": 2,
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    config = write_config(tmp_path_factory.mktemp("server"), list(entries()), host="127.0.0.1")
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        yield addresses


@pytest.fixture(params=["http", "grpc"])
def client(server: Addresses, request: pytest.FixtureRequest) -> Iterator[Any]:
    module: Any = tritonclient.http if request.param == "http" else tritonclient.grpc
    with module.InferenceServerClient(server.http if request.param == "http" else server.grpc) as one:
        one.module = module
        yield one


def ask(client: Any, model: str, /, parameters: Any = None, **arrays: Any) -> dict[str, Any]:
    sent = []
    for name, array in arrays.items():
        one = client.module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        one.set_data_from_numpy(array)
        sent.append(one)
    answer = client.infer(model, sent, parameters=parameters)
    outputs = answer.get_response()
    names = outputs["outputs"] if isinstance(outputs, dict) else outputs.outputs
    named = [one["name"] if isinstance(one, dict) else one.name for one in names]
    return {name: answer.as_numpy(name) for name in named}


def metadata(server: Addresses, model: str) -> tuple[Any, Any, int]:
    with urllib.request.urlopen(f"http://{server.http}/v2/models/{model}") as answer:
        tensors = json.load(answer)
    with urllib.request.urlopen(f"http://{server.http}/v2/models/{model}/config") as answer:
        config = json.load(answer)
    plain = [
        [(one["name"], one["datatype"], one["shape"]) for one in tensors[key]]
        for key in ("inputs", "outputs")
    ]
    return plain[0], plain[1], config["max_batch_size"]


@pytest.mark.parametrize(
    ("model", "inputs", "outputs", "size"),
    [
        (
            "classify",
            [("image", "UINT8", [-1, 2, -1, 3]), ("bias", "FP32", [-1, 2])],
            [("scores", "FP32", [-1, 2]), ("label", "BYTES", [-1, 1])],
            8,
        ),
        ("moments", [("x", "FP32", [-1])], [("mean", "FP64", []), ("largest", "FP32", [1])], 0),
        ("negate", [("x", "INT32", [-1, -1, 2])], [("y", "INT32", [-1, -1, 2])], 64),
        ("count", [("n", "INT32", [1])], [("i", "INT32", [1])], 0),
        ("Climb", [("n", "INT32", [1])], [("value", "INT32", [1]), ("label", "BYTES", [1])], 0),
        ("Halve", [("x", "FP32", [1])], [("half", "FP32", [1])], 0),
        ("scale", [("x", "FP32", [-1, -1])], [("OUTPUT_1", "FP32", [-1, -1])], 16),
        ("shifted", [("x", "FP32", [-1, 3])], [("shifted", "FP32", [-1, -1])], 2),
    ],
)
def test_the_signature_is_the_models(
    server: Addresses, model: str, inputs: Any, outputs: Any, size: int
) -> None:
    assert metadata(server, model) == (inputs, outputs, size)


def test_optional_inputs_and_named_outputs(client: Any) -> None:
    image = np.zeros((1, 2, 4, 3), np.uint8)
    image[:, 0] = 8
    without = ask(client, "classify", image=image)
    assert (without["scores"].tolist(), without["label"].tolist()) == ([[8, 0]], [[b"top"]])
    biased = ask(client, "classify", image=image, bias=np.array([[0, 10]], np.float32))
    assert (biased["scores"].tolist(), biased["label"].tolist()) == ([[8, 10]], [[b"bottom"]])


def test_a_sample_has_no_batch_axis(client: Any) -> None:
    answer = ask(client, "moments", x=np.array([1, 2, 6], np.float32))
    assert (answer["mean"].shape, float(answer["mean"]), answer["largest"].tolist()) == ((), 3, [6])


def test_async_functions(client: Any) -> None:
    x = np.arange(4, dtype=np.int32).reshape(1, 2, 2)
    assert ask(client, "negate", x=x)["y"].tolist() == (-x).tolist()


@pytest.mark.parametrize("model", ["count", "count_later"])
def test_generators_are_streams(server: Addresses, model: str) -> None:
    url = f"http://{server.http}/v2/models/{model}/generate_stream"
    request = urllib.request.Request(url, json.dumps({"n": 3}).encode())
    with urllib.request.urlopen(request) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: ")]
    assert [one["i"] for one in events] == [0, 1, 2]


@pytest.mark.parametrize(
    ("model", "body", "key", "values"),
    [
        ("Climb", {"n": 3, "step": 2, "start": 5}, "label", ["5", "7", "9"]),
        ("Halve", {"x": 8.0}, "half", [4.0, 2.0]),
    ],
)
def test_stepped_callables(server: Addresses, model: str, body: Any, key: str, values: Any) -> None:
    url = f"http://{server.http}/v2/models/{model}/generate_stream"
    with urllib.request.urlopen(url, json.dumps(body).encode()) as answer:
        lines = [json.loads(line[6:]) for line in answer.read().decode().splitlines() if line]
    assert [one[key] for one in lines if key in one] == values


def test_parameters_of_the_request(client: Any) -> None:
    x = np.array([[1, 2]], np.float32)
    assert ask(client, "scale", {"factor": 3}, x=x)["OUTPUT_1"].tolist() == [[3, 6]]
    minus = ask(client, "scale", {"factor": 2, "text": "minus"}, x=x)
    assert minus["OUTPUT_1"].tolist() == [[-2, -4]]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"factor": "3"}, "parameter 'factor' of the request must be a float, given the str '3'"),
        (None, "parameter 'factor' of the request is missing: expected a float"),
        ({"factor": 1, "rows": 1}, "parameter 'rows' of the request must be a bool, given the int 1"),
    ],
)
def test_a_wrong_parameter_is_the_clients_mistake(client: Any, parameters: Any, text: str) -> None:
    with pytest.raises(InferenceServerException) as refused:
        ask(client, "scale", parameters, x=np.ones((1, 2), np.float32))
    assert text in str(refused.value)
    assert refused.value.status() in {"400", "StatusCode.INVALID_ARGUMENT"}


def test_what_a_config_says_wins(client: Any) -> None:
    assert ask(client, "shifted", x=np.zeros((1, 3), np.float32))["shifted"].tolist() == [[10, 10, 10]]
    with pytest.raises(InferenceServerException, match=r"\[-1,3\]"):
        ask(client, "shifted", x=np.zeros((1, 2), np.float32))


def test_an_output_of_another_name_is_an_error(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="Output 'z' is not declared; model 'misnamed' decl"):
        ask(client, "misnamed", x=np.zeros((1, 2), np.float32))


def test_the_example_prints_what_its_readme_says() -> None:
    command = (GPUSERVE, "serve", str(EXAMPLES / "typed" / "summary.py"), "--host", "127.0.0.1")
    with serving(*command, *JSON_LOG) as server:
        assert run_client("typed", server) == printed("typed")


# ---- gpuserve serve model.py --------------------------------------------------------------------


def test_a_file_with_one_callable_needs_no_name(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(HELLO)
    with serving(GPUSERVE, "serve", str(tmp_path / "model.py"), "--host", "127.0.0.1", *JSON_LOG) as server:
        assert metadata(server, "double") == ([("x", "FP32", [-1, -1])], [("OUTPUT_1", "FP32", [-1, -1])], 64)
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            one = tritonclient.grpc.InferInput("x", [2, 2], "FP32")
            one.set_data_from_numpy(np.array([[1, 2], [3, 4]], np.float32))
            answer = client.infer("double", [one])
    assert answer.as_numpy("OUTPUT_1").tolist() == [[2, 4], [6, 8]]


SEVERAL = HELLO + "\n@batch\ndef halve(x: Float32) -> Float32:\n    return x / 2\n"
UNDECORATED = HELLO.replace("@batch(max_batch_size=64)\n", "")
COMPLAINTS = {
    "several": (
        SEVERAL,
        "{}: there are several callables, 'double' and 'halve': name the one to serve, as {}:double\n",
    ),
    "none": ("x = 1\n", "{}: there is no public callable"),
    "undecorated": (UNDECORATED, "double has types of tensors, but not how it is called: put @batch over it"),
    "shape": (
        HELLO.replace("(x: Float32)", "(x: list[float])"),
        "its inputs are not known: give the callable",
    ),
}


@pytest.mark.parametrize("which", variants(*COMPLAINTS))
def test_what_cannot_be_served_is_told_in_a_sentence(tmp_path: Path, which: str) -> None:
    program, text = COMPLAINTS[which]
    (tmp_path / "model.py").write_text(program)
    done = finished([GPUSERVE, "check", "model.py"], cwd=tmp_path)
    assert done.returncode == 4, done.stdout
    assert text.replace("{}", "model.py") in done.stderr
    assert "Traceback" not in done.stderr


# ---- what type checkers say ----------------------------------------------------------------------


PROGRAM = """\
from collections.abc import Iterator
from typing import Annotated, NamedTuple, TypedDict

import numpy as np

from gpuserve import Server
from gpuserve.decorators import first_value
from gpuserve.typed import BFloat16, Bytes, Float32, Int32, Name, Parameter, Shape, batch, sample

Image = Annotated[Float32, Shape(3, 224, 224)]


class Scores(NamedTuple):
    scores: Annotated[Float32, Shape(1000)]
    label: Bytes


class Moments(TypedDict):
    mean: Float32


@batch
def double(x: Float32) -> Float32:
    return 2 * x


@batch(max_batch_size=64)
def classify(image: Image, top: Annotated[Int32, Shape(1)] | None = None, *, k: Parameter[int] = 5) -> Scores:
    flat = image.reshape(len(image), -1)
    return Scores(flat[:, : 1000 - k], np.array([[b"cat"]] * len(flat), object))


@sample
def count(n: Annotated[Int32, Shape(1)]) -> Iterator[Annotated[Int32, Name("i")]]:
    for i in range(int(n[0])):
        yield np.array([i], np.int32)


class Model:
    @batch(max_batch_size=8)
    @first_value("k")
    async def __call__(self, x: Float32, k: Int32) -> Moments:
        return {"mean": x * x}


def halved(x: BFloat16) -> BFloat16:
    return x / 2


scores = classify(np.zeros((1, 3, 224, 224), np.float32), k=3).scores
doubled: Float32 = double(scores)
double("text")  # wrong
classify(scores, k="many")  # wrong
double(x=scores).no_such_attribute  # wrong
batch(max_batch_size="many")  # wrong

with Server(http_port=None) as server:
    server.bind("double", double)
    server.bind("model", Model())
"""


@pytest.mark.thorough
def test_mypy_takes_the_program_and_knows_its_signatures(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path}/cache"]
    done = finished(
        [sys.executable, "-m", "mypy", *options, "program.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(REPOSITORY), "PATH": "/usr/bin"},
    )
    found = [int(one) for one in re.findall(r"program\.py:(\d+): error", done.stdout)]
    lines = enumerate(PROGRAM.splitlines(), start=1)
    assert found == [n for n, line in lines if "# wrong" in line], done.stdout
