"""The mapping ``ensemble`` of a config file: one field a key."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gpuserve.config.fields import Entry, ModelName

TensorName = Annotated[str, Field(min_length=1)]


class StepEntry(Entry):
    """One model that is asked."""

    model: ModelName = Field(description="Name of a model of this file.")
    version: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Its version; null: the latest at the time of a request."
    )
    inputs: dict[TensorName, TensorName] = Field(
        default_factory=dict,
        description="For each input of that model, the tensor of the ensemble that it gets.",
        examples=[{"raw": "image"}],
    )
    outputs: dict[TensorName, TensorName] = Field(
        min_length=1,
        description="For each output of that model that is used, the tensor of the ensemble that it makes.",
        examples=[{"clean": "pixels"}],
    )


class EnsembleEntry(Entry):
    """Models that answer a request together."""

    steps: list[StepEntry] = Field(
        min_length=1, description="In any order: a step runs as soon as what it reads is there."
    )
