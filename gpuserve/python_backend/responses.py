"""``InferenceResponse``: what a model answers one request with, or another model answered it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gpuserve.python_backend.errors import RefusedRequest, TritonError
from gpuserve.python_backend.parameters import as_json, checked_parameters
from gpuserve.python_backend.tensors import Tensor, named
from gpuserve_worker.calling.outputs import OutputError
from gpuserve_worker.calling.response import Response


class InferenceResponse:
    """Outputs, or an error in their place."""

    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        for tensor in output_tensors:
            if type(tensor) is not Tensor:
                raise TypeError(
                    "the output_tensors of an InferenceResponse are pb_utils.Tensor objects, but one is "
                    f"{type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(
                "the error of an InferenceResponse is a pb_utils.TritonError, but "
                f"{type(error).__name__} was given"
            )
        self._output_tensors = output_tensors
        self._error = error
        self._parameters = checked_parameters(parameters) if parameters else None

    def output_tensors(self) -> list[Tensor]:
        return list(self._output_tensors)

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """Its parameters by name, as JSON."""
        return as_json(self._parameters)

    def __repr__(self) -> str:
        return f"InferenceResponse({list(self._output_tensors)}, {self._error})"


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output of a response; None where it has none of this name."""
    return named(inference_response._output_tensors, name)


def answer_of(response: InferenceResponse, declared: Collection[str]) -> Any:
    """A response as the worker takes it: of its outputs, those that the model declares; an ``OutputError``
    where there are others and none of those.
    """
    if response._error is not None:
        return RefusedRequest(response._error)
    tensors = response._output_tensors
    outputs = {tensor._name: tensor._value for tensor in tensors if tensor._name in declared}
    if tensors and not outputs:
        return OutputError(
            f"the response has the output {tensors[0]._name!r}, which the configuration of the model does "
            f"not declare: expected {', '.join(map(repr, declared))}"
        )
    return outputs if response._parameters is None else Response(outputs, response._parameters)
