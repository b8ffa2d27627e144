"""Models without a server, as ``gpuserve.testing`` calls them and as targets of its ``TestClient``."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.stepped import RAISES, REFUSED, Counting
from models.typed import Climb, Halve

from gpuserve import Response, Server, Tensor, current_model
from gpuserve.config.problems import ConfigProblems
from gpuserve.core.errors import BindError, StartupError
from gpuserve.decorators import batch
from gpuserve.testing import (
    ModelCallError,
    TestClient,
    WrongCall,
    open_callable,
    open_triton_model,
    run_callable,
    run_triton_model,
)
from gpuserve.typed import Float32

X = [Tensor(name="x", dtype=np.float32, shape=(-1,))]
Y = [Tensor(name="y", dtype=np.float32, shape=(-1,))]
PLAIN = {
    "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": [-1]}],
}
MODEL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.factor = float(json.loads(args["model_config"])["parameters"]["factor"]["string_value"])
        pb_utils.Logger.log_info("loaded " + args["model_name"])

    def execute(self, requests):
        return [self.answer(one) for one in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if x.min() < 0:
            error = pb_utils.TritonError("below 0", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        if "ask" in json.loads(request.parameters()):
            inputs = [pb_utils.Tensor("x", x)]
            asked = pb_utils.InferenceRequest(model_name="other", requested_output_names=["y"], inputs=inputs)
            response = asked.exec()
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            x = pb_utils.get_output_tensor_by_name(response, "y").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", self.factor * x)])

    def finalize(self):
        pb_utils.Logger.log_warn("finalized")
"""
DECOUPLED = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0])
            threading.Thread(target=self.send, args=(request.get_response_sender(), count)).start()

    def send(self, sender, count):
        for number in range(count):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([number], np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TENSORS = (
    'input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 } '
)


def triton_model(folder: Path, text: str, config: str) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "1/model.py").write_text(text)
    (folder / "config.pbtxt").write_text('backend: "python" ' + TENSORS + config)
    return folder


def scaling(folder: Path, factor: float = 3) -> Path:
    parameter = f'parameters {{ key: "factor" value {{ string_value: "{factor}" }} }}'
    return triton_model(folder, MODEL, f"max_batch_size: 4 dynamic_batching {{ }} {parameter}")


def test_one_execute_and_the_responses_of_a_decoupled_model(tmp_path: Path) -> None:
    folder = scaling(tmp_path / "scaling")
    assert run_triton_model(folder, {"x": [[1.0, 2.0]]})["y"].tolist() == [[3, 6]]
    first, second = run_triton_model(folder, [{"x": [[1.0]]}, {"x": np.ones((2, 1), np.float32)}])
    assert (first["y"].tolist(), second["y"].tolist()) == ([[3]], [[3], [3]])
    folder = triton_model(tmp_path / "m", DECOUPLED, "model_transaction_policy { decoupled: true }")
    assert [one["y"].tolist() for one in run_triton_model(folder, {"x": [3.0]})] == [[0], [1], [2]]
    assert run_triton_model(folder, {"x": [0.0]}) == []


def test_a_model_is_asked_as_often_as_wanted_and_hears_of_its_end(tmp_path: Path) -> None:
    with open_triton_model(scaling(tmp_path / "scaling")) as model:
        assert [float(model.infer({"x": [[n]]})["y"][0, 0]) for n in (1.0, 2.0)] == [3, 6]
        with pytest.raises(ModelCallError, match="below 0") as raised:
            model.infer({"x": [[-1.0]]})
        assert raised.value.code.value == "INVALID_ARGUMENT"
    assert model.log == [(20, "loaded scaling"), (30, "finalized")]
    with pytest.raises(RuntimeError, match="with block"):
        model.infer({"x": [[1.0]]})


def test_other_models_are_functions_or_local_models(tmp_path: Path) -> None:
    folder = scaling(tmp_path / "asking", 10)
    asked = {"parameters": {"ask": True}}
    by_function = {"other": lambda inputs: {"y": inputs["x"] + 1}}
    assert run_triton_model(folder, {"x": [[1.0]]}, others=by_function, **asked)["y"].tolist() == [[20]]
    with open_triton_model(scaling(tmp_path / "other", 5)) as other:
        answer = run_triton_model(folder, {"x": [[1.0]]}, others={"other": other}, **asked)
        assert answer["y"].tolist() == [[50]]
    with pytest.raises(ModelCallError, match="no other model 'other' is loaded"):
        run_triton_model(folder, {"x": [[1.0]]}, **asked)


def test_a_model_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    folder = triton_model(tmp_path / "m", MODEL, "max_batch_size: -2")
    with pytest.raises(ConfigProblems, match="max_batch_size"):
        open_triton_model(folder)
    with pytest.raises(ValueError, match="no version 7"):
        open_triton_model(scaling(tmp_path / "n"), version=7)


