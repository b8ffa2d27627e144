"""One entry of ``models`` in a config file: one class a mapping. Options of the model are rows of
``declare/spec.py``; here is what only a file has. What must hold between several keys is in ``rules``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gpuserve.config.entries.fields import (
    FILLED,
    Entry,
    EntryOf,
    Key,
    callable_path,
    keys_of,
    model_name,
    spellings_of,
)
from gpuserve.config.entries.kinds import Arguments, ListOf, Mistake, OrNull, Place, Text
from gpuserve.declare.model import ModelWarmup, Tensor
from gpuserve.declare.spec import MAX_INSTANCES, DeclaredInstances, ModelSpec, SequenceBatching, StepSpec


class StepEntry(Entry):
    """One model that an ensemble asks."""

    keys: ClassVar = keys_of(StepSpec)


class EnsembleEntry(Entry):
    """Models that answer a request together."""

    keys: ClassVar = {
        "steps": Key(
            ListOf(EntryOf(StepEntry), some=True),
            "In any order: a step runs as soon as what it reads is there.",
        )
    }


class SequenceBatchingEntry(Entry):
    """How the requests of a model belong together."""

    keys: ClassVar = keys_of(SequenceBatching)
    spellings: ClassVar = spellings_of(SequenceBatching)


class InputEntry(Entry):
    """A tensor that a request brings."""

    keys: ClassVar = keys_of(Tensor, "labels")


class OutputEntry(Entry):
    """A tensor that the model answers with."""

    keys: ClassVar = {
        **keys_of(Tensor, "optional", "memory"),
        "label_filename": Key(
            OrNull(FILLED),
            "A text file with one label a line, in place of labels; beside this file.",
            default=None,
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
    """A batch that every instance runs before the model is ready."""

    keys: ClassVar = keys_of(ModelWarmup)


class ModelEntry(Entry):
    """One version of a model: its callable, its tensors, and how it runs."""

    keys: ClassVar = {
        **keys_of(ModelSpec),
        "name": Key(
            Text(reads=model_name),
            "Name in requests: letters, digits, dots, underscores and dashes, at most 128.",
        ),
        "callable": Key(
            OrNull(Text(reads=callable_path)),
            "Inference callable: file.py:attribute, beside this file, or package.module:attribute; or a "
            "model file, such as model.onnx. Not for an ensemble.",
            default=None,
            examples=("linear.py:Linear", "model.onnx"),
        ),
        "ensemble": Key(
            OrNull(EntryOf(EnsembleEntry)),
            "In place of a callable: other models of this file, asked step by step.",
            default=None,
        ),
        "python": Key(
            OrNull(FILLED),
            "Python environment of the workers: an interpreter, a folder with bin/python, or a .tar.gz of "
            "one; beside this file. null: the server's own.",
            default=None,
            examples=("envs/torch/bin/python", "envs/torch.tar.gz"),
        ),
        "kwargs": Key(Arguments(), "Arguments when the attribute is a class or a factory.", make=dict),
        "instances": Key(
            Instances(EntryOf(InstancesEntry), some=True),
            "Where the model runs: one worker process each. A number: so many on the CPU.",
            make=lambda: [InstancesEntry({})],
        ),
        "inputs": Key(
            ListOf(EntryOf(InputEntry)),
            "Tensors of a request; may be empty. Left out: as the callable says.",
            make=list,
        ),
        "outputs": Key(
            ListOf(EntryOf(OutputEntry)),
            "Tensors of a response; may be empty. Left out: as the callable says.",
            make=list,
        ),
        "sequence_batching": Key(
            OrNull(EntryOf(SequenceBatchingEntry)),
            "The requests belong to sequences; null: they do not.",
            default=None,
        ),
        "warmup": Key(ListOf(EntryOf(WarmupEntry)), "Batches to run before the model is ready.", make=list),
    }
    spellings: ClassVar = spellings_of(ModelSpec)
