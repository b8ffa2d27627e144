"""Implicit state of a config.pbtxt: tensors that a model file returns and receives with the next request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models
import pytest
import tritonclient.grpc as grpcclient
from onnx import TensorProto, helper
from optional_packages import needs
from python_backend import TIMEOUT_S
from serving import GPUSERVE, JSON_LOG, Addresses, serving
from tritonclient.utils import InferenceServerException

INT32 = TensorProto.INT32
ROWS, ONE = ("N", 1), (1,)
START = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }'
READY = 'control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }'
ZERO = 'initial_state { name: "zero" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true }'
FILE = 'initial_state { name: "file" data_type: TYPE_INT32 dims: [ 1 ] data_file: "hundred" }'
SAME = "use_same_buffer_for_input_output: true"


def total(shape: Sequence[Any] = ROWS, *, ready: bool = False, starts: bool = False) -> bytes:
    """Return a model whose output and new state are the sum of the input and the state."""
    inputs = [(name, INT32, shape) for name in ("INPUT", "INPUT_STATE")]
    outputs = [(name, INT32, shape) for name in ("OUTPUT", "OUTPUT_STATE")]
    nodes = [helper.make_node("Add", ["INPUT", "before"], ["sum"])]
    before = helper.make_node("Identity", ["INPUT_STATE"], ["before"])
    weights = {}
    if starts:  # the state is used unless this is the first request, as in Triton's example
        inputs.append(("START", INT32, shape))
        weights = {"one": np.array(1, np.int32)}
        nodes.insert(0, helper.make_node("Sub", ["one", "START"], ["continues"]))
        before = helper.make_node("Mul", ["INPUT_STATE", "continues"], ["before"])
    if ready:
        inputs.append(("READY", INT32, shape))
        nodes.append(helper.make_node("Mul", ["sum", "READY"], ["OUTPUT"]))
    else:
        nodes.append(helper.make_node("Identity", ["sum"], ["OUTPUT"]))
    nodes.append(helper.make_node("Identity", ["sum"], ["OUTPUT_STATE"]))
    nodes.insert(len(nodes) - 3, before)
    return onnx_models.model(nodes, inputs, outputs, weights)


def history() -> bytes:
    """Return a model whose state grows by the input, and whose output is the state."""
    free = ("N", "W")
    nodes = [
        helper.make_node("Concat", ["INPUT_STATE", "INPUT"], ["OUTPUT_STATE"], axis=1),
        helper.make_node("Identity", ["OUTPUT_STATE"], ["OUTPUT"]),
    ]
    inputs = [("INPUT", INT32, ROWS), ("INPUT_STATE", INT32, free)]
    return onnx_models.model(nodes, inputs, [("OUTPUT", INT32, free), ("OUTPUT_STATE", INT32, ("N", "V"))])


def last_text() -> bytes:
    """Return a model whose output is the input of the request before."""
    text = TensorProto.STRING
    nodes = [
        helper.make_node("Identity", ["INPUT_STATE"], ["OUTPUT"]),
        helper.make_node("Identity", ["INPUT"], ["OUTPUT_STATE"]),
    ]
    inputs, outputs = ("INPUT", "INPUT_STATE"), ("OUTPUT", "OUTPUT_STATE")
    return onnx_models.model(
        nodes, [(one, text, ROWS) for one in inputs], [(one, text, ROWS) for one in outputs]
    )


def config(
    rows: int, state: str, *more: str, datatype: str = "INT32", dims: str = "1", asked: bool = False
) -> str:
    outputs = ["OUTPUT", "OUTPUT_STATE"] if asked else ["OUTPUT"]
    listed = ", ".join(
        f'{{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims} ] }}' for name in outputs
    )
    return f"""backend: "onnxruntime" max_batch_size: {rows}
