"""A server whose models are on GPUs, and clients with tensors in device memory, for the device tests.

No test is here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http
from cuda_exporter import DeviceMemory
from gpu_machine import GpuMachine, RealMachine
from numpy.typing import NDArray
from serving import GPUSERVE, Addresses, serving

MIB = 1 << 20
MODELS = Path(__file__).resolve().parent / "models" / "device_regions.py"


def tensor(name: str, dtype: str, *shape: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), **more}


def model(
    name: str,
    attribute: str,
    inputs: list[Any],
    outputs: list[Any],
    device: str = "cuda:0",
    count: int = 1,
    **more: Any,
) -> dict[str, Any]:
    return {
        "name": name,
        "callable": f"{MODELS}:{attribute}",
        "inputs": inputs,
        "outputs": outputs,
        "max_batch_size": 8,
        "instances": [{"device": device, "count": count}],
        **more,
    }


@contextlib.contextmanager
def serve(
    machine: GpuMachine | RealMachine, folder: Path, models: list[dict[str, Any]]
) -> Iterator[Addresses]:
    """The server of these models, whose workers see the GPUs of the machine."""
    config = folder / "config.yaml"  # JSON is YAML
    config.write_text(json.dumps({"server": {"log_format": "json", "host": "127.0.0.1"}, "models": models}))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.environ.items():
            patch.setenv(name, value)
        with serving(GPUSERVE, "serve", str(config)) as addresses:
            patch.undo()
            yield addresses


@contextlib.contextmanager
def client_of(protocol: str, server: Addresses) -> Iterator[Any]:
    """A client of tritonclient."""
    made = _library(protocol).InferenceServerClient(server.grpc if protocol == "grpc" else server.http)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def registered(
    client: Any, name: str, memory: DeviceMemory, nbytes: int = 0, device: int = 0
) -> Iterator[None]:
    """Memory that the server knows by a name."""
    client.register_cuda_shared_memory(name, memory.handle_base64, device, nbytes or memory.nbytes)
    try:
        yield
    finally:
        client.unregister_cuda_shared_memory(name)


def infer_input(
    client: Any, array: NDArray[Any], datatype: str, region: str = "", offset: int = 0, nbytes: int = 0
) -> Any:
    """The input x: in a region where one is named, in the request otherwise."""
    made = _library(client).InferInput("x", list(array.shape), datatype)
    if region:
        made.set_shared_memory(region, nbytes or array.nbytes, offset)
    else:
        made.set_data_from_numpy(array)
    return made


def into(client: Any, region: str, nbytes: int, offset: int = 0) -> Any:
    """The output y, wanted in a region."""
    made = _library(client).InferRequestedOutput("y")
    made.set_shared_memory(region, nbytes, offset)
    return made


def infer(client: Any, name: str, inputs: list[Any], outputs: list[Any] | None = None) -> Any:
    """One request; every output is in the answer where none is named."""
    return client.infer(name, inputs, outputs=outputs)


def texts(client: Any) -> dict[str, tuple[int, int]]:
    """(device, nbytes) of each region that is listed."""
    status = client.get_cuda_shared_memory_status()
    if isinstance(status, list):
        return {one["name"]: (one["device_id"], one["byte_size"]) for one in status}
    return {name: (one.device_id, one.byte_size) for name, one in status.regions.items()}


def running(server: Addresses, name: str) -> float:
    """How many requests of a model run."""
    with tritonclient.http.InferenceServerClient(server.http) as client:
        page = client._get("metrics", None, None).read().decode()
    key = f'gpuserve_running_requests{{model="{name}"'
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(key))


def protocol_of(client: Any) -> str:
    """ "grpc" or "http"."""
    return "grpc" if isinstance(client, tritonclient.grpc.InferenceServerClient) else "http"


def _library(client: Any) -> Any:
    is_grpc = client == "grpc" or (client != "http" and protocol_of(client) == "grpc")
    return tritonclient.grpc if is_grpc else tritonclient.http
