"""A command line that sends one made-up request to a model, ready to paste."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import BYTES, TensorSpec, element_count

#: A request with more elements than this is made by Python, not written out for curl.
_MAX_ELEMENTS: Final = 32
#: Datatypes whose elements JSON tensors do not carry.
_NOT_IN_JSON: Final = frozenset({"FP16", "BF16"})
#: The parameters of a sequence of one request.
_SEQUENCE: Final = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
_NUMPY_NAMES: Final = {
    "BOOL": "bool",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "float32",
}


def client_command(addresses: Mapping[str, str], model: ModelSpec) -> str | None:
    """Write curl for a small request, else Python with tritonclient; None without an HTTP or gRPC address."""
    if model.openai:
        return _openai(addresses, model)
    tensors = [(spec, _shape(spec, model)) for spec in model.inputs if not spec.optional]
    small = sum(element_count(shape) for _, shape in tensors) <= _MAX_ELEMENTS
    in_json = not any(spec.datatype in _NOT_IN_JSON for spec, _ in tensors)
    if model.decoupled:
        return _stream(addresses, model, tensors, as_curl=small and in_json)
    if "http" in addresses and small and in_json:
        return _curl(addresses["http"], model, tensors)
    if "grpc" in addresses:
        return _python("grpc", addresses["grpc"], model, tensors)
    if "http" in addresses:
        return _python("http", addresses["http"], model, tensors)
    return None


def _openai(addresses: Mapping[str, str], model: ModelSpec) -> str | None:
    """Write curl for OpenAI's chat; which endpoints a model has is known to its worker alone."""
    if "http" not in addresses:
        return None
    document = {"model": model.name, "messages": [{"role": "user", "content": "hello"}]}
    return f"curl -s {addresses['http']}/v1/chat/completions -d {shlex.quote(json.dumps(document))}"


def _shape(spec: TensorSpec, model: ModelSpec) -> list[int]:
    """Choose a shape of one item, with one element along each axis of any size."""
    batch = [1] if model.max_batch_size else []
    return batch + [1 if dim == -1 else dim for dim in spec.shape]


def _curl(address: str, model: ModelSpec, tensors: Sequence[tuple[TensorSpec, list[int]]]) -> str:
    inputs = [
        {
            "name": spec.name,
            "shape": shape,
            "datatype": spec.datatype,
            "data": [_element(spec.datatype)] * element_count(shape),
        }
        for spec, shape in tensors
    ]
    document: dict[str, Any] = {"inputs": inputs}
    if model.in_sequences:
        document["parameters"] = _SEQUENCE
    body = json.dumps(document, ensure_ascii=False)
    return f"curl -s {address}/v2/models/{model.name}/infer -d {shlex.quote(body)}"


def _stream(
    addresses: Mapping[str, str],
    model: ModelSpec,
    tensors: Sequence[tuple[TensorSpec, list[int]]],
    *,
    as_curl: bool,
) -> str | None:
    """Write the command for a model whose responses are a stream; over HTTP only curl prints one."""
    if "http" in addresses and as_curl:
        document = {spec.name: _elements(spec, shape) for spec, shape in tensors}
        if model.in_sequences:
            document |= _SEQUENCE
        body = json.dumps(document, ensure_ascii=False)
        return f"curl -sN {addresses['http']}/v2/models/{model.name}/generate_stream -d {shlex.quote(body)}"
    if "grpc" not in addresses:
        return None
    method = "infer_batch" if model.max_batch_size else "infer_sample"
    inputs = ", ".join(f"{spec.name!r}: {_array(spec, shape)}" for spec, shape in tensors)
    more = f"parameters={_SEQUENCE}, " if model.in_sequences else ""
    statements = [
        "import numpy as np; from gpuserve.client import DecoupledModelClient",
        f"client = DecoupledModelClient({_grpc_url(addresses['grpc'])!r}, {model.name!r})",
        f"print(*client.{method}({more}**{{{inputs}}}), sep='\\n')",
        "client.close()",
    ]
    return f"python3 -c {shlex.quote('; '.join(statements))}"


def _elements(spec: TensorSpec, shape: list[int]) -> Any:
    elements = [_element(spec.datatype)] * element_count(shape)
    return elements[0] if len(elements) == 1 else elements


def _element(datatype: str) -> Any:
    if datatype == BYTES:
        return "hello"
    if datatype == "BOOL":
        return True
    return 1.0 if datatype.startswith("FP") else 1


def _python(
    protocol: str, address: str, model: ModelSpec, tensors: Sequence[tuple[TensorSpec, list[int]]]
) -> str:
    made = [f"triton.InferInput({spec.name!r}, {shape}, {spec.datatype!r})" for spec, shape in tensors]
    statements = [
        f"import numpy as np, tritonclient.{protocol} as triton",
        f"inputs = [{', '.join(made)}]",
    ]
    statements += [
        f"inputs[{index}].set_data_from_numpy({_array(spec, shape)})"
        for index, (spec, shape) in enumerate(tensors)
    ]
    shown = f"result.as_numpy({model.outputs[0].name!r})" if model.outputs else "result.get_response()"
    more = "".join(f", {key}={value!r}" for key, value in _SEQUENCE.items()) if model.in_sequences else ""
    statements += [
        f"result = triton.InferenceServerClient({_arguments(address)}).infer({model.name!r}, inputs{more})",
        f"print({shown})",
    ]
    return f"python3 -c {shlex.quote('; '.join(statements))}"


def _array(spec: TensorSpec, shape: list[int]) -> str:
    if spec.datatype == BYTES:
        return f"np.full({shape}, b'hello', dtype=object)"
    return f"np.ones({shape}, np.{_NUMPY_NAMES.get(spec.datatype, spec.datatype.lower())})"


def _arguments(address: str) -> str:
    """Write the arguments of tritonclient's constructor, which takes no scheme."""
    scheme, _, bare = address.rpartition("://")
    return f"{bare!r}, ssl=True" if scheme.endswith("s") else repr(bare)


def _grpc_url(address: str) -> str:
    return address if "://" in address else f"grpc://{address}"
