"""The models that both servers get, each declared once, and how that is written for each server.

Values and files only; nothing is started here. ``models/`` holds what they compute.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SOURCES = Path(__file__).parent / "models"
#: v2 name -> the name in Triton's configuration, where it is another.
_TRITON_TYPES = {"BYTES": "STRING"}
DATATYPES = (
    *("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
    *("FP16", "BF16", "FP32", "FP64", "BYTES"),
)


@dataclass(frozen=True, slots=True)
class Declared:
    """A tensor of a model; ``shape`` is without the batch axis where the model batches."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Control:
    """An input that tells of the sequence; ``kind`` as gpuserve names it."""

    name: str
    kind: str
    datatype: str


@dataclass(frozen=True, slots=True)
class Model:
    """One model. ``behaviour`` names the callable in both files of ``models/``."""

    name: str
    behaviour: str
    inputs: tuple[Declared, ...]
    outputs: tuple[Declared, ...]
    max_batch_size: int = 0
    decoupled: bool = False
    strategy: str = ""
    controls: tuple[Control, ...] = ()
    loaded: bool = True


def _echo(name: str, datatype: str, *shape: int, size: int = 0, **more: Any) -> Model:
    return Model(
        name, "echo", (Declared("x", datatype, shape),), (Declared("y", datatype, shape),), size, **more
    )


_INT32_1, _BYTES_1 = ("INT32", (1,)), ("BYTES", (1,))
_LABELS = ("cat", "dog", "bird", "fish")

MODELS: tuple[Model, ...] = (
    *(_echo(f"echo_{one}", one, -1, size=8) for one in DATATYPES),
    _echo("flat", "FP32", -1, 2),
    _echo("any_length", "FP32", -1),
    _echo("two_variable", "FP32", -1, -1),
    _echo("one_string", "BYTES", 1),
    _echo("pair", "FP32", 4, size=8),
    _echo("unloaded", "FP32", 1, loaded=False),
    Model(
        "labelled",
        "echo",
        (Declared("x", "FP32", (4,)),),
        (Declared("y", "FP32", (4,), labels=_LABELS),),
        8,
    ),
    Model(
        "simple",
        "add_sub",
        (Declared("INPUT0", "INT32", (16,)), Declared("INPUT1", "INT32", (16,))),
        (Declared("OUTPUT0", "INT32", (16,)), Declared("OUTPUT1", "INT32", (16,))),
        8,
    ),
    Model(
        "optional",
        "optional",
        (Declared("a", "FP32", (1,)), Declared("b", "FP32", (1,), optional=True)),
        (Declared("sum", "FP32", (1,)), Declared("given", *_BYTES_1)),
        8,
    ),
    Model("fails", "fails", (Declared("x", *_INT32_1),), (Declared("y", *_INT32_1),)),
    Model(
        "parameters",
        "parameters",
        (Declared("x", *_INT32_1),),
        (Declared("seen", *_BYTES_1),),
    ),
    Model(
        "repeat", "repeat", (Declared("count", *_INT32_1),), (Declared("number", *_INT32_1),), decoupled=True
    ),
    Model(
        "text",
        "text",
        (Declared("PROMPT", *_BYTES_1), Declared("COUNT", *_INT32_1, optional=True)),
        (Declared("TEXT", *_BYTES_1),),
        decoupled=True,
    ),
    Model("shout", "shout", (Declared("PROMPT", *_BYTES_1),), (Declared("TEXT", *_BYTES_1),), 4),
    Model(
        "accumulate",
        "accumulate",
        (Declared("INPUT", *_INT32_1),),
        (Declared("OUTPUT", *_INT32_1),),
        4,
        strategy="oldest",
        controls=(Control("START", "start", "INT32"), Control("CORRID", "corrid", "UINT64")),
    ),
)


def loaded_names() -> tuple[str, ...]:
    """The models that are there from the start."""
    return tuple(model.name for model in MODELS if model.loaded)


def write_triton_repository(folder: Path) -> None:
    """A model repository of all models."""
    shutil.rmtree(folder, ignore_errors=True)
    for model in MODELS:
        version = folder / model.name / "1"
        version.mkdir(parents=True)
        shutil.copy2(_SOURCES / "triton_model.py", version / "model.py")
        (version / "behaviour.txt").write_text(model.behaviour)
        (version.parent / "config.pbtxt").write_text("\n".join(_triton_config(model)))
        for output in model.outputs:
            if output.labels:
                (version.parent / "labels.txt").write_text("\n".join(output.labels) + "\n")


def _triton_config(model: Model) -> Iterator[str]:
    yield 'backend: "python"'
    yield f"max_batch_size: {model.max_batch_size}"
    yield "instance_group [{ count: 1, kind: KIND_CPU }]"
    for tensor in model.inputs:
        yield f"input [{{ {_triton_tensor(tensor)} }}]"
    for tensor in model.outputs:
        labels = ' label_filename: "labels.txt"' if tensor.labels else ""
        yield f"output [{{ {_triton_tensor(tensor)}{labels} }}]"
    if model.decoupled:
        yield "model_transaction_policy { decoupled: true }"
    if model.strategy:
        controls = " ".join(map(_triton_control, model.controls))
        yield f"sequence_batching {{ {model.strategy} {{ }} {controls} }}"
    elif model.max_batch_size and not model.decoupled:
        yield "dynamic_batching { }"


def _triton_tensor(tensor: Declared) -> str:
    datatype = _TRITON_TYPES.get(tensor.datatype, tensor.datatype)
    optional = " optional: true" if tensor.optional else ""
    return f'name: "{tensor.name}" data_type: TYPE_{datatype} dims: {list(tensor.shape)}{optional}'


def _triton_control(control: Control) -> str:
    told = f"data_type: TYPE_{control.datatype}" if control.kind == "corrid" else "int32_false_true: [0, 1]"
    kind = f"CONTROL_SEQUENCE_{control.kind.upper()}"
    return f'control_input [{{ name: "{control.name}" control [{{ kind: {kind} {told} }}] }}]'


def write_gpuserve_config(path: Path) -> None:
    """The config file of this server: JSON is YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    server = {
        "host": "127.0.0.1",
        "compat_name": "triton",
        "model_control": "explicit",
        "load_at_start": list(loaded_names()),
    }
    path.write_text(json.dumps({"server": server, "models": list(map(_gpuserve_model, MODELS))}, indent=1))


def _gpuserve_model(model: Model) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": model.name,
        "callable": f"{_SOURCES / 'gpuserve_callables.py'}:{model.behaviour}",
        "inputs": [{**_gpuserve_tensor(one), "optional": one.optional} for one in model.inputs],
        "outputs": [{**_gpuserve_tensor(one), "labels": list(one.labels)} for one in model.outputs],
        "max_batch_size": model.max_batch_size,
        "decoupled": model.decoupled,
    }
    if model.strategy:
        controls = [{"name": one.name, "kind": one.kind, "dtype": one.datatype} for one in model.controls]
        entry["sequence_batching"] = {"strategy": model.strategy, "controls": controls}
    return entry


def _gpuserve_tensor(tensor: Declared) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": tensor.datatype, "shape": list(tensor.shape)}
