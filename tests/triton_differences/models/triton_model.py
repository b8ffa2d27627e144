"""The models as Triton's Python backend runs them: one file, copied into every model of the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_SUMS: dict[int, int] = {}


def _array(request: Any, name: str) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def _response(**outputs: Any) -> Any:
    tensors = [pb_utils.Tensor(name, array) for name, array in outputs.items()]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def echo(request: Any) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, "x")
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor.from_dlpack("y", tensor)])


def echo_strings(request: Any) -> Any:
    return _response(y=_array(request, "x"))


def add_sub(request: Any) -> Any:
    first, second = _array(request, "INPUT0"), _array(request, "INPUT1")
    return _response(OUTPUT0=first + second, OUTPUT1=first - second)


def optional(request: Any) -> Any:
    given = {name: array for name in "ab" if (array := _array(request, name)) is not None}
    text = np.array([[",".join(given).encode()]] * len(given["a"]), dtype=object)
    return _response(sum=sum(given.values()), given=text)


def fails(request: Any) -> Any:
    codes = [
        *(pb_utils.TritonError.INVALID_ARG, pb_utils.TritonError.NOT_FOUND, pb_utils.TritonError.UNAVAILABLE),
        *(pb_utils.TritonError.UNSUPPORTED, pb_utils.TritonError.INTERNAL, pb_utils.TritonError.CANCELLED),
    ]
    which = int(_array(request, "x")[0])
    if which == len(codes):
        raise ValueError("the model raised")
    if which > len(codes):
        return _response(y=np.zeros(1, np.int32))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError("the model refused", codes[which]))


def parameters(request: Any) -> Any:
    told = json.loads(request.parameters() or "{}")
    return _response(seen=np.array([json.dumps(told, sort_keys=True).encode()], dtype=object))


def shout(request: Any) -> Any:
    prompts = _array(request, "PROMPT")
    return _response(TEXT=np.array([[one.upper() for one in row] for row in prompts], dtype=object))


def accumulate(request: Any) -> Any:
    sequence = int(_array(request, "CORRID")[0, 0])
    if _array(request, "START")[0, 0]:
        _SUMS[sequence] = 0
    _SUMS[sequence] = _SUMS.get(sequence, 0) + int(_array(request, "INPUT")[0, 0])
    return _response(OUTPUT=np.array([[_SUMS[sequence]]], np.int32))


def repeat(request: Any) -> Any:
    for number in range(int(_array(request, "count")[0])):
        yield _response(number=np.array([number], np.int32))


def text(request: Any) -> Any:
    prompt, count = _array(request, "PROMPT"), _array(request, "COUNT")
    for _ in range(1 if count is None else int(count[0])):
        yield _response(TEXT=prompt)


class TritonPythonModel:
    """Runs the function that the file beside this one names, for each request of a batch."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        name = Path(__file__).with_name("behaviour.txt").read_text()
        if config["input"][0]["data_type"] == "TYPE_STRING" and name == "echo":
            name = "echo_strings"
        self._run = globals()[name]
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)

    def execute(self, requests: list[Any]) -> Any:
        if not self._decoupled:
            return [self._run(request) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            for response in self._run(request):
                sender.send(response)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
