"""Programs written for PyTriton's ``bind()``: they serve what they say, with gpuserve's own imports and,
run by ``gpuserve run``, with PyTriton's.

Where such a program leaves something open, as its model, that is given in front of it; what asks the
server is put behind its last ``bind()``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from bound import free_server
from optional_packages import needs
from processes import finished
from serving import GPUSERVE, unlikely_port

from gpuserve import ModelConfig, Tensor
from gpuserve.decorators import batch

pytestmark = pytest.mark.thorough

IMPORTS = """
from typing import Dict, List
import numpy as np
from bound import ask, free_server as Triton, infer
from gpuserve import ModelConfig, Request, Tensor
from gpuserve.decorators import batch
"""

PYTRITON_IMPORTS = """
import os
from typing import Dict, List
import numpy as np
from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.triton import Triton

def infer(triton, model, parameters=None, **inputs):
    with ModelClient(f"localhost:{os.environ['PYTRITON_TRITON_CONFIG_HTTP_PORT']}", model) as client:
        return client.infer_batch(parameters=parameters, **inputs)

def ask(triton, model, value):
    (output,) = infer(triton, model, INPUT_1=np.array([[value]], np.float32)).values()
    return output[0].tolist()
"""

BINDING = """
def model(names, parts):
    return np.array([[len(name), len(b"".join(row))] for (name,), row in zip(names, parts)], np.float32)

@batch
def infer_fn(**inputs: np.ndarray):
    input1, input2 = inputs.values()
    outputs = model(input1, input2)
    return [outputs]

with Triton() as triton:
    triton.bind(
        model_name="ModelName",
        infer_func=infer_fn,
        inputs=[
            Tensor(shape=(1,), dtype=np.bytes_),
            Tensor(shape=(-1,), dtype=np.bytes_)
        ],
        outputs=[
            Tensor(shape=(-1,), dtype=np.float32),
        ],
        config=ModelConfig(max_batch_size=8),
        strict=True,
    )
    triton.run()
    names, parts = np.array([[b"four"], [b"a"]], object), np.array([[b"a", b"bc"], [b"", b"\\0"]], object)
    print(infer(triton, "ModelName", INPUT_1=names, INPUT_2=parts)["OUTPUT_1"].tolist())
"""

IDENTITY = """
with Triton() as triton:
    triton.bind(
        model_name="Identity",
        infer_func=lambda requests: requests,
        inputs=[Tensor(dtype=np.float32, shape=(1,))],
        outputs=[Tensor(dtype=np.float32, shape=(1,))],
        config=ModelConfig(max_batch_size=8)
    )
    triton.run()
    print(infer(triton, "Identity", INPUT_1=np.array([[1.5], [2.5]], np.float32)))
"""

MULTIPLE_INSTANCES = """
import os
import torch

class _InferFuncWrapper:
    def __init__(self, model: torch.nn.Module, device: str):
        self._model = model
        self._device = device

    @batch
    def __call__(self, **inputs):
        (input1_batch,) = inputs.values()
        input1_batch_tensor = torch.from_numpy(input1_batch).to(self._device)
        output1_batch_tensor = self._model(input1_batch_tensor)
        output1_batch = output1_batch_tensor.cpu().detach().numpy()
        return [output1_batch]

def _infer_function_factory(devices):
    infer_fns = []
    for device in devices:
        model = torch.nn.Linear(20, 30).to(device).eval()
        infer_fns.append(_InferFuncWrapper(model=model, device=device))
    return infer_fns

with Triton() as triton:
    triton.bind(
        model_name="Linear",
        infer_func=_infer_function_factory(devices=["cuda" if torch.cuda.is_available() else "cpu", "cpu"]),
        inputs=[
            Tensor(dtype=np.float32, shape=(-1,)),
        ],
        outputs=[
            Tensor(dtype=np.float32, shape=(-1,)),
        ],
        config=ModelConfig(max_batch_size=16),
    )
    triton.run()
    print(infer(triton, "Linear", INPUT_1=np.ones((3, 20), np.float32))["OUTPUT_1"].shape)
"""

CALLABLES = """
def infer_fn(requests: List[Request]) -> List[Dict[str, np.ndarray]]:
    return [{"OUTPUT_1": request.data["INPUT_1"] + 1} for request in requests]

class InferCallable:

    def __init__(self, *args, **kwargs):
        self.calls = 0

    def __call__(self, requests: List[Request]) -> List[Dict[str, np.ndarray]]:
        self.calls += 1
        return [{"OUTPUT_1": request["INPUT_1"] * 0 + self.calls} for request in requests]

    def alternative_infer(self, requests: List[Request]) -> List[Dict[str, np.ndarray]]:
        return [{"OUTPUT_1": request["INPUT_1"] * request.parameters["factor"]} for request in requests]

