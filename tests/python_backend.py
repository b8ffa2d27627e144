"""Models of Triton's Python backend for the tests: their entries in a config file, and clients for them."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

MODELS = Path(__file__).parent / "triton_models"
CALLABLE = "gpuserve.backends.python_backend.triton_model:TritonModel"
_TYPES = {"FP32": np.float32, "INT32": np.int32, "BYTES": np.object_}
TIMEOUT_S = 20.0


def entry(
    name: str, folder: Path | None = None, config: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A model of the folder with its name, whose ``config`` is in Triton's words."""
    kwargs: dict[str, Any] = {"model_dir": str(folder or MODELS / name)}
    if config is not None:
        kwargs["config"] = json.dumps(
            {"name": name, "max_batch_size": 0, "input": [], "output": [], **config}
        )
    return {"name": name, "callable": CALLABLE, "kwargs": kwargs, **more}


def said(name: str, datatype: str, *dims: int, **more: Any) -> dict[str, Any]:
    """A tensor in a model configuration."""
    return {"name": name, "data_type": f"TYPE_{datatype}", "dims": list(dims), **more}


def tensor(name: str, datatype: str, array: Any) -> grpcclient.InferInput:
    values = np.array(array, _TYPES[datatype])
    made = grpcclient.InferInput(name, values.shape, datatype)
    made.set_data_from_numpy(values)
    return made


def stream(address: str, model: str, *inputs: grpcclient.InferInput, **more: Any) -> Iterator[Any]:
    """The responses of a decoupled model, each (result, error), to the final one, which may be empty."""
    came: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        client.async_stream_infer(model, list(inputs), enable_empty_final_response=True, **more)
        while True:
            result, error = came.get(timeout=TIMEOUT_S)
            yield result, error
            if error is not None or result.get_response().parameters["triton_final_response"].bool_param:
                return
