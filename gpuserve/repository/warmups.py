"""The warm-ups of a ``ModelConfig`` to those of an entry. Pure: their files are looked for where entries are
checked.
"""

from __future__ import annotations

import os
from typing import Any, Final

from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.config.positions import Path
from gpuserve.repository.draft import Draft
from gpuserve.repository.folders import ModelFolder
from gpuserve.repository.scheduling import datatype

#: The folder of a model where the files of its warm-ups are.
_FOLDER: Final = "warmup"


def warm_up(draft: Draft, folder: ModelFolder) -> None:
    warmups = []
    for number, one in enumerate(draft.message.model_warmup):
        origin, into = ("model_warmup", number), ("warmup", number)
        draft.came(into, origin)
        for key in ("name", "batch_size", "count"):
            draft.came((*into, key), (*origin, key))
        inputs = {}
        for name, given in sorted(one.inputs.items()):
            at = (*origin, "inputs", name)
            draft.came((*into, "inputs", name), at)
            inputs[name] = _input(draft, given, at, folder)
        warmups.append(
            {
                "name": one.name or f"warmup {number}",
                "batch_size": one.batch_size or 1,
                "inputs": inputs,
                "count": one.count or 1,
            }
        )
    if warmups:
        draft.put("warmup", warmups, "model_warmup")


def _input(draft: Draft, given: Any, origin: Path, folder: ModelFolder) -> dict[str, Any]:
    entry: dict[str, Any] = {"shape": list(given.dims)}
    if given.data_type != pb.TYPE_INVALID:
        entry["dtype"] = datatype(given.data_type)
    match given.WhichOneof("input_data_type"):
        case "zero_data":
            entry["values"] = "zero"
        case "random_data":
            entry["values"] = "random"
        case "input_data_file":
            entry["file"] = os.path.join(os.path.abspath(folder.path), _FOLDER, given.input_data_file)
        case _:
            draft.fault(origin, "expected zero_data: true, random_data: true or input_data_file")
    return entry