def test_a_plain_callable_with_what_it_declares() -> None:
    @batch
    def double(x: Any) -> Any:
        return {"y": 2 * x}

    double.inputs, double.outputs, double.max_batch_size = X, Y, 4
    assert run_callable(double, {"x": [[1.0, 2.0]]})["y"].tolist() == [[2, 4]]
    answers = run_callable(double, [{"x": [[1.0]]}, {"x": [[1.0], [2.0]]}])
    assert [one["y"].shape for one in answers] == [(1, 1), (2, 1)]


def test_coroutines_classes_generators_and_response_parameters() -> None:
    class Model:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        async def __call__(self, requests: Any) -> Any:
            await asyncio.sleep(0)
            return [Response({"y": self.factor * one["x"]}, {"n": len(one["x"])}) for one in requests]

    def stream(requests: Any) -> Any:
        for number in range(3):
            yield [{"y": one["x"] + number} for one in requests]

    outputs = run_callable(Model, {"x": [1.0, 2.0]}, kwargs={"factor": 3.0}, **PLAIN)
    assert (outputs["y"].tolist(), outputs.parameters) == ([3, 6], {"n": 2})
    assert [one["y"].tolist() for one in run_callable(stream, {"x": [1.0]}, **PLAIN)] == [[1], [2], [3]]


def test_a_callable_asks_others_and_loads_them() -> None:
    def asks(requests: Any) -> Any:
        model = current_model()
        model.unload_model("gone")
        ready = [model.is_model_ready(one) for one in ("other", "gone")]
        answers = [model.infer("other", {"x": one["x"]})["y"] for one in requests]
        assert ready == [True, False]
        return [{"y": one} for one in answers]

    others = {"other": lambda inputs: {"y": -inputs["x"]}, "gone": lambda inputs: inputs}
    with open_callable(asks, others=others, **PLAIN) as model:
        assert model.infer({"x": [1.0]})["y"].tolist() == [-1]
        assert [type(one).__name__ for one in model.others.asked] == ["ModelCommand"] * 3 + ["CallRequest"]
    with pytest.raises(LookupError):
        current_model()


@pytest.mark.parametrize(
    ("inputs", "error", "said"),
    [
        ({"z": [1.0]}, ModelCallError, "unexpected inference input 'z' for model 'model'"),
        ({}, ModelCallError, "expected 1 inputs but got 0 inputs for model 'model'"),
        ({"x": np.ones(2)}, ModelCallError, "data-type is 'FP64', but model 'model' expects 'FP32'"),
        ({"x": [[1.0]]}, ModelCallError, r"unexpected shape for input 'x' .*Expected \[-1\], got \[1,1\]"),
        # Requests that no client can send are mistakes of the test.
        ([{"x": [1.0]}, {"x": [1.0]}], WrongCall, "does not batch"),
        ({"x": ["one"]}, WrongCall, "input 'x': could not convert"),
        ({"x": np.ones(1, complex)}, WrongCall, "input 'x': complex128 has no v2 datatype"),
    ],
)
def test_a_request_that_a_server_would_refuse_is_refused(inputs: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said) as raised:
        run_callable(lambda requests: [{"y": one["x"]} for one in requests], inputs, **PLAIN)
    if error is ModelCallError:
        assert raised.value.code.value == "INVALID_ARGUMENT"


