"""``gpuserve serve model.py:callable``: a configuration without a file. The tensors come from flags, or from
the callable itself, which a child process asks: nothing is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuserve.config.described import TENSOR_FORM
from gpuserve.config.entries.fields import split_callable
from gpuserve.config.load import Configuration, load_data
from gpuserve.config.messages import ConfigProblems, Origin, Problem
from gpuserve.config.positions import Path
from gpuserve.config.precedence import Override
from gpuserve.runtimes.table import is_model_path, name_of, runtime_of

_MODEL: Path = ("models", 0)


@dataclass(frozen=True)
class CallableFlags:
    """The flags that describe the one model; empty or None where they were not given."""

    name: str | None = None
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    max_batch_size: int | None = None
    devices: Sequence[str] = ()
    instances: int | None = None

    def given(self) -> list[str]:
        flags = {
            "--name": self.name,
            "--input": self.inputs or None,
            "--output": self.outputs or None,
            "--max-batch-size": self.max_batch_size,
            "--device": self.devices or None,
            "--instances": self.instances,
        }
        return [name for name, value in flags.items() if value is not None]


def is_callable_path(target: str) -> bool:
    """Whether a target names a callable, or a model file, and not a config."""
    if is_model_file(target) or is_python_file(target):
        return True
    try:
        split_callable(target)
    except ValueError:
        return False
    return not os.path.exists(target)


def is_model_file(target: str) -> bool:
    return is_model_path(target) and (not os.path.isdir(target) or runtime_of(target) is not None)


def is_python_file(target: str) -> bool:
    """Whether a target is a file of Python, whose only callable is meant."""
    return target.endswith(".py") and os.path.isfile(target)


def load_callable(
    target: str, flags: CallableFlags, server: Sequence[Override], environ: Mapping[str, str]
) -> Configuration:
    """Make the configuration of one callable, with paths from the current directory. ConfigProblems: a flag
    is wrong, no tensors are known, or the callable cannot be imported.
    """
    base_dir = os.getcwd()
    overrides = _overrides(flags)
    if target.endswith(".py") and not os.path.isfile(target):  # it was there when it was recognized
        raise ConfigProblems([Problem(target, f"there is no file {target!r} in {base_dir}", Origin.FLAG)])
    model = entry_of(target, base_dir)
    return load_data({"models": [model]}, target, base_dir, environ, [*overrides, *server])


def entry_of(target: str, base_dir: str) -> dict[str, Any]:
    """The entry of a config file that a callable's path means, with what it says of itself where it had to be
    asked. ConfigProblems: the file does not say which callable is meant.
    """
    return _of_python_file(target, base_dir) if is_python_file(target) else _named(target)


def _named(target: str) -> dict[str, Any]:
    name = name_of(target) if is_model_file(target) else split_callable(target)[1].rpartition(".")[2]
    return {"name": name, "callable": target}


def _of_python_file(file: str, base_dir: str) -> dict[str, Any]:
    """The entry of the only callable of a file, with all that it says of itself: it is not asked twice."""
    from gpuserve.describe.asking import Question, ask  # most targets are no such files

    (answer,) = ask([Question(file, base_dir, {})])
    if answer.problem is not None:
        raise ConfigProblems([Problem(file, answer.problem, Origin.ATTRIBUTE)])
    return {**_named(answer.path), **answer.declared}


def _overrides(flags: CallableFlags) -> list[Override]:
    single = {"name": ("--name", flags.name), "max_batch_size": ("--max-batch-size", flags.max_batch_size)}
    overrides = [
        Override((*_MODEL, key), value, label, Origin.FLAG)
        for key, (label, value) in single.items()
        if value is not None
    ]
    overrides += _list("inputs", "--input", flags.inputs, [_tensor(text, "--input") for text in flags.inputs])
    overrides += _list(
        "outputs", "--output", flags.outputs, [_tensor(text, "--output") for text in flags.outputs]
    )
    return overrides + _instances(flags)


def _list(key: str, flag: str, texts: Sequence[str], values: Sequence[Any]) -> list[Override]:
    """Override a whole list, and each entry once more so that a mistake in it names its own flag."""
    if not values:
        return []
    path = (*_MODEL, key)
    entries = [
        Override((*path, index), value, f"{flag} {text}", Origin.FLAG)
        for index, (text, value) in enumerate(zip(texts, values, strict=True))
    ]
    return [Override(path, list(values), flag, Origin.FLAG), *entries]


def _tensor(text: str, flag: str) -> dict[str, Any]:
    """Read ``image:uint8:224,224,3`` (the shape may be empty); ConfigProblems: it has another form."""
    parts = text.rsplit(":", 2)
    try:
        name, dtype, dims = parts
        shape = [int(dim) for dim in dims.split(",")] if dims else []
    except ValueError:
        problem = Problem(flag, f"expected {TENSOR_FORM}, given {text!r}", Origin.FLAG)
        raise ConfigProblems([problem]) from None
    return {"name": name, "dtype": dtype, "shape": shape}


def _instances(flags: CallableFlags) -> list[Override]:
    if not flags.devices and flags.instances is None:
        return []
    devices = flags.devices or ("cpu",)
    overrides = _list("instances", "--device", devices, [{"device": device} for device in devices])
    if flags.instances is not None:
        overrides += [
            Override((*_MODEL, "instances", index, "count"), flags.instances, "--instances", Origin.FLAG)
            for index in range(len(devices))
        ]
    return overrides
