"""Classes of an output in place of the output, as tritonclient asks for them, over both protocols."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from bound import free_server
from config_file import model, served, tensor
from serving import Addresses
from test_v2_inference import CLIENTS, by_json, url
from tritonclient.utils import InferenceServerException

from gpuserve import ModelConfig, Tensor
from gpuserve.decorators import batch

X = np.array([[0.5, 3, -1, 2.25], [9, 8, 7, 6]], np.float32)
TWO = [["3.000000:1:dog", "2.250000:3:fish"], ["9.000000:0:cat", "8.000000:1:dog"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """The same scores with labels of a file, with labels, and without any."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "labels.txt").write_text("cat\ndog\nbird\nfish\n")
    x, y = [tensor("x", "FP32", 4)], tensor("y", "FP32", 4)
    made = [
        model("by_file", "echo", x, [{**y, "label_filename": "labels.txt"}], 8),
        model("by_list", "echo", x, [{**y, "labels": ["cat", "dog"]}], 8),
        model("bare", "echo", x, [y], 8),
        model("half", "echo", [tensor("x", "FP16", 4)], [tensor("y", "FP16", 4)], 8),
        ensemble("over", "by_file", x, [y]),
        ensemble("over_ensemble", "over", x, [y]),
        ensemble("with_its_own", "by_file", x, [{**y, "labels": ["tom", "rex"]}]),
    ]
    options = {"grpc_response_compression": "low"}
    with served(folder, made, **options) as addresses:
        yield addresses


def ensemble(name: str, member: str, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    """One step, from x to y."""
    steps = [{"model": member, "inputs": {"x": "x"}, "outputs": {"y": "y"}}]
    entry = {"name": name, "inputs": inputs, "outputs": outputs, "max_batch_size": 8}
    return {**entry, "ensemble": {"steps": steps}}


def classes(server: Addresses, protocol: str, name: str, count: int, x: Any = X, **how: Any) -> Any:
    library = CLIENTS[protocol]
    given = library.InferInput("x", list(x.shape), "FP16" if x.dtype == np.float16 else "FP32")
    given.set_data_from_numpy(x)
    wanted = library.InferRequestedOutput("y", class_count=count, **how)
    with library.InferenceServerClient(url(server, protocol)) as client:
        found = client.infer(name, [given], outputs=[wanted]).as_numpy("y")
    return [[one.decode() if isinstance(one, bytes) else one for one in row] for row in found]


@pytest.mark.parametrize("protocol", CLIENTS)
def test_the_largest_with_their_labels(server: Addresses, protocol: str) -> None:
    assert classes(server, protocol, "by_file", 2) == TWO
    assert classes(server, protocol, "by_list", 2)[0] == ["3.000000:1:dog", "2.250000:3"]
    assert classes(server, protocol, "bare", 9)[1] == ["9.000000:0", "8.000000:1", "7.000000:2", "6.000000:3"]


@pytest.mark.parametrize("protocol", CLIENTS)
def test_an_ensemble_has_the_labels_of_its_steps(server: Addresses, protocol: str) -> None:
    assert classes(server, protocol, "over", 2) == TWO
    assert classes(server, protocol, "over_ensemble", 2) == TWO
    assert classes(server, protocol, "with_its_own", 1) == [["3.000000:1:rex"], ["9.000000:0:tom"]]


def test_as_json(server: Addresses) -> None:
    assert classes(server, "http", "by_file", 2, binary_data=False) == TWO
    body = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}],
        "outputs": [{"name": "y", "parameters": {"classification": 1}}],
    }
    _, answer = by_json(server, "by_file", body)
    assert b'"outputs":[{"name":"y","datatype":"BYTES","shape":[1,1],"data":["4.000000:3:fish"]}]' in answer


@pytest.mark.parametrize("name", ["by_file", "over"])
def test_in_a_stream(server: Addresses, name: str) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    given = tritonclient.grpc.InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(X)
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        wanted = tritonclient.grpc.InferRequestedOutput("y", class_count=2)
        client.async_stream_infer(name, [given], outputs=[wanted])
        result, error = answers.get(timeout=10)
        assert error is None
        assert [[one.decode() for one in row] for row in result.as_numpy("y")] == TWO
        client.stop_stream()


@pytest.mark.parametrize("protocol", CLIENTS)
def test_what_has_no_classes(server: Addresses, protocol: str) -> None:
    text = "class result not available for output due to unsupported type 'FP16'"
    with pytest.raises(InferenceServerException, match=text):
        classes(server, protocol, "half", 2, X.astype(np.float16))


def test_the_config_names_the_file(server: Addresses) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        told = [client.get_model_config(name).config.output[0].label_filename for name in ("by_file", "bare")]
    assert told == ["labels.txt", ""]


@pytest.mark.thorough
def test_labels_of_a_bound_model() -> None:
    @batch
    def echo(x: Any) -> dict[str, Any]:
        return {"y": x}

    with free_server() as server:
        server.bind(
            model_name="bound",
            infer_func=echo,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(4,))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(4,), labels=["cat", "dog"])],
            config=ModelConfig(max_batch_size=4),
        )
        server.run()
        found = classes(Addresses("", server.addresses["grpc"], ""), "grpc", "bound", 1)
    assert found == [["3.000000:1:dog"], ["9.000000:0:cat"]]
