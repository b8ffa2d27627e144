"""Models that load, unload and ask about others, and one that says what it was asked."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from gpuserve import ModelCallError, current_model


def commanding(requests: Any) -> Any:
    """Does what a request says, as JSON, and tells what came of it."""
    return [{"said": np.array([_obey(json.loads(one["order"][0]))], dtype=object)} for one in requests]


async def commanding_async(requests: Any) -> Any:
    return commanding(requests)


def _obey(order: dict[str, Any]) -> bytes:
    model = current_model()
    try:
        match order.pop("verb"):
            case "load":
                return str(model.load_model(**order)).encode()
            case "unload":
                return str(model.unload_model(**order)).encode()
            case "ready":
                return str(model.is_model_ready(**order)).encode()
            case "log":
                model.log(order["level"], order["text"])
                return b""
            case _:
                x = {"order": np.array([b""], dtype=object)}
                return bytes(model.infer(inputs=x, **order)["said"][0])
    except ModelCallError as error:
        return f"{error.code.value}: {error}".encode()


def telling(requests: Any) -> Any:
    """Tells which sequence a request is of, and whether it begins and ends it."""
    said = []
    for one in requests:
        sequence = None if one.sequence is None else (one.sequence.id, one.sequence.start, one.sequence.end)
        said.append(json.dumps(sequence).encode())
    return [{"said": np.array([one], dtype=object)} for one in said]
