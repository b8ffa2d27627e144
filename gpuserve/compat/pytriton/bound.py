"""From the arguments of ``Triton.bind()`` to a ``ModelSpec`` with PyTriton's rules: what it lets pass, how
many batches a callable is given at once, what clients are told. Nothing is served here.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpuserve.api.binding import EXACT, model_spec
from gpuserve.core.errors import BadModelConfig
from gpuserve.model.build import warmup_as_given
from gpuserve.model.declaration import ModelConfig, Tensor
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.calling.callable import YIELDING, CallableKind, kind_of

logger = logging.getLogger(__name__)

#: Kinds that have several batches under way at once, unless they are told otherwise.
_OVERLAPPING: Final = YIELDING | {CallableKind.COROUTINE}


def bound_spec(
    model_name: str,
    infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    model_version: int,
    config: ModelConfig | None,
    strict: bool,
    isolation: str,
) -> ModelSpec:
    """The model, as PyTriton would serve it; raises as ``ModelHost.bind``. Warm-ups run with what they name,
    and those that cannot be are logged and left out.
    """
    spec = model_spec(
        model_name,
        infer_func,
        inputs,
        outputs,
        model_version,
        _without_warmups(config),
        EXACT if strict else False,
        isolation,
        _concurrency(infer_func, config),
    )
    return dataclasses.replace(spec, all_lines=True, warmup=_warmups(spec, config))


def _without_warmups(config: Any) -> Any:
    if not isinstance(config, ModelConfig):
        return config
    config = copy.copy(config)
    config.model_warmup = None
    return config


def _warmups(spec: ModelSpec, config: ModelConfig | None) -> tuple[Any, ...]:
    declared = config.model_warmup if isinstance(config, ModelConfig) else None
    found: list[Any] = []
    for one in declared or ():
        try:
            found.append(warmup_as_given(one, spec.inputs))
        except BadModelConfig as error:
            logger.warning("model %s is not warmed up by all that it declares: %s", spec.name, error)
    return tuple(found)


def _concurrency(infer_func: Any, config: ModelConfig | None) -> int | None:
    """One batch at once where the model is not decoupled, as PyTriton has it; a callable whose attribute
    ``concurrency`` is a number has that many.
    """
    callables = infer_func if isinstance(infer_func, Sequence) else [infer_func]
    overlapping = [one for one in callables if callable(one) and kind_of(one) in _OVERLAPPING]
    asked = [one for one in overlapping if isinstance(getattr(one, "concurrency", None), int)]
    is_decoupled = isinstance(config, ModelConfig) and config.decoupled
    return None if is_decoupled or asked or not overlapping else 1
