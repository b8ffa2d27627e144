"""The schema of a config file: the entry classes, the kind of value at each path, and the JSON Schema, which
``gpuserve schema`` prints. Options of a model are rows of ``model/spec.py``; the classes here add the keys
that only a file has. The names of environment variables follow from the keys.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from gpuserve.backends.registry import RUNTIMES
from gpuserve.config.entries import (
    FILLED,
    Arguments,
    Entry,
    EntryOf,
    Key,
    Kind,
    ListOf,
    MappingOf,
    Mistake,
    Place,
    Scalar,
    keys_of,
    read_callable_path,
    read_model_name,
    spellings_of,
)
from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.yaml_document import Path
from gpuserve.model.declaration import ModelWarmup, Tensor
from gpuserve.model.options import REQUIRED, Option
from gpuserve.model.spec import MAX_INSTANCES, DeclaredInstances, ModelSpec, SequenceBatching, StepSpec


class StepEntry(Entry):
    """One step of an ensemble."""

    keys: ClassVar = keys_of(StepSpec)


class EnsembleEntry(Entry):
    """The steps of an ensemble."""

    keys: ClassVar = {
        "steps": Key(
            ListOf(EntryOf(StepEntry), some=True),
            "Steps in any order: a step runs as soon as its inputs are available.",
        )
    }


class SequenceBatchingEntry(Entry):
    """Sequence batching: requests of one sequence go to one instance."""

    keys: ClassVar = keys_of(SequenceBatching)
    spellings: ClassVar = spellings_of(SequenceBatching)


class InputEntry(Entry):
    """An input tensor of a model."""

    keys: ClassVar = keys_of(Tensor, "labels")


class OutputEntry(Entry):
    """An output tensor of a model."""

    keys: ClassVar = {
        **keys_of(Tensor, "optional", "memory"),
        "label_filename": Key(
            FILLED,
            "Text file with one label per line, in place of labels; relative to this file.",
            default=None,
            nullable=True,
        ),
    }


class InstancesEntry(Entry):
    """Worker processes of a model on one device."""

    keys: ClassVar = keys_of(DeclaredInstances)


class Instances(ListOf):
    """A list of entries, or a number of processes on the CPU."""

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            return super().read(value, path, found)
        wrong: list[Mistake] = []
        made = super().read([{"count": value}], path, wrong)
        found += [one._replace(path=path) for one in wrong]
        return made

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_INSTANCES}, super().schema()]}


class WarmupEntry(Entry):
    """A warm-up batch, which every instance runs before the model is ready."""

    keys: ClassVar = keys_of(ModelWarmup)


class ModelEntry(Entry):
    """One version of a model: callable, tensors, instances and options."""

    # fmt: off
    keys: ClassVar = {
        **keys_of(ModelSpec),
        "name": Key(Scalar(str, Option("", read=read_model_name)),
            "Name in requests: letters, digits, dots, underscores and dashes, at most 128."),
        "callable": Key(Scalar(str, Option("", read=read_callable_path)),
            "Inference callable: file.py:attribute, relative to this file, or package.module:attribute; or a "
            "model file, such as model.onnx. Not for an ensemble.",
            default=None, examples=("linear.py:Linear", "model.onnx"), nullable=True),
        "runtime": Key(Scalar(str, Option("", words=tuple(RUNTIMES))),
            "Library that runs a folder of Hugging Face; null: transformers.", default=None, nullable=True),
        "ensemble": Key(EntryOf(EnsembleEntry),
            "In place of a callable: other models of this file, called step by step.", default=None,
            nullable=True),
        "python": Key(FILLED,
            "Python environment of the workers: an interpreter, a folder with bin/python, or a .tar.gz of "
            "such a folder; relative to this file. null: the environment of the server.",
            default=None, examples=("envs/torch/bin/python", "envs/torch.tar.gz"), nullable=True),
        "kwargs": Key(Arguments(), "Arguments of the attribute if it is a class or a factory.", make=dict),
        "instances": Key(Instances(EntryOf(InstancesEntry), some=True),
            "Devices and numbers of worker processes. A number: that many processes on the CPU.",
            make=lambda: [InstancesEntry({})]),
        "inputs": Key(ListOf(EntryOf(InputEntry)),
            "Input tensors; may be empty. Omitted: the callable declares them.", make=list),
        "outputs": Key(ListOf(EntryOf(OutputEntry)),
            "Output tensors; may be empty. Omitted: the callable declares them.", make=list),
        "sequence_batching": Key(EntryOf(SequenceBatchingEntry),
            "Sequence batching; null: requests belong to no sequences.", default=None, nullable=True),
        "warmup": Key(ListOf(EntryOf(WarmupEntry)),
            "Batches that every instance runs before the model is ready.", make=list),
    }
    # fmt: on
    spellings: ClassVar = spellings_of(ModelSpec)


class ServerEntry(Entry):
    """The keys of ``server``: settings that do not depend on a model."""

    keys: ClassVar = keys_of(ServerSettings)
    spellings: ClassVar = spellings_of(ServerSettings)


class ConfigFile(Entry):
    """A whole config file: the settings of the server, and the models."""

    keys: ClassVar = {
        "server": Key(
            EntryOf(ServerEntry), "Settings that do not depend on a model.", make=lambda: ServerEntry({})
        ),
        "models": Key(ListOf(EntryOf(ModelEntry), some=True), "The models to serve."),
    }


CONFIG_KEYS: Final = frozenset(ConfigFile.keys)


def kind_at(path: Path) -> Kind | None:
    """Return the kind of the value at a path, without null; None if the schema has no such path."""
    kind: Kind | None = EntryOf(ConfigFile)
    for step in path:
        kind = None if kind is None else _member(kind, step)
    return kind


def key_at(path: Path) -> Key:
    kind = kind_at(path[:-1])
    assert isinstance(kind, EntryOf)
    return kind.entry.keys[str(path[-1])]


def keys_at(path: Path) -> tuple[str, ...]:
    """Return the known keys of the mapping at a path; empty for other values and for free keys."""
    kind = kind_at(path)
    return tuple(kind.entry.keys) if isinstance(kind, EntryOf) else ()


def canonical_key(path: Path) -> str:
    """Return our name of the last key of a path, which may be Triton's, PyTriton's or a former name."""
    *parents, key = path
    kind = kind_at(tuple(parents))
    return kind.entry.spellings.get(str(key), str(key)) if isinstance(kind, EntryOf) else str(key)


def _member(kind: Kind, step: str | int) -> Kind | None:
    """Return the kind of the value one step below; below a value of any kind, any kind."""
    if isinstance(kind, EntryOf):
        key = kind.entry.keys.get(str(step))
        return None if key is None else key.kind
    if isinstance(kind, MappingOf) or (isinstance(kind, ListOf) and isinstance(step, int)):
        return kind.inner
    return kind if type(kind) is Kind else None


def json_schema() -> dict[str, Any]:
    named = {one.__name__: mapping_schema(one) for one in _entries(EntryOf(ConfigFile))}
    whole = named.pop(ConfigFile.__name__)
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "$defs": dict(sorted(named.items())), **whole}


def _entries(kind: Kind) -> Iterator[type[Entry]]:
    if isinstance(kind, EntryOf):
        yield kind.entry
        for key in kind.entry.keys.values():
            yield from _entries(key.kind)
    if kind.inner is not None:
        yield from _entries(kind.inner)


def mapping_schema(entry: type[Entry]) -> dict[str, Any]:
    required = [name for name, key in entry.keys.items() if key.is_required]
    return {
        "additionalProperties": False,
        "description": inspect.getdoc(entry),
        "properties": {name: _property(name, key) for name, key in entry.keys.items()},
        **({"required": required} if required else {}),
        "title": entry.__name__,
        "type": "object",
    }


def _property(name: str, key: Key) -> dict[str, Any]:
    is_entry = isinstance(key.kind, EntryOf)
    has_default = key.default is not REQUIRED and (key.nullable or not is_entry)
    schema = key.kind.schema()
    return {
        **({"default": copy.copy(key.default)} if has_default else {}),
        "description": key.description,
        **({"examples": [*key.examples]} if key.examples else {}),
        **({} if is_entry else {"title": name.replace("_", " ").title()}),
        **({"anyOf": [schema, {"type": "null"}]} if key.nullable else schema),
    }
