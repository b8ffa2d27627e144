"""How a server is at one moment: what its status says, with the rates that its front has measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuserve.control.messages import Rates
from gpuserve.journal.kinds import EventKind

_OF_SERVER: Final = ("name", "version", "state", "ready", "uptime_s")
_OF_MODEL: Final = (
    "requests_per_s", "failures_per_s", "rejections_per_s", "batch_size", "p50_s", "p99_s",
)  # fmt: skip
_OF_INSTANCE: Final = ("batches_per_s", "busy")
_OF_GPU: Final = ("device", "uuid", "utilization", "memory_used_nbytes", "memory_nbytes")


def sample(status: Mapping[str, Any], rates: Rates, number: int, time_s: float) -> dict[str, Any]:
    """Put a sample together from a status document and the rates of the same time."""
    server = {key: status["server"][key] for key in _OF_SERVER}
    server |= {"requests_per_s": rates.requests_per_s, "connections": rates.connections}
    models = {(name, version): values for name, version, *values in rates.models}
    instances = {(model, version, name): values for model, version, name, *values in rates.instances}
    return {
        "time": round(time_s, 3),
        "number": number,
        "kind": EventKind.SAMPLE.value,
        "server": server,
        "models": [_model(one, models, instances) for one in status["models"]],
        "gpus": [dict(zip(_OF_GPU, one, strict=True)) for one in rates.gpus],
        "doors": status["server"]["doors"],
    }


def _model(
    row: Mapping[str, Any],
    models: Mapping[tuple[str, int], list[Any]],
    instances: Mapping[tuple[str, int, str], list[Any]],
) -> dict[str, Any]:
    name, version = row["name"], row["version"]
    return {
        **row,
        **_named(_OF_MODEL, models.get((name, version))),
        "instances": [
            {**one, **_named(_OF_INSTANCE, instances.get((name, version, one["name"])))}
            for one in row["instances"]
        ],
    }


def _named(names: tuple[str, ...], values: list[Any] | None) -> dict[str, Any]:
    """Give values by name; null where the front tells nothing of that, as of a model that is not served."""
    return dict.fromkeys(names) if values is None else dict(zip(names, values, strict=True))
