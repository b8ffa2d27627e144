"""What a server says of itself where it is printed, or is the last line of a notebook's cell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gpuserve.display.html import line, table
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec

_HEAD: Final = ("model", "version", "instances", "inputs", "outputs", "batches")

#: Addresses that do not say by themselves what they are for.
_NAMED: Final = {"grpc": "gRPC {}", "health": "health {}"}


def server_text(kind: str, models: Sequence[ModelSpec], addresses: Mapping[str, str]) -> str:
    """Write one line: which models, and where they are reached."""
    names = [one.name if one.version == 1 else f"{one.name} {one.version}" for one in models]
    return f"<{kind}: {', '.join(names) or 'no models'}; {where(addresses)}>"


def server_html(kind: str, models: Iterable[ModelSpec], addresses: Mapping[str, str]) -> str:
    """Write the same as a small table, with the models' tensors."""
    return line(kind, where(addresses)) + table(_HEAD, map(_row, models))


def where(addresses: Mapping[str, str]) -> str:
    """Write the addresses of a server that runs, for a sentence; else that it does not."""
    if not addresses:
        return "not running"
    return "running at " + ", ".join(_NAMED.get(role, "{}").format(one) for role, one in addresses.items())


def _row(model: ModelSpec) -> Sequence[object]:
    devices = ", ".join(one.device for one in model.instances) or "ensemble"
    batches = f"up to {model.max_batch_size}" if model.max_batch_size else "none"
    return model.name, model.version, devices, _tensors(model.inputs), _tensors(model.outputs), batches


def _tensors(tensors: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{one.name}: {one.datatype} {list(one.shape)}" for one in tensors)
