"""Servers of ``gpuserve.Server`` on free ports, and the shortest client that can ask them.

For tests, and for the programs that tests run: only numpy and the standard library besides gpuserve.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
from ingress import INGRESS_PROCESSES

from gpuserve import ModelConfig, Server, Tensor
from gpuserve_worker.protocol.tensor import BYTES, datatype_of, numpy_dtype

TIMEOUT_S = 30.0
FLOATS = Tensor((-1,), np.float32)
#: One tensor in, one out, any width, INPUT_1 and OUTPUT_1.
FLOATS_IN_AND_OUT: dict[str, Any] = {"inputs": [FLOATS], "outputs": [FLOATS]}
UNBATCHED = ModelConfig(batching=False)


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def free_server(**settings: Any) -> Server:
    """A server on free ports that ends quickly."""
    return Server(
        **{
            "http_port": 0,
            "grpc_port": 0,
            "metrics_port": 0,
            "lame_duck_s": 0,
            "ingress_processes": INGRESS_PROCESSES,
            **settings,
        }
    )


def infer(
    server: Server, model: str, parameters: dict[str, Any] | None = None, **inputs: Any
) -> dict[str, Any]:
    """The outputs by name, as arrays.

    Raises:
        Refused: the server says no.
    """
    body = {"inputs": [_tensor(name, np.asarray(value)) for name, value in inputs.items()]}
    if parameters:
        body["parameters"] = parameters  # type: ignore[assignment]
    answer = _post(f"{server.addresses['http']}/v2/models/{model}/infer", body)
    return {one["name"]: _array(one) for one in answer["outputs"]}


def ask(server: Server, model: str, *row: float) -> list[Any]:
    """The first row of the only output, for one row of INPUT_1."""
    (output,) = infer(server, model, INPUT_1=np.array([row], np.float32)).values()
    return list(output[0].tolist())


def status(server: Server, path: str) -> int:
    """The status of a GET."""
    try:
        with urllib.request.urlopen(server.addresses["http"] + path, timeout=TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


class InBackground:
    """A call in a thread of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(function, *args), daemon=True)
        self.thread.start()

    def _run(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._result = function(*args)
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """What it returned, or raised."""
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive(), "the call did not return"
        if self._error is not None:
            raise self._error
        return self._result


def _post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(error.code, json.load(error)["error"]) from None


def _tensor(name: str, array: Any) -> dict[str, Any]:
    datatype = datatype_of(array.dtype)
    values = array.ravel().tolist()
    if datatype == BYTES:
        values = [one.decode() if isinstance(one, bytes) else one for one in values]
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": values}


def _array(tensor: dict[str, Any]) -> Any:
    return np.array(tensor["data"], numpy_dtype(tensor["datatype"])).reshape(tensor["shape"])
