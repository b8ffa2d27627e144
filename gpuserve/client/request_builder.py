"""The arguments of an inference as tritonclient takes them, and its result as arrays: what the four clients
do alike. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuserve.client.config import ClientModelConfig
from gpuserve.client.exceptions import ClientInferenceServerError, ClientModelDoesntSupportBatchingError
from gpuserve.client.inputs import (
    Arrays,
    arrays_by_name,
    datatype_of_input,
    with_batch_axis,
    without_batch_axis,
)
from gpuserve.client.options import check_values, infer_options
from gpuserve.client.settings import ClientSettings


class RequestBuilder:
    """Requests for one model. ``module`` is the tritonclient that makes the tensors.

    Requests name no outputs, so that all come, and have no id: nobody sees it, and over HTTP two requests
    that differ in nothing but their data have the same header, which a server need not read twice.
    """

    def __init__(self, settings: ClientSettings, config: ClientModelConfig, module: Any) -> None:
        self.config = config
        self._settings = settings
        self._module = module
        self._names = [one.name for one in config.outputs or ()]

    @property
    def batches(self) -> bool:
        """Whether requests have a batch axis."""
        return self.config.max_batch_size > 0

    def check_kind(self, *, decoupled: bool, sample: bool) -> None:
        """Whether the model can be asked this way.

        Raises:
            ClientInferenceServerError: the model is decoupled and this client is not, or the other way round.
            ClientModelDoesntSupportBatchingError: a batch for a model that does not batch.
        """
        name = self.config.model_name
        if self.config.decoupled != decoupled:
            kind, use = ("coupled", "ModelClient") if decoupled else ("decoupled", "DecoupledModelClient")
            raise ClientInferenceServerError(f"Model config is {kind}. Use {use} instead. Model: {name}")
        if not sample and not self.batches:
            raise ClientModelDoesntSupportBatchingError(
                f"Model {name} doesn't support batching - use infer_sample method instead"
            )

    def arguments(
        self,
        given: Sequence[Any],
        named: Mapping[str, Any],
        parameters: Mapping[str, Any] | None,
        headers: Mapping[str, Any] | None,
        *,
        sample: bool,
    ) -> dict[str, Any]:
        """The arguments of tritonclient's ``infer``, the headers among them.

        Raises:
            ClientValueError: the inputs, parameters or headers are wrong.
        """
        options = infer_options(parameters)
        if headers is not None:
            check_values("headers", headers)
        arrays = arrays_by_name(self.config.model_name, self.config.inputs, given, named)
        return {
            "model_name": self._settings.model_name,
            "model_version": self._settings.model_version,
            "inputs": self._tensors(arrays, sample),
            "headers": self._settings.headers(headers),
            **options,
        }

    def arrays(self, result: Any, *, sample: bool) -> Arrays:
        """The outputs of a result that are there, by name."""
        names = self._names or _output_names(result)
        found = {name: result.as_numpy(name) for name in names}
        arrays = {name: array for name, array in found.items() if array is not None}
        return without_batch_axis(arrays) if sample and self.batches else arrays

    def _tensors(self, arrays: dict[str, Any], sample: bool) -> list[Any]:
        datatypes = {name: datatype_of_input(name, array) for name, array in arrays.items()}
        if sample and self.batches:
            arrays = with_batch_axis(arrays)
        tensors = []
        for name, array in arrays.items():
            tensor = self._module.InferInput(name, array.shape, datatypes[name])
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        return tensors


def _output_names(result: Any) -> list[str]:
    response = result.get_response()
    outputs = response["outputs"] if isinstance(response, dict) else response.outputs
    return [one["name"] if isinstance(one, dict) else one.name for one in outputs]