input {{ name: "INPUT" data_type: TYPE_{datatype} dims: [ 1 ] }}
output [ {listed} ]
sequence_batching {{
  {" ".join(more)}
  state {{ input_name: "INPUT_STATE" output_name: "OUTPUT_STATE" data_type: TYPE_{datatype} dims: [ {dims} ]
    {state} }}
}}"""


DELAYED = "oldest { max_candidate_sequences: 4 max_queue_delay_microseconds: 100000 preferred_batch_size: 2 }"
MODELS = {
    "zero": (total(), config(4, ZERO)),
    "file": (total(), config(4, f"{FILE} {SAME}")),
    "uninitialized": (total(starts=True), config(4, "", START)),
    "asked": (total(), config(4, f"{ZERO} {SAME}", asked=True)),
    "single": (total(ONE), config(0, ZERO)),
    "ready": (total(ready=True), config(4, ZERO, READY)),
    "oldest": (total(), config(4, ZERO, DELAYED)),
    "history": (history(), config(4, "", DELAYED, dims="-1")),
    "text": (last_text(), config(4, "", datatype="STRING")),
    "declared": (
        total(starts=True),
        config(4, ZERO, START).replace("\ninput", "\n#").replace("\noutput", "\n#"),
    ),
    "short": (total(), config(4, FILE.replace("hundred", "short"))),
    "wrong": (total(), config(4, "").replace("INPUT_STATE", "OTHER_STATE")),
}


def write(folder: Path) -> None:
    for name, (file, text) in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.onnx").write_bytes(file)
        (folder / name / "config.pbtxt").write_text(text)
        (folder / name / "initial_state").mkdir()
        (folder / name / "initial_state" / "hundred").write_bytes(np.array([100], np.int32).tobytes())
        (folder / name / "initial_state" / "short").write_bytes(b"12")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    folder = tmp_path_factory.mktemp("repository")
    write(folder)
    with serving(
        GPUSERVE, "serve", str(folder), "--host", "127.0.0.1", "--model-control", "explicit", *JSON_LOG
    ) as addresses:
        yield addresses


@pytest.fixture
def client(server: Addresses) -> Iterator[Any]:
    with grpcclient.InferenceServerClient(server.grpc) as made:
        yield made


def send(
    client: Any, model: str, value: Any, sequence: int, *, start: bool = False, end: bool = False
) -> dict[str, Any]:
    """Return the outputs of a request by name."""
    array = np.array([[value]] if model != "single" else [value], object if model == "text" else np.int32)
    given = grpcclient.InferInput("INPUT", array.shape, "BYTES" if model == "text" else "INT32")
    given.set_data_from_numpy(array)
    result = client.infer(
        model, [given], sequence_id=sequence, sequence_start=start, sequence_end=end, timeout=None,
        client_timeout=TIMEOUT_S,
    )  # fmt: skip
    return {one.name: result.as_numpy(one.name).ravel().tolist() for one in result.get_response().outputs}


def sums(client: Any, model: str, sequence: int, values: Sequence[Any]) -> list[Any]:
    last = len(values) - 1
    return [
        send(client, model, value, sequence, start=at == 0, end=at == last)["OUTPUT"][0]
        for at, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("model", "first"),
    [("zero", 0), ("file", 100), ("uninitialized", 0), ("asked", 0), ("single", 0), ("ready", 0)],
)
def test_a_state_is_given_to_the_next_request(client: Any, model: str, first: int) -> None:
    for sequence in (1, 1, 2):  # each begins anew
        assert sums(client, model, sequence, [1, 2, 3]) == [first + 1, first + 3, first + 6]


def test_a_start_flag_begins_anew(client: Any) -> None:
    assert send(client, "file", 1, 5, start=True)["OUTPUT"] == [101]
    assert send(client, "file", 2, 5)["OUTPUT"] == [103]
    assert send(client, "file", 1, 5, start=True)["OUTPUT"] == [101]
    assert send(client, "file", 2, 5, end=True)["OUTPUT"] == [103]


def test_a_client_receives_the_state_if_the_configuration_lists_it(client: Any) -> None:
    assert send(client, "zero", 4, 6, start=True, end=True) == {"OUTPUT": [4]}
    assert send(client, "asked", 4, 6, start=True) == {"OUTPUT": [4], "OUTPUT_STATE": [4]}
    assert send(client, "asked", 5, 6, end=True) == {"OUTPUT": [9], "OUTPUT_STATE": [9]}


def test_an_initial_text_is_empty(client: Any) -> None:
    assert sums(client, "text", 1, [b"one", "zwei €".encode(), b"three"]) == [b"", b"one", "zwei €".encode()]


@pytest.mark.parametrize("model", ["ready", "oldest"])
def test_each_sequence_of_a_batch_has_its_state(server: Addresses, model: str) -> None:
    def run(sequence: int) -> list[Any]:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            return sums(client, model, sequence, [sequence] * 9)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(1, 9)))
    assert found == [[sequence * count for count in range(1, 10)] for sequence in range(1, 9)]


def test_states_of_other_shapes_run_one_after_the_other(server: Addresses) -> None:
    def run(sequence: int) -> list[Any]:
        last = sequence + 2
        with grpcclient.InferenceServerClient(server.grpc) as client:
            for at in range(last + 1):
                found = send(client, "history", at, sequence, start=at == 0, end=at == last)["OUTPUT"]
        return found

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(1, 5)))
    # the size of a free axis is 1 in the first state
    assert found == [[0, *range(sequence + 3)] for sequence in range(1, 5)]


def test_a_file_declares_its_tensors_without_those_of_the_server(client: Any) -> None:
    config = client.get_model_config("declared").config
    assert [one.name for one in (*config.input, *config.output)] == ["INPUT", "OUTPUT"]
    assert config.sequence_batching.state[0].initial_state[0].zero_data
    assert sums(client, "declared", 1, [1, 2]) == [1, 3]


@pytest.mark.parametrize(
    ("model", "reason"),
    [("short", "must have 1 elements of INT32, but it has 2 bytes"), ("wrong", "an input 'OTHER_STATE'")],
)
def test_a_state_that_does_not_fit_its_file_is_refused(client: Any, model: str, reason: str) -> None:
    with pytest.raises(InferenceServerException, match=reason):
        client.load_model(model)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@needs("torch")
@pytest.mark.parametrize("file", ["model.pt", "model.pt2"])
def test_a_torch_file_has_state(tmp_path: Path, file: str) -> None:
    import torch

    class Total(torch.nn.Module):
        def forward(self, value: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return value + state, value + state

    folder = tmp_path / "torch" / "1"
    folder.mkdir(parents=True)
    if file == "model.pt":
        torch.jit.script(Total()).save(folder / file)
    else:
        rows = torch.export.Dim("rows", max=4)
        example = tuple(torch.zeros(2, 1, dtype=torch.int32) for _ in range(2))
        program = torch.export.export(Total(), example, dynamic_shapes=[{0: rows}] * 2)
        torch.export.save(program, folder / file)
    text = config(4, ZERO, DELAYED).replace("onnxruntime", "pytorch")
    text += 'parameters { key: "TRUST" value { string_value: "true" } }'
    names = {"INPUT_STATE": "INPUT__1", '"INPUT"': '"INPUT__0"'}
    names |= {"OUTPUT_STATE": "OUTPUT__1", '"OUTPUT"': '"OUTPUT__0"'}
    for name, other in names.items():
        text = text.replace(name, other)
    (tmp_path / "torch" / "config.pbtxt").write_text(text)
    with (
        serving(GPUSERVE, "serve", str(tmp_path), "--host", "127.0.0.1", *JSON_LOG) as addresses,
        grpcclient.InferenceServerClient(addresses.grpc) as client,
    ):
        for sequence in (1, 2):
            found = []
            for at, value in enumerate([1, 2, 3]):
                given = grpcclient.InferInput("INPUT__0", [1, 1], "INT32")
                given.set_data_from_numpy(np.array([[value]], np.int32))
                result = client.infer(
                    "torch", [given], sequence_id=sequence, sequence_start=at == 0, sequence_end=at == 2
                )
                found.append(int(result.as_numpy("OUTPUT__0")[0, 0]))
            assert found == [1, 3, 6]
