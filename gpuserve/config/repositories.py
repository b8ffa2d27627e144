"""Repositories of a running server besides Triton's: a config file, or a callable of the command line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from gpuserve.backends.registry import backend_of, is_model_path, name_of
from gpuserve.config.entries import split_callable
from gpuserve.config.fingerprints import file_fingerprint, folder_fingerprint, folders_in
from gpuserve.config.load import (
    TENSOR_FORM,
    Configuration,
    ModelDescription,
    load_data,
    load_file,
    trace_problems,
)
from gpuserve.config.precedence import Override
from gpuserve.config.problems import ConfigProblems, Origin, Problem
from gpuserve.config.yaml_document import Path
from gpuserve.model.spec import ModelSpec

_MODEL: Path = ("models", 0)


@dataclass(frozen=True)
class CallableFlags:
    """The flags that describe the single model; empty or None if not given."""

    name: str | None = None
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    max_batch_size: int | None = None
    devices: Sequence[str] = ()
    instances: int | None = None

    def given(self) -> list[str]:
        names = ("--name", "--input", "--output", "--max-batch-size", "--device", "--instances")
        values = dataclasses.astuple(self)
        return [name for name, one in zip(names, values, strict=True) if one not in (None, (), [])]


def is_callable_path(target: str) -> bool:
    """Return whether a target names a callable or a model file, and not a config."""
    if is_model_file(target) or is_python_file(target):
        return True
    try:
        split_callable(target)
    except ValueError:
        return False
    return not os.path.exists(target)


def is_model_file(target: str) -> bool:
    return is_model_path(target) and (not os.path.isdir(target) or backend_of(target) is not None)


def is_python_file(target: str) -> bool:
    """Return whether a target is a Python file, whose only callable is served."""
    return target.endswith(".py") and os.path.isfile(target)


def load_callable(
    target: str, flags: CallableFlags, server: Sequence[Override], environ: Mapping[str, str]
) -> Configuration:
    base_dir = os.getcwd()
    overrides = _overrides(flags)
    # The file existed when the target was recognized.
    if target.endswith(".py") and not os.path.isfile(target):
        raise ConfigProblems([Problem(target, f"there is no file {target!r} in {base_dir}", Origin.FLAG)])
    data = {"models": [entry_of(target, base_dir)]}
    return load_data(data, target, base_dir, environ, [*overrides, *server])


def entry_of(target: str, base_dir: str) -> dict[str, Any]:
    """Return the entry of a config file that a callable's path stands for, and of the only callable of a
    Python file, with its declaration. Raise ConfigProblems if the file has several callables, or none.
    """
    if not is_python_file(target):
        return _named(target)
    from gpuserve.model.describe import CallableQuestion, ask_callables  # most targets are no Python files

    (answer,) = ask_callables([CallableQuestion(target, base_dir, {})])
    if answer.problem is not None:
        raise ConfigProblems([Problem(target, answer.problem, Origin.ATTRIBUTE)])
    return {**_named(answer.path), **answer.declared}


def _named(target: str) -> dict[str, Any]:
    name = name_of(target) if is_model_file(target) else split_callable(target)[1].rpartition(".")[2]
    return {"name": name, "callable": target}


def _overrides(flags: CallableFlags) -> list[Override]:
    single = {"name": ("--name", flags.name), "max_batch_size": ("--max-batch-size", flags.max_batch_size)}
    overrides = [
        Override((*_MODEL, key), value, label, Origin.FLAG)
        for key, (label, value) in single.items()
        if value is not None
    ]
    for key, flag, texts in (("inputs", "--input", flags.inputs), ("outputs", "--output", flags.outputs)):
        overrides += _list(key, flag, texts, [_tensor(text, flag) for text in texts])
    count = flags.instances
    if flags.devices or count is not None:
        devices = flags.devices or ("cpu",)
        overrides += _list("instances", "--device", devices, [{"device": device} for device in devices])
        paths = [(*_MODEL, "instances", index, "count") for index in range(len(devices))]
        overrides += [Override(one, count, "--instances", Origin.FLAG) for one in paths if count is not None]
    return overrides


def _list(key: str, flag: str, texts: Sequence[str], values: Sequence[Any]) -> list[Override]:
    """Return overrides of a whole list and of each entry, whose mistakes name its own flag."""
    if not values:
        return []
    path = (*_MODEL, key)
    entries = [
        Override((*path, index), value, f"{flag} {text}", Origin.FLAG)
        for index, (text, value) in enumerate(zip(texts, values, strict=True))
    ]
    return [Override(path, list(values), flag, Origin.FLAG), *entries]


def _tensor(text: str, flag: str) -> dict[str, Any]:
    """Return the tensor in ``image:uint8:224,224,3``; the shape may be empty."""
    parts = text.rsplit(":", 2)
    try:
        name, dtype, dims = parts
        shape = [int(dim) for dim in dims.split(",")] if dims else []
    except ValueError:
        problem = Problem(flag, f"expected {TENSOR_FORM}, given {text!r}", Origin.FLAG)
        raise ConfigProblems([problem]) from None
    return {"name": name, "dtype": dtype, "shape": shape}


#: The key of the config file's own fingerprint; no model can have this name.
WHOLE: Final = ""


class FileRepository:
    """A config file, read again for each load and each reload, under the environment and the flags of the
    start. ``start`` has the models as declared, not placed.
    """

    def __init__(
        self, path: str, environ: Mapping[str, str], flags: Sequence[Override], start: Configuration
    ) -> None:
        self.start = self._last = start
        self.path = path
        self._load = partial(load_file, path, dict(environ), flags)
        self._files = named_files(start)
        self.start_fingerprints = self.fingerprints()

    def names(self) -> Sequence[str]:
        return tuple(dict.fromkeys(one.name for one in self._last.models))

    def read(self, model: str) -> Sequence[ModelSpec]:
        """Return a model's versions in the current file, asking only its callables; raise ConfigProblems."""
        others = [one for one in self._last.descriptions if one.model != model]
        return [one for one in self._read(others).models if one.name == model]

    def read_all(self, changed: Collection[str] | None = None) -> Configuration:
        """Return the current configuration, or raise ConfigProblems. With ``changed``, only callables of
        these models are asked again, and a model whose callable cannot be asked is ``broken``.
        """
        if changed is None:
            return self._read(())
        known = self._last.descriptions
        return self._read([one for one in known if one.model not in changed], known)

    def _read(
        self, known: Iterable[ModelDescription], stale: Iterable[ModelDescription] = ()
    ) -> Configuration:
        configuration = self._load(known=known, stale=stale)
        if problems := trace_problems(configuration):
            raise ConfigProblems(problems)
        self._files = named_files(configuration, self._files)
        self._last = configuration
        return configuration

    def fingerprints(self) -> Mapping[Hashable, Hashable]:
        """Return the fingerprints of the config and of each model's files; may be called from any thread."""
        return {WHOLE: file_fingerprint(self.path), **fingerprints_of(self._files)}

    def folders(self) -> Collection[str]:
        return {self.start.base_dir, *folders_of(self._files)}


