"""One server with many small models, for the tests of the protocol. Each transport has its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc._cython import cygrpc
from serving import GPUSERVE, Addresses, serving

MODELS = Path(__file__).resolve().parents[1] / "models" / "v2_models.py"
DATATYPES = (
    "BOOL",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
)


@pytest.fixture(autouse=True, scope="session")
def _grpc_aio() -> Iterator[None]:
    """Keeps grpc.aio's poller for the whole run: it goes with its last channel, whenever that is collected,
    and its sockets would be counted against whichever test runs then.
    """
    cygrpc.init_grpc_aio()
    yield
    cygrpc.shutdown_grpc_aio()


def tensor(name: str, dtype: str, *shape: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), **more}


def model(
    name: str, attribute: str, inputs: list[Any], outputs: list[Any], size: int = 0, **more: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "callable": f"{MODELS}:{attribute}",
        "inputs": inputs,
        "outputs": outputs,
        "max_batch_size": size,
        **more,
    }


def models() -> list[dict[str, Any]]:
    """echo_<DATATYPE> and flat_<DATATYPE> (not batching), and one for each other behaviour."""
    made = [
        model(f"echo_{one}", "echo", [tensor("x", one, -1)], [tensor("y", one, -1)], 64) for one in DATATYPES
    ]
    made += [
        model(f"flat_{one}", "echo_list", [tensor("x", one)], [tensor("y", one)]) for one in ("FP32", "BYTES")
    ]
    made += [
        model("cube", "echo", [tensor("x", "FP32", -1, 2, 3)], [tensor("y", "FP32", -1, 2, 3)], 8),
        model(
            "optional",
            "optional",
            [tensor("a", "FP32", 1), tensor("b", "FP32", 1, optional=True)],
            [tensor("sum", "FP32", 1), tensor("given", "BYTES", 1)],
            8,
        ),
        model(
            "parameters",
            "parameters",
            [tensor("x", "FP32", 1)],
            [tensor("seen", "BYTES", 1), tensor("wanted", "BYTES", 1)],
            4,
        ),
        model(
            "batch_rows",
            "batch_rows",
            [tensor("x", "INT32", -1)],
            [tensor("rows", "INT32", 1), tensor("y", "INT32", -1)],
            64,
            batching={"max_queue_delay_us": 20_000},
        ),
    ]
    return made


def write_config(folder: Path, entries: list[dict[str, Any]], **server: Any) -> Path:
    """A config file; JSON is YAML."""
    path = folder / "config.yaml"
    path.write_text(json.dumps({"server": {"log_format": "json", **server}, "models": entries}))
    return path


@pytest.fixture(scope="module", params=["native", "grpcio"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """The models of ``models()``, over each transport."""
    folder = tmp_path_factory.mktemp("server")
    config = write_config(folder, models(), host="127.0.0.1", transport=request.param)
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        yield addresses
