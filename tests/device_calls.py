"""Requests of any size to a model with one input ``x`` and one output ``y``, both FP32, over HTTP as binary
data.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from operated import Client


def infer_binary(client: Client, model: str, array: Any) -> tuple[int, Any]:
    """The status, and the output or the error's text."""
    array = np.asarray(array, np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": array.shape}
    tensor["parameters"] = {"binary_data_size": array.nbytes}
    asked = [{"name": "y", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": [tensor], "outputs": asked}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    client.connection.request("POST", f"/v2/models/{model}/infer", head + array.tobytes(), headers)
    response = client.connection.getresponse()
    answer = response.read()
    if response.status != 200:
        return response.status, json.loads(answer)["error"]
    length = int(response.headers["Inference-Header-Content-Length"])
    shape = json.loads(answer[:length])["outputs"][0]["shape"]
    return 200, np.frombuffer(answer[length:], np.float32).reshape(shape)
