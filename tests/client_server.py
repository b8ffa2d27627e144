"""The server that the clients' tests talk to: small models, one of which answers only when it is let."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import GPUSERVE, Addresses, serving

MODELS = Path(__file__).resolve().parent / "models"
PROTOCOLS = ("grpc", "http")
TIMEOUT_S = 20.0


@dataclass
class ClientServer:
    """A running server; ``open_gate`` lets the model "gate" run so many batches."""

    addresses: Addresses
    _gate: int

    def url(self, protocol: str) -> str:
        """Where the clients are to go."""
        return f"{protocol}://{getattr(self.addresses, protocol)}"

    def open_gate(self, batches: int = 1) -> None:
        os.write(self._gate, b"." * batches)


def tensor(name: str, dtype: str, *shape: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), **more}


def model(
    name: str, target: str, inputs: list[Any], outputs: list[Any], size: int, **more: Any
) -> dict[str, Any]:
    target = f"{MODELS / target.partition(':')[0]}:{target.partition(':')[2]}"
    made = {"name": name, "callable": target, "inputs": inputs, "outputs": outputs, "max_batch_size": size}
    return {**made, **more}


def unary_models(gate: Path) -> list[dict[str, Any]]:
    floats, text = [tensor("x", "FP32", -1)], [tensor("x", "BYTES", -1)]
    a, b = tensor("a", "FP32", 1), tensor("b", "FP32", 1, optional=True)
    summed = [tensor("sum", "FP32", 1), tensor("given", "BYTES", 1)]
    seen = [tensor("seen", "BYTES", 1)]
    return [
        model("echo", "v2_models.py:echo", floats, [tensor("y", "FP32", -1)], 64, version=3),
        model("flat", "v2_models.py:echo_list", floats, [tensor("y", "FP32", -1)], 0),
        model("text", "v2_models.py:echo", text, [tensor("y", "BYTES", -1)], 8),
        model("optional", "v2_models.py:optional", [a, b], summed, 8),
        model("parameters", "v2_models.py:parameters", floats, [*seen, tensor("wanted", "BYTES", 1)], 4),
        model("raises", "raises.py:always", floats, [tensor("y", "FP32", -1)], 4),
        model("gate", "v2_models.py:Gate", [tensor("x", "INT32", 1)], seen, 1, kwargs={"path": str(gate)}),
    ]


def decoupled_models() -> list[dict[str, Any]]:
    numbers = [tensor("x", "INT32", -1)], [tensor("y", "INT32", -1)]
    names = ("count", "each_to_its_own", "plain", "fails_half_way", "endless", "waits_for_ever")
    made = [model(name, f"streams.py:{name}", *numbers, 4, decoupled=True) for name in names]
    sees = [tensor("x", "FP32", -1)], [tensor("seen", "BYTES", 1)]
    made.append(model("tells", "streams_of_parameters.py:tells", *sees, 4, decoupled=True))
    made.append(model("coupled", "streams.py:awaited", *numbers, 0))
    return made


@contextlib.contextmanager
def client_server(folder: Path, models: list[dict[str, Any]], **settings: Any) -> Iterator[ClientServer]:
    """A server of these models. The gate is a FIFO in ``folder``."""
    from config_file import write_config

    config = write_config(folder, models, host="127.0.0.1", **settings)
    gate = os.open(gate_of(folder), os.O_RDWR)
    try:
        with serving(GPUSERVE, "serve", str(config)) as addresses:
            yield ClientServer(addresses, gate)
            os.write(gate, b"." * 100)  # what a failed test left there is to end
    finally:
        os.close(gate)


def gate_of(folder: Path) -> Path:
    """The gate's FIFO, made at first."""
    path = folder / "gate"
    if not path.exists():
        os.mkfifo(path)
    return path


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
