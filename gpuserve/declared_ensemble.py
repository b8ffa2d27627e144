"""From the arguments of ``Server.ensemble()`` to a ``ModelSpec``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuserve.declared_batcher import integer
from gpuserve.ensemble_spec import StepSpec
from gpuserve.ensembles import check_ensemble
from gpuserve.errors import BadModelConfig
from gpuserve.model import Step, Tensor, label_specs, tensor_specs
from gpuserve.spec import ModelSpec, check_model_name


def ensemble_spec(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    steps: Sequence[Step],
    version: int,
    max_batch_size: int,
) -> ModelSpec:
    """An ensemble that holds in itself.

    Raises:
        BindError: any of it cannot be served.
    """
    check_model_name(name)
    if any(isinstance(one, Tensor) and one.memory is not None for one in inputs):
        raise BadModelConfig(f"ensemble {name!r}: memory is for the inputs of the models of its steps")
    output_specs = tensor_specs(outputs, "OUTPUT")
    spec = ModelSpec(
        name=name,
        version=integer("version", version, 1),
        inputs=tensor_specs(inputs, "INPUT"),
        outputs=output_specs,
        max_batch_size=integer("max_batch_size", max_batch_size),
        instances=(),
        steps=_steps(name, steps),
        labels=label_specs(outputs, output_specs),
    )
    check_ensemble(spec)
    return spec


def _steps(name: str, steps: Any) -> tuple[StepSpec, ...]:
    if not isinstance(steps, Sequence) or not steps or not all(isinstance(one, Step) for one in steps):
        raise BadModelConfig(f"ensemble {name!r}: steps must be a non-empty list of Step, got {steps!r:.200}")
    return tuple(_step(f"ensemble {name!r}: steps[{number}]", one) for number, one in enumerate(steps))


def _step(where: str, step: Step) -> StepSpec:
    version = 0 if step.version is None else integer(f"{where}: version", step.version, 1)
    outputs = _pairs(f"{where}: outputs", step.outputs)
    if not outputs:
        raise BadModelConfig(f"{where}: outputs must name at least one output of model {step.model!r}")
    return StepSpec(check_model_name(step.model), version, _pairs(f"{where}: inputs", step.inputs), outputs)


def _pairs(where: str, names: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(names, Mapping) or not all(
        isinstance(one, str) and one for pair in names.items() for one in pair
    ):
        raise BadModelConfig(f"{where} must be a mapping of non-empty strings to strings, got {names!r:.200}")
    return tuple(names.items())
