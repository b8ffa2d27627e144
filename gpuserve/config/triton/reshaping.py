"""The callable of a model whose config.pbtxt has ``reshape``: clients see other shapes than the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from gpuserve.decorators.results import map_result
from gpuserve_worker.inference.callable_loading import build, locate
from gpuserve_worker.inference.inference_request import (
    Batch,
    BatchedOutputs,
    RequestBatch,
    Response,
    accept_batch,
    accepts_batch,
    function_of,
)
from gpuserve_worker.inference.model_context import current_model, enter_model

#: By the name of a tensor, the shapes before and after, without the batch axis.
Shapes: TypeAlias = Mapping[str, tuple[Sequence[int], Sequence[int]]]

#: Attributes of a callable that the worker reads.
_HOOKS: Final = ("close", "sequence_dropped", "failure_prefix")


class ReshapedModel:
    """The callable at a ``path``, made with ``kwargs``.

    ``inputs`` map clients' shapes to the model's shapes, ``outputs`` the model's shapes to clients' shapes.
    """

    def __new__(  # type: ignore[misc]  # a factory, which is a class for the sake of ``declare``
        cls, path: str, kwargs: Mapping[str, Any], inputs: Shapes, outputs: Shapes, device: str = "cpu"
    ) -> Callable[[Any], Any]:
        model = current_model()
        own = [
            one._replace(shape=tuple(inputs[one.name][1])) if one.name in inputs else one
            for one in model.inputs
        ]
        enter_model(model._replace(inputs=tuple(own)))  # a runtime compares these shapes with its file
        source = {"path": path, "base_dir": ".", "kwargs": kwargs}
        made = build(locate(source), source, device, may_yield=model.decoupled)
        return reshaped(made, inputs, outputs)

    @classmethod
    def declare(
        cls, path: str, kwargs: Mapping[str, Any], inputs: Shapes, outputs: Shapes, device: str = "cpu"
    ) -> Mapping[str, Any]:
        """Return the declaration of the model; the config.pbtxt declares the reshaped tensors."""
        said: Mapping[str, Any] = locate({"path": path, "base_dir": "."}).declare(**kwargs)
        return said


def reshaped(made: Callable[[Any], Any], inputs: Shapes, outputs: Shapes) -> Callable[[Any], Any]:
    """Return an inference callable that reshapes inputs and outputs of another one, of the same kind."""

    def call(requests: Any) -> Any:
        batching = requests.batching
        if isinstance(requests, Batch):
            requests = requests.with_arrays(_reshaped(requests.arrays, inputs, batching))
        else:
            changed = [one.with_data(_reshaped(one.data, inputs, batching)) for one in requests]
            requests = RequestBatch(changed, requests.output_names, batching, requests.ragged)
        return map_result(partial(_reshaped_answer, outputs, batching), made(requests))

    call.__wrapped__ = function_of(made)  # type: ignore[attr-defined]  # the worker finds the kind of the callable by this attribute
    if accepts_batch(made):
        accept_batch(call)
    for hook in _HOOKS:
        if hasattr(made, hook):
            setattr(call, hook, getattr(made, hook))
    return call


def _reshaped_answer(shapes: Shapes, batching: bool, answer: Any) -> Any:
    """Return the outputs in the shapes that clients see; any other answer stays unchanged."""
    if isinstance(answer, BatchedOutputs):
        return BatchedOutputs(_reshaped(answer.arrays, shapes, batching), answer.rows)
    if isinstance(answer, Response):
        return Response(_reshaped(answer.data, shapes, batching), answer.parameters)
    if isinstance(answer, Mapping):
        return _reshaped(answer, shapes, batching)
    if isinstance(answer, list):
        return [_reshaped_answer(shapes, batching, one) for one in answer]
    return answer


def _reshaped(arrays: Mapping[str, Any], shapes: Shapes, batching: bool) -> dict[str, Any]:
    return {
        name: _array(name, array, *shapes[name], batching) if name in shapes else array
        for name, array in arrays.items()
    }


def _array(name: str, array: Any, before: Sequence[int], after: Sequence[int], batching: bool) -> Any:
    """Return an array in its other shape; free sizes keep their order."""
    rows = tuple(array.shape[:1]) if batching else ()
    sizes = iter([size for size, dim in zip(array.shape[len(rows) :], before, strict=False) if dim < 0])
    shape = (*rows, *(next(sizes, -1) if dim < 0 else dim for dim in after))
    try:
        return array.reshape(shape)
    except (ValueError, RuntimeError):  # of numpy, of torch
        raise ValueError(
            f"tensor {name!r} has the shape {list(array.shape)}, which cannot become {list(shape)}"
        ) from None
