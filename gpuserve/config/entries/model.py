"""One entry of ``models`` in a config file: one class a mapping, one field a key, with its default and its
description. Options of the model are rows of ``declare/spec.py``; here is what only a file has. What must
hold between several keys is in ``rules``.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gpuserve.config.entries.fields import CallableArguments, CallablePath, Entry, ModelName, entry_of
from gpuserve.declare.model import ModelWarmup, Tensor
from gpuserve.declare.spec import Instances, ModelSpec, SequenceBatching, StepSpec

#: Their keys come from tables.
_Options: Any = entry_of(ModelSpec)
_Input: Any = entry_of(Tensor, "labels")
_Output: Any = entry_of(Tensor, "optional", "memory")
_Instances: Any = entry_of(Instances)
_Sequence: Any = entry_of(SequenceBatching)
_Step: Any = entry_of(StepSpec)
_Warmup: Any = entry_of(ModelWarmup)


class StepEntry(_Step):  # type: ignore[misc]  # its keys come from the table
    """One model that an ensemble asks."""


class EnsembleEntry(Entry):
    """Models that answer a request together."""

    steps: list[StepEntry] = Field(
        min_length=1, description="In any order: a step runs as soon as what it reads is there."
    )


class SequenceBatchingEntry(_Sequence):  # type: ignore[misc]  # as above
    """How the requests of a model belong together."""


class InputEntry(_Input):  # type: ignore[misc]  # as above
    """A tensor that a request brings."""


class OutputEntry(_Output):  # type: ignore[misc]  # as above
    """A tensor that the model answers with."""

    label_filename: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="A text file with one label a line, in place of labels; beside this file."
    )


class InstancesEntry(_Instances):  # type: ignore[misc]  # as above
    """Worker processes of a model on one device."""


class WarmupEntry(_Warmup):  # type: ignore[misc]  # as above
    """A batch that every instance runs before the model is ready."""


class ModelEntry(_Options):  # type: ignore[misc]  # as above
    """One version of a model: its callable, its tensors, and how it runs."""

    name: ModelName = Field(
        description="Name in requests: letters, digits, dots, underscores and dashes, at most 128."
    )
    callable: CallablePath | None = Field(
        default=None,
        description="Inference callable: file.py:attribute, beside this file, or package.module:attribute. "
        "Not for an ensemble.",
        examples=["linear.py:Linear"],
    )
    ensemble: EnsembleEntry | None = Field(
        default=None, description="In place of a callable: other models of this file, asked step by step."
    )
    kwargs: CallableArguments = Field(
        default_factory=dict, description="Arguments when the attribute is a class or a factory."
    )
    instances: list[InstancesEntry] = Field(
        default_factory=lambda: [InstancesEntry()],
        min_length=1,
        description="Where the model runs: one worker process each.",
    )
    inputs: list[InputEntry] = Field(description="Tensors of a request; may be empty.")
    outputs: list[OutputEntry] = Field(description="Tensors of a response; may be empty.")
    sequence_batching: SequenceBatchingEntry | None = Field(
        default=None, description="The requests belong to sequences; null: they do not."
    )
    warmup: list[WarmupEntry] = Field(
        default_factory=list, description="Batches to run before the model is ready."
    )
