"""One entry of ``models`` in a config file: one class a mapping, one field a key, with its default and its
description. Options of the model are rows of ``declare/spec.py``; here is what only a file has. What must
hold between several keys is in ``rules``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gpuserve.config.entries.fields import (
    CallableArguments,
    CallablePath,
    Device,
    Dimension,
    Dtype,
    Entry,
    ModelName,
    entry_of,
)
from gpuserve.declare.spec import MAX_INSTANCES, ModelSpec, RateLimiter, SequenceBatching, StepSpec
from gpuserve.declare.tensors import MAX_LABELS

_Options: Any = entry_of(ModelSpec)
_Rate: Any = entry_of(RateLimiter)
_Sequence: Any = entry_of(SequenceBatching)
_Step: Any = entry_of(StepSpec)


class StepEntry(_Step):  # type: ignore[misc]  # its keys come from the table
    """One model that an ensemble asks."""


class EnsembleEntry(Entry):
    """Models that answer a request together."""

    steps: list[StepEntry] = Field(
        min_length=1, description="In any order: a step runs as soon as what it reads is there."
    )


class RateLimiterEntry(_Rate):  # type: ignore[misc]  # as above
    """What an instance needs to run."""


class SequenceBatchingEntry(_Sequence):  # type: ignore[misc]  # as above
    """How the requests of a model belong together."""


class TensorEntry(Entry):
    """A tensor of requests or of responses."""

    name: str = Field(min_length=1, description="Name of the tensor.")
    dtype: Dtype = Field(
        description='A numpy name (float32), a v2 name (FP32), or "bytes".',
        examples=["float32", "FP32", "bytes"],
    )
    shape: list[Dimension] = Field(
        description="Shape without the batch axis where the model batches; -1 is any size.", examples=[[-1]]
    )


class OutputEntry(TensorEntry):
    """A tensor that the model answers with."""

    labels: list[str] = Field(
        default_factory=list,
        max_length=MAX_LABELS,
        description="Names of its classes, by position, for requests that ask for classification.",
    )
    label_filename: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="A text file with one label a line, in place of labels; beside this file."
    )


class InputEntry(TensorEntry):
    """A tensor that a request brings."""

    optional: bool = Field(default=False, description="Whether a request may leave this input out.")
    memory: Literal["cpu", "gpu"] | None = Field(
        default=None,
        description="Where the callable is given it: gpu, that of its instance, or cpu; null: as array.",
    )


class ResourcesEntry(Entry):
    """What one process takes, for ``gpuserve export``; the server itself holds it to nothing of it."""

    cpus: int = Field(default=1, ge=1, description="Cores that it keeps busy.")
    memory_nbytes: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="Memory of the host: libraries, weights; without tensors of requests. null: assumed.",
    )
    gpu_memory_nbytes: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="Memory of its GPU; null: not known, and not checked."
    )


class InstanceEntry(Entry):
    """Worker processes of a model on one device."""

    device: Device = Field(
        default="cpu",
        description="cpu; cuda:0, cuda:1, …; cuda:* for every GPU; or the UUID of a GPU (GPU-…) or of a MIG "
        "instance (MIG-…).",
        examples=["cpu", "cuda:0", "cuda:*"],
    )
    count: int = Field(default=1, ge=1, le=MAX_INSTANCES, description="How many processes on this device.")
    rate_limiter: RateLimiterEntry | None = Field(
        default=None, description="What each needs to run, where the server has a rate_limit."
    )
    resources: ResourcesEntry = Field(
        default_factory=ResourcesEntry, description="What one process takes, for gpuserve export."
    )


class WarmupInputEntry(Entry):
    """The values of one input in a warm-up batch."""

    dtype: Dtype | None = Field(default=None, description="null: as the input is declared.")
    shape: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, description="Without the batch axis; null: as the input is declared."
    )
    values: Literal["zero", "random"] = Field(default="random", description="What it is filled with.")
    file: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="A .npy file in place of values; relative to this file."
    )


class WarmupEntry(Entry):
    """A batch that every instance runs before the model is ready."""

    name: str = Field(min_length=1, description="Name in the log.")
    batch_size: int = Field(
        default=1, ge=1, description="Rows; without effect where the model does not batch."
    )
    count: int = Field(default=1, ge=1, description="How many times it runs.")
    inputs: dict[str, WarmupInputEntry] = Field(
        default_factory=dict, description="Inputs by name; random values in those that are left out."
    )


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
    instances: list[InstanceEntry] = Field(
        default_factory=lambda: [InstanceEntry()],
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
