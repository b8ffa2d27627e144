"""One entry of ``models`` in a config file: one class a mapping, one field a key, with its default and its
description. What must hold between several keys is in ``rules``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gpuserve.config.ensemble_entry import EnsembleEntry
from gpuserve.config.fields import (
    CallableArguments,
    CallablePath,
    Device,
    Dimension,
    Dtype,
    Entry,
    Level,
    ModelName,
)
from gpuserve.config.sequence_entry import RateLimiterEntry, SequenceBatchingEntry
from gpuserve.declared_batcher import MAX_PRIORITY_LEVELS
from gpuserve.label_spec import MAX_LABELS
from gpuserve.spec import (
    DEFAULT_MAX_QUEUE_NBYTES,
    DEFAULT_MAX_QUEUE_REQUESTS,
    MAX_CONCURRENCY,
    MAX_INSTANCES,
)


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
    """Worker processes on one device."""

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


class BatchingEntry(Entry):
    """When a batch is formed."""

    max_queue_delay_us: int = Field(
        default=0, ge=0, description="Microseconds that a request may wait for others to fill a batch."
    )
    preferred_batch_sizes: list[Annotated[int, Field(gt=0)]] = Field(
        default_factory=list, description="Batch sizes to wait for; each at most max_batch_size."
    )
    merge: bool = Field(default=True, description="Whether a batch may hold more than one request.")
    preserve_ordering: bool = Field(
        default=False, description="Answers are given in the order in which the requests came."
    )


class PolicyEntry(Entry):
    """How long and how many requests of one priority may wait."""

    timeout_action: Literal["reject", "delay"] = Field(
        default="reject",
        description="A request whose time ran out is refused, or let behind all others of its priority.",
    )
    default_timeout_us: int = Field(
        default=0, ge=0, description="Microseconds that a request may wait; 0 is no limit."
    )
    allow_timeout_override: bool = Field(
        default=False, description="Whether a request's own parameter timeout may shorten its time."
    )
    max_requests: int = Field(default=0, ge=0, description="Requests that may wait; 0 is no limit.")


class QueueEntry(Entry):
    """How much may wait for a model before requests are refused, and in which order it is taken."""

    max_requests: int = Field(default=DEFAULT_MAX_QUEUE_REQUESTS, ge=1, description="Requests that may wait.")
    max_nbytes: int = Field(
        default=DEFAULT_MAX_QUEUE_NBYTES, ge=1, description="Bytes of tensors that may wait."
    )
    priority_levels: int = Field(
        default=0,
        ge=0,
        le=MAX_PRIORITY_LEVELS,
        description="Levels of priority; 1 goes first. 0: all requests are alike.",
    )
    default_priority: int = Field(
        default=0, ge=0, description="Level of a request that names none; from 1 to priority_levels."
    )
    policy: PolicyEntry = Field(default_factory=PolicyEntry, description="For every level.")
    policies: dict[Level, PolicyEntry] = Field(
        default_factory=dict, description="For single levels, in place of policy.", examples=[{"1": {}}]
    )


class WarmupInputEntry(Entry):
    """One input of a warm-up."""

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


class ModelEntry(Entry):
    """One model."""

    name: ModelName = Field(
        description="Name in requests: letters, digits, dots, underscores and dashes, at most 128."
    )
    callable: CallablePath | None = Field(
        default=None,
        description="Inference callable: file.py:attribute, beside this file, or package.module:attribute. "
        "Needed, but for an ensemble.",
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
    max_batch_size: int = Field(
        default=0, ge=0, description="Largest batch; 0: the model does not batch and its shapes are complete."
    )
    batching: BatchingEntry = Field(default_factory=BatchingEntry, description="How requests are merged.")
    sequence_batching: SequenceBatchingEntry | None = Field(
        default=None, description="The requests belong to sequences; null: they do not."
    )
    queue: QueueEntry = Field(default_factory=QueueEntry, description="How much may wait.")
    prefetch: Annotated[int, Field(ge=0, le=16)] | None = Field(
        default=None,
        description="Full batches that wait inside a worker; null: 1 on a GPU, 0 on the CPU.",
    )
    decoupled: bool = Field(
        default=False, description="A request is answered by any number of responses, as they are produced."
    )
    concurrency: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)] | None = Field(
        default=None,
        description="Batches that an async callable or a generator has under way at once in one instance; "
        "null: by the kind of the callable.",
    )
    response_cache: bool = Field(
        default=False, description="Answer a request that was seen before from memory."
    )
    warmup: list[WarmupEntry] = Field(
        default_factory=list, description="Batches to run before the model is ready."
    )
    on_unrecoverable: Literal["shutdown", "restart_worker"] = Field(
        default="shutdown",
        description="What UnrecoverableError ends: the whole server, or the instance, which is replaced.",
    )
    strict: bool = Field(default=False, description="Check the outputs against their declaration.")
    array: Literal["numpy", "cupy", "torch"] | None = Field(
        default=None,
        description="Arrays that inputs come as: numpy, on the host; cupy or torch, on the GPU of the "
        "instance; null: cupy where an input has memory: gpu, otherwise numpy.",
    )
    read_only_inputs: bool = Field(default=False, description="The callable never writes to its inputs.")
    retry_on_worker_death: bool = Field(
        default=True,
        description="Run a batch once more when the worker that had it died; never where decoupled or in "
        "sequences.",
    )
    version: int = Field(default=1, ge=1, description="Version in requests.")