def test_an_answer_that_cannot_be_sent_is_told() -> None:
    with pytest.raises(ModelCallError, match="'z'"):
        run_callable(lambda requests: [{"z": one["x"]} for one in requests], {"x": [1.0]}, **PLAIN)
    with pytest.raises(ZeroDivisionError):
        run_callable(lambda requests: 1 // 0, {"x": [1.0]}, **PLAIN)


def test_a_typed_stepped_callable() -> None:
    with open_callable(Climb) as model:
        answers = model.stream({"n": [3]}, parameters={"step": 2, "start": 5})
        found = [(int(one["value"][0]), one["label"][0]) for one in answers]
        assert found == [(5, b"5"), (7, b"7"), (9, b"9")]
        with pytest.raises(ValueError, match="parameter 'step' of the request is missing"):
            model.stream({"n": [3]})
    assert [float(one["half"][0]) for one in run_callable(Halve(), {"x": [8]})] == [4, 2]


def test_a_stepped_callable_runs_as_in_its_worker(tmp_path: Path) -> None:
    record = tmp_path / "record"
    kwargs = {"step_s": 0.0, "room": 2, "record": str(record)}
    values = [int(one["value"][0]) for one in run_callable(Counting, {"n": [3]}, kwargs=kwargs)]
    assert values == [1, 2, 3]
    with pytest.raises(ValueError, match="poison"):
        run_callable(Counting, {"n": [RAISES]}, kwargs=kwargs)
    with pytest.raises(ModelCallError, match="not this number"):
        run_callable(Counting, {"n": [REFUSED]}, kwargs=kwargs)
    requests = [{"n": [n]} for n in (4, 1, 2)]
    whole = run_callable(Counting, requests, kwargs={**kwargs, "whole": True}, decoupled=False)
    assert [int(one["value"][0]) for one in whole] == [4, 1, 2]
    events = Counter(line.split()[0] for line in record.read_text().splitlines())
    assert events["admit"] == events["release"] == 5


# ---- TestClient ----


@batch(max_batch_size=4)
def double(x: Float32) -> Float32:
    return 2 * x


def echo(requests: Any) -> Any:
    return [{"y": one["x"]} for one in requests]


def test_a_typed_function_and_one_with_tensors() -> None:
    with TestClient(double) as client:
        assert client.models == ("double",)
        assert client.infer(x=[[1.0]])["OUTPUT_1"].tolist() == [[2]]
    with TestClient(echo, inputs=X, outputs=Y) as client:
        assert client.infer("echo", x=[1.0])["y"].tolist() == [1]
    with TestClient(functools.partial(echo), **PLAIN) as client:
        assert client.infer("partial", {"x": [3.0]})["y"].tolist() == [3]


def test_what_is_bound_to_a_server_and_a_python_file_of_one_callable(tmp_path: Path) -> None:
    server = Server()
    server.bind("twice", double)
    server.bind("echo", echo, X, Y)
    with TestClient(server) as client:
        assert client.models == ("twice", "echo")
        assert client.infer("twice", x=[[4.0]])["OUTPUT_1"].tolist() == [[8]]
    function = "@batch\ndef triple(x: Float32) -> Float32:\n    return 3 * x\n"
    (tmp_path / "only_one.py").write_text(f"from gpuserve.typed import Float32, batch\n\n{function}")
    with TestClient(tmp_path / "only_one.py") as client:
        assert client.infer("triple", x=[[1.0, 2.0]])["OUTPUT_1"].tolist() == [[3, 6]]


def test_a_repository_and_one_folder_of_it(tmp_path: Path) -> None:
    folder = scaling(tmp_path / "repository" / "scaling")
    triton_model(tmp_path / "repository" / "steps", DECOUPLED, "model_transaction_policy { decoupled: true }")
    with TestClient(tmp_path / "repository") as client:
        assert sorted(client.models) == ["scaling", "steps"]
        assert client.infer("scaling", x=[[1.0]])["y"].tolist() == [[3]]
        assert [one["y"].tolist() for one in client.stream("steps", x=[2.0])] == [[0], [1]]
        with pytest.raises(ModelCallError, match="decoupled") as raised:
            client.infer("steps", x=[2.0])
        assert raised.value.code.value == "UNIMPLEMENTED"
    with TestClient(folder) as client:
        assert client.models == ("scaling",)
        assert client.infer(x=[[1.0]])["y"].tolist() == [[3]]


def test_models_ask_each_other_and_what_answers_for_others(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    scaling(repository / "scaling", 2)
    scaling(repository / "other", 5)
    ask = {"parameters": {"ask": True}}
    with TestClient(repository) as client:
        assert client.infer("scaling", x=[[1.0]], **ask)["y"].tolist() == [[10]]
    instead = {"other": lambda inputs: {"y": inputs["x"] + 1}}
    with TestClient(repository / "scaling", others=instead) as client:
        assert client.infer("scaling", x=[[1.0]], **ask)["y"].tolist() == [[4]]
    with pytest.raises(WrongCall, match="others work in this process only"):
        TestClient(repository, others=instead, workers=True)


def test_inside_a_running_event_loop() -> None:
    async def awaits(requests: Any) -> Any:
        await asyncio.sleep(0)
        return echo(requests)

    async def counts(requests: Any) -> Any:
        for number in range(2):
            await asyncio.sleep(0)
            yield [{"y": one["x"] + number} for one in requests]

    async def test() -> list[Any]:
        with TestClient({"awaits": awaits, "counts": counts}, **PLAIN) as client:
            found = [client.infer("awaits", x=[1.0]), *client.stream("counts", x=[1.0])]
        return [one["y"].tolist() for one in found]

    assert asyncio.run(test()) == [[1], [1], [2]]


def test_what_cannot_be_served_is_told_before_or_at_the_load(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="the inputs and outputs of the callable 'echo' are not known"):
        TestClient(echo)
    with pytest.raises(WrongCall, match="max_batch_size: expected with a callable alone"):
        TestClient(tmp_path, max_batch_size=3)
    with pytest.raises(ConfigProblems, match="max_batch_size"):
        TestClient(triton_model(tmp_path / "bad", DECOUPLED, "max_batch_size: -2"))

    class Fails:
        def __init__(self) -> None:
            raise OSError("no weights")

        def __call__(self, requests: Any) -> Any: ...

    with pytest.raises(StartupError, match=r"model 'Fails' could not be loaded.*no weights") as raised:
        TestClient(Fails, **PLAIN).open()
    assert "raise OSError" in raised.value.__notes__[0]


@pytest.mark.thorough
def test_a_model_that_takes_tensors_of_torch_gets_them() -> None:
    torch: Any = pytest.importorskip("torch")

    def halved(requests: Any) -> Any:
        assert all(type(one["x"]) is torch.Tensor for one in requests)
        return [{"y": one["x"] / 2} for one in requests]

    with TestClient(halved, inputs=X, outputs=Y, array="torch") as client:
        assert client.infer(x=[3.0])["y"].tolist() == [1.5]