infer_callable = InferCallable()

with Triton() as triton:
    triton.bind(
        model_name="MyInferenceFunction",
        infer_func=infer_fn,
        inputs=[Tensor(shape=(1,), dtype=np.float32)],
        outputs=[Tensor(shape=(1,), dtype=np.float32)],
        config=ModelConfig(max_batch_size=8)
    )
    triton.bind(
        model_name="MyInferenceCallable",
        infer_func=infer_callable,
        inputs=[Tensor(shape=(1,), dtype=np.float32)],
        outputs=[Tensor(shape=(1,), dtype=np.float32)],
        config=ModelConfig(max_batch_size=8)
    )
    triton.bind(
        model_name="AlternativeInferenceCallable",
        infer_func=infer_callable.alternative_infer,
        inputs=[Tensor(shape=(1,), dtype=np.float32)],
        outputs=[Tensor(shape=(1,), dtype=np.float32)],
        config=ModelConfig(max_batch_size=8)
    )
    triton.run()
    two = np.array([[2]], np.float32)
    print(ask(triton, "MyInferenceFunction", 2.0))
    print(ask(triton, "MyInferenceCallable", 2.0), ask(triton, "MyInferenceCallable", 2.0))
    print(infer(triton, "AlternativeInferenceCallable", {"factor": 3}, INPUT_1=two)["OUTPUT_1"].tolist())
"""


@pytest.mark.parametrize(
    ("command", "imports"),
    [
        pytest.param([sys.executable], IMPORTS, id="gpuserve", marks=pytest.mark.thorough),
        pytest.param([GPUSERVE, "run"], PYTRITON_IMPORTS, id="pytriton"),
    ],
)
@pytest.mark.parametrize(
    ("program", "printed"),
    [
        pytest.param(BINDING, ["[[4.0, 3.0], [1.0, 1.0]]"], id="binding"),
        pytest.param(
            IDENTITY, ["{'OUTPUT_1': array([[1.5],", "       [2.5]], dtype=float32)}"], id="identity"
        ),
        pytest.param(
            MULTIPLE_INSTANCES,
            ["(3, 30)"],
            id="multiple instances",
            marks=[pytest.mark.thorough, needs("torch")],
        ),
        pytest.param(CALLABLES, ["[3.0]", "[1.0] [2.0]", "[[6.0]]"], id="callables"),
    ],
)
def test_programs_of_the_seeds(
    tmp_path: Path, program: str, printed: list[str], command: list[str], imports: str
) -> None:
    (tmp_path / "program.py").write_text(imports + program)
    ports = {
        f"PYTRITON_TRITON_CONFIG_{role}_PORT": str(unlikely_port()) for role in ("HTTP", "GRPC", "METRICS")
    }
    done = finished(
        [*command, "program.py"],
        cwd=tmp_path,
        env={**os.environ, **ports, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == printed
    told = [line for line in done.stderr.splitlines() if "share an object (InferCallable)" in line]
    assert done.stderr.splitlines() == told, "two methods of one object are bound: that alone is told"
    assert len(told) <= (program is CALLABLES)


@pytest.mark.parametrize("dtype", [bytes, object])
def test_arbitrary_bytes_come_and_go_as_they_are(dtype: type) -> None:
    """numpy drops trailing zero bytes of its own ``S`` arrays; those of ``object`` arrays stay."""

    @batch
    def both(INPUT_1: np.ndarray) -> list[np.ndarray]:
        assert INPUT_1.dtype == object
        return [INPUT_1, np.array([[one] for (one,) in INPUT_1])]

    tensor = Tensor(shape=(1,), dtype=dtype)
    with free_server() as server:
        config = ModelConfig(max_batch_size=8)
        server.bind("m", both, inputs=[tensor], outputs=[tensor, tensor], config=config, strict=True)
        server.run()
        sent = np.array([[b"\xff\x00"], [b"\x00"], [b""]], dtype=object)
        given = grpcclient.InferInput("INPUT_1", sent.shape, "BYTES")
        given.set_data_from_numpy(sent)
        with grpcclient.InferenceServerClient(server.addresses["grpc"]) as client:
            answer = client.infer("m", [given])
    assert answer.as_numpy("OUTPUT_1").tolist() == sent.tolist()
    assert answer.as_numpy("OUTPUT_2").tolist() == [[b"\xff"], [b""], [b""]]