class CallableSource(FileRepository):
    """One model without a config file, asked again for each load and reload, with the flags of the start."""

    def __init__(
        self, target: str, flags: CallableFlags, server: Sequence[Override], environ: Mapping[str, str]
    ) -> None:
        self._load_model = partial(load_callable, target, flags, server, dict(environ))
        super().__init__("", environ, server, self._load_model())

    def _read(self, *_descriptions: Iterable[ModelDescription]) -> Configuration:
        self._last = self._load_model()
        return self._last

    def read_all(self, changed: Collection[str] | None = None) -> Configuration:
        """Return the current configuration, or raise ConfigProblems; with ``changed``, mark it ``broken``."""
        try:
            return self._read()
        except ConfigProblems as error:
            if changed is None:
                raise
            return dataclasses.replace(self._last, broken=dict.fromkeys(self.names(), error))


def named_files(
    configuration: Configuration, before: Mapping[str, Collection[str]] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return, by model, existing files and model folders that it names, or that were there ``before``."""
    found: dict[str, dict[str, None]] = {}
    for entry in configuration.entries.models:
        known = (before or {}).get(entry.name, ())
        target = entry.callable or ""
        named = [target.partition(":")[0], *(one for one in entry.kwargs.values() if isinstance(one, str))]
        paths = [os.path.join(configuration.base_dir, one) for one in named if one]
        there = [one for one in paths if os.path.isfile(one) or one in known]
        if is_model_path(target) and os.path.isdir(paths[0]):
            there.append(paths[0])
        found.setdefault(entry.name, {}).update(dict.fromkeys(there))
    return {name: tuple(paths) for name, paths in found.items()}


def fingerprints_of(files: Mapping[str, Sequence[str]]) -> dict[Hashable, Hashable]:
    found: dict[Hashable, Hashable] = {}
    for model, paths in files.items():
        kinds = [folder_fingerprint if os.path.isdir(path) else file_fingerprint for path in paths]
        found[model] = tuple(kind(path) for kind, path in zip(kinds, paths, strict=True))
    return found


def folders_of(files: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    for path in (path for paths in files.values() for path in paths):
        found.add(os.path.dirname(path))
        found.update(folders_in(path) if os.path.isdir(path) else [os.path.dirname(os.path.realpath(path))])
    return found
