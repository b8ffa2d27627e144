"""Conversion of inputs to the arguments of a tritonclient, and of its results to arrays. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpuserve.api.notebook_html import arrays_html
from gpuserve.client.client_config import ClientModelConfig, TensorSpec
from gpuserve.client.client_settings import ClientSettings
from gpuserve.client.exceptions import (
    ClientEncodingError,
    ClientInferenceServerError,
    ClientModelDoesntSupportBatchingError,
    ClientValueError,
)
from gpuserve_worker.protocol.tensor import datatype_of

#: Parameters that are separate arguments of tritonclient.
_ARGUMENTS: Final[tuple[str, ...]] = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end")


def infer_options(parameters: Mapping[str, Any] | None, *, reserved: bool) -> dict[str, Any]:
    """Return the parameters of a request as arguments of tritonclient; raise ClientValueError if one is
    wrong. ``priority``, ``timeout`` (microseconds) and ``sequence_*`` are the protocol's. All others reach
    the model. If the protocol's names are ``reserved``, they stay parameters, which tritonclient refuses.
    """
    if parameters is None:
        return {}
    custom = dict(check_values("parameters", parameters))
    options = {name: custom.pop(name) for name in _ARGUMENTS if name in custom and not reserved}
    for name in ("priority", "timeout"):
        value = options.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ClientValueError(f"Parameter {name!r} must be an integer of at least 0, got {value!r}")
    if custom:
        options["parameters"] = custom
    return options


def check_values(what: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return parameters or headers, called ``what``; raise ClientValueError unless they may be sent."""
    if not isinstance(given, Mapping):
        raise ClientValueError(f"{what} must be a dictionary, got {type(given).__name__}")
    for key, value in given.items():
        if not isinstance(key, str):
            raise ClientValueError(f"Each key of {what} must be a string, got {key!r}")
        if not isinstance(value, str | int | float | bool):
            text = f"The value of {key!r} in {what} must be a string, number or boolean, got {value!r:.200}"
            raise ClientValueError(text)
    return given


class Arrays(dict[str, NDArray[Any]]):
    """Arrays by name, displayed as a table in a notebook."""

    def _repr_html_(self) -> str:
        return arrays_html(self)


def arrays_by_name(
    model_name: str, declared: Sequence[TensorSpec] | None, given: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the inputs by name, of which positional ones are the first declared; raise ClientValueError."""
    if given and named:
        raise ClientValueError("Inputs are given either by position or by name, not both ways in one call")
    if named:
        return dict(named)
    count = len(declared or ())
    if not given and count:
        raise ClientValueError(f"Provide input data: model {model_name} has {count} inputs, none was given")
    if len(given) > count:
        raise ClientValueError(f"Model {model_name} has {count} inputs, {len(given)} were given")
    return {spec.name: array for spec, array in zip(declared or (), given, strict=False)}


def datatype_of_input(name: str, array: Any) -> str:
    """Return the v2 datatype of an input; raise ClientValueError if the protocol has none."""
    if not isinstance(array, np.ndarray):
        raise ClientValueError(f"Input {name} is not a numpy array. Got {type(array)} instead.")
    kind = array.dtype.kind
    if kind == "U":
        raise ClientEncodingError(
            f"Unicode inputs are not supported. Encode the array of input {name!r}, for example with "
            "np.char.encode(array, 'utf-8')"
        )
    for one in array.flat if kind == "O" else ():
        if not isinstance(one, bytes):
            raise ClientEncodingError(
                f"Input {name!r} has dtype=object, whose elements must be encoded strings, which is bytes, "
                f"and one of them is of type {type(one).__name__}"
            )
    try:
        return datatype_of(array.dtype)
    except ValueError:
        text = f"Input {name!r} has dtype {array.dtype}, which the protocol has no datatype for"
        raise ClientValueError(text) from None


class RequestBuilder:
    """The builder of requests for one model, by the tritonclient in ``module``. A request names no outputs,
    so all are returned, and has no id, so that HTTP requests that differ only in their data have the same
    header, which a server need not parse twice.
    """

    def __init__(
        self, settings: ClientSettings, config: ClientModelConfig, module: Any, *, reserved: bool
    ) -> None:
        self.config = config
        self._reserved = reserved
        self._settings = settings
        self._module = module
        self._names = [one.name for one in config.outputs or ()]

    @property
    def batches(self) -> bool:
        return self.config.max_batch_size > 0

    def arguments(
        self,
        given: Sequence[Any],
        named: Mapping[str, Any],
        parameters: Mapping[str, Any] | None,
        headers: Mapping[str, Any] | None,
        *,
        decoupled: bool,
        sample: bool,
    ) -> dict[str, Any]:
        """Return the arguments of tritonclient's ``infer``; raise ClientError for a wrong request."""
        name = self.config.model_name
        if self.config.decoupled != decoupled:
            kind, use = ("coupled", "ModelClient") if decoupled else ("decoupled", "DecoupledModelClient")
            raise ClientInferenceServerError(f"Model config is {kind}. Use {use} instead. Model: {name}")
        if not sample and not self.batches:
            text = f"Model {name} doesn't support batching - use infer_sample method instead"
            raise ClientModelDoesntSupportBatchingError(text)
        options = infer_options(parameters, reserved=self._reserved)
        if headers is not None:
            check_values("headers", headers)
        arrays = arrays_by_name(name, self.config.inputs, given, named)
        return {
            "model_name": self._settings.model_name,
            "model_version": self._settings.model_version,
            "inputs": [self._infer_input(name, array, sample) for name, array in arrays.items()],
            "headers": self._settings.headers(headers),
            **options,
        }

    def arrays(self, result: Any, *, sample: bool) -> Arrays:
        names = self._names
        if not names:
            response = result.get_response()
            outputs = response["outputs"] if isinstance(response, dict) else response.outputs
            names = [one["name"] if isinstance(one, dict) else one.name for one in outputs]
        found = {name: result.as_numpy(name) for name in names}
        one_row = sample and self.batches
        rows = {name: array[0] if one_row else array for name, array in found.items() if array is not None}
        return Arrays(rows)

    def _infer_input(self, name: str, array: Any, sample: bool) -> Any:
        datatype = datatype_of_input(name, array)
        if sample and self.batches:
            array = array[np.newaxis]
        tensor = self._module.InferInput(name, array.shape, datatype)
        tensor.set_data_from_numpy(array)
        return tensor
