"""The mappings ``sequence_batching`` and ``rate_limiter`` of a config file: one field a key."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gpuserve.config.fields import Dtype, Entry
from gpuserve.declared_sequences import MAX_CANDIDATES
from gpuserve.sequence_spec import DEFAULT_MAX_IDLE_US


class ControlEntry(Entry):
    """An input that the server fills in a batch of sequences."""

    name: str = Field(min_length=1, description="Name of the input; no request brings it.")
    kind: Literal["start", "end", "ready", "corrid"] = Field(
        description="start, end and ready are flags; corrid is the sequence's id."
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Of a flag int32, float32 or bool, of the id uint64, int64, uint32, int32 or bytes; "
        "null: int32, or uint64 for the id.",
    )
    false_true: Annotated[list[bool | int | float], Field(min_length=2, max_length=2)] = Field(
        default=[0, 1], description="What a flag is told by."
    )


class SequenceBatchingEntry(Entry):
    """How the requests of a model belong together."""

    strategy: Literal["direct", "oldest"] = Field(
        default="direct",
        description="direct: a sequence has a row in the batches of its instance; oldest: the next requests "
        "of many sequences are merged as batching says.",
    )
    max_sequence_idle_us: int = Field(
        default=DEFAULT_MAX_IDLE_US,
        ge=1,
        description="Microseconds without a request after which a sequence is dropped.",
    )
    max_candidate_sequences: int = Field(
        default=0,
        ge=0,
        le=MAX_CANDIDATES,
        description="Sequences that an instance works on at the same time (oldest); 0: as many as "
        "max_batch_size.",
    )
    minimum_slot_utilization: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Part of the rows that must have a request, or a batch waits for max_queue_delay_us "
        "(direct).",
    )
    controls: list[ControlEntry] = Field(
        default_factory=list, description="Inputs that tell the callable of the sequences."
    )


class ResourceEntry(Entry):
    """So much of a named resource."""

    name: str = Field(min_length=1, description="Name of the resource.")
    count: int = Field(default=1, ge=1, description="How much of it an instance needs.")
    shared: bool = Field(
        default=False, description="Whether it is there once for all devices, and not once a device."
    )


class RateLimiterEntry(Entry):
    """What an instance needs to run."""

    resources: list[ResourceEntry] = Field(default_factory=list, description="Resources that it holds.")
    priority: int = Field(
        default=0, ge=0, description="The lowest executions x priority goes first; 0 counts as 1."
    )
