"""Parts that the backends share: checks before a file is loaded, and facts about the served model."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from gpuserve.decorators.batch_data import select_requests
from gpuserve.decorators.wrapping import served_model
from gpuserve.devices.placement import n_processors, threads_of_environment
from gpuserve_worker.inference.callable_loading import LoadError
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.memory.shared_weights import shared_weights


class ModelFileError(LoadError):
    """A model file cannot be served as it is. The text is one sentence for the operator."""


def import_library(module: str, extra: str) -> Any:
    """Return an imported module; raise ModelFileError with the ``extra`` that installs its package."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise  # a dependency of the package is missing, and the error names it
        package = module.partition(".")[0]
        raise ModelFileError(
            f"the Python package {package!r} is not installed; pip install 'gpuserve[{extra}]' installs it"
        ) from None


def existing_file(path: str) -> str:
    """Return the path of an existing file. Raise ModelFileError if there is no file, or a folder."""
    if os.path.isdir(path):
        raise ModelFileError(f"{path!r} is a folder; expected a file")
    if not os.path.exists(path):
        raise ModelFileError(f"there is no file {path!r}")
    return path


def require_trust(path: str, trust: object, why: str, instead: str) -> None:
    """Raise ModelFileError for a file that can run code, unless the operator trusts the file. Only True is
    trust, so that a quoted "false" is none. ``why`` completes "FILE is …": what the file is, and that loading
    the file runs code. ``instead`` completes "or …": a file that needs no trust.
    """
    if trust is not True:
        raise ModelFileError(
            f"{os.path.basename(path)!r} is {why}; if you trust who made it, set kwargs: {{trust: true}}, or "
            f"{instead}"
        )


#: The datatypes of numbers by their usual names, which are torch's.
DATATYPES: Final = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign}int{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}
#: The largest batch of a file that batches, if the config does not say.
MAX_BATCH_SIZE: Final = 32


def threads_per_instance(instances: int) -> int:
    """Return how many threads an instance may use: those of its worker, else its share of the processors."""
    return threads_of_environment() or max(1, int(n_processors() / max(1, instances)))


def load_once(
    load: Callable[[], Any], file: str, options: object, *, is_shared: bool, device: str = "cpu"
) -> Any:
    """Return what ``load`` returns; with ``is_shared`` from one copy for all instances of the same file and
    options. If ``device`` is a GPU, the tensors of the result are then on that GPU.
    """
    if not is_shared:
        return load()
    name = os.path.basename(os.path.normpath(file))
    files = [file] if os.path.exists(file) else []  # a name on the hub is no file
    # Libraries may write to their arrays, but models do not write to their weights.
    writable, version = device == "cpu", repr(options)
    with shared_weights(name, files=files, version=version, copy_on_write=writable, device=device) as weights:
        return weights.load(load)


def is_one_row_per_request(ranks: Mapping[str, int]) -> bool:
    """Return whether the model is served without batches although its file has a batch axis. Each request is
    then a row. ``ranks`` are the numbers of axes of the file's inputs.
    """
    model = served_model()
    if model is None or model.batching or not model.inputs:
        return False
    return all(len(one.shape) + 1 == ranks.get(one.name) for one in model.inputs)


def retry_one_by_one(
    answer: Callable[[list[Any]], Any], requests: Any, error_type: type[Exception] = Exception
) -> list[Any] | None:
    """Answer each request of a failed batch alone, so that a bad request fails no other request. An error of
    ``error_type`` becomes the answer to the request that raised it. Return None if there is only one request,
    because its error is known.
    """
    alone = requests.as_list() if isinstance(requests, Batch) else requests
    if len(alone) == 1:
        return None
    answers: list[Any] = []
    for position in range(len(alone)):
        try:
            answers.append(answer(select_requests(alone, [position]))[0])
        except error_type as error:
            answers.append(error)
    return answers
