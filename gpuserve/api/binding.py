"""Conversion of the arguments of ``Server.bind()`` to a ``ModelSpec``. Pure."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gpuserve.api.pickled_callables import described, pickled_sources
from gpuserve.core.errors import BadModelConfig, BindError, DuplicateModel
from gpuserve.devices.names import CPU, check_device_name
from gpuserve.model import openai_declaration as openai
from gpuserve.model.build import (
    batching_options,
    build_model_spec,
    plain_options,
    rate_options,
    sequence_options,
)
from gpuserve.model.declaration import ModelConfig, Tensor, array_kind, device_problem
from gpuserve.model.options import checked, rows
from gpuserve.model.rules import check_gpu_shares, check_ranks, check_sequences, value_errors_as_bad_config
from gpuserve.model.spec import (
    SHUTDOWN,
    BatchingSpec,
    DeclaredInstances,
    InstanceSpec,
    ModelSpec,
    RateLimiter,
    check_model_name,
)
from gpuserve_worker.inference.call_check import call_problem
from gpuserve_worker.inference.callable_loading import YIELDING, LoadError, kind_of
from gpuserve_worker.inference.stepping import Served, is_stepped, max_active_of

#: The ``strict`` mode of PyTriton's programs.
EXACT: Final = "exact"


def model_spec(
    model_name: str,
    infer_func: Served | Sequence[Served],
    inputs: Sequence[Tensor] | None,
    outputs: Sequence[Tensor] | None,
    model_version: int,
    config: ModelConfig | None,
    strict: bool | str,
    isolation: str,
    concurrency: int | None = None,
    on_unrecoverable: str = SHUTDOWN,
    device: str | Sequence[str] = CPU,
    ranks: int = 1,
    gpu_share: float = 0.0,
) -> ModelSpec:
    """Return the ``ModelSpec`` for the arguments of ``bind()``. Raise BindError if an argument is invalid."""
    check_model_name(model_name)
    if config is not None and not isinstance(config, ModelConfig):
        raise BadModelConfig(f"config must be a ModelConfig, got an object of type {type(config).__name__}")
    if isolation not in ("process", "thread"):
        raise BindError(f"isolation must be 'process' or 'thread', got {isolation!r}")
    adapter = ""
    first = infer_func[0] if isinstance(infer_func, Sequence) and infer_func else infer_func
    if config is None and inputs is None and outputs is None and openai.is_for_openai(first):
        config = ModelConfig(openai=True)
    if config is not None and config.openai is True:
        inputs, outputs, config = _for_openai(inputs, outputs, config)
        adapter = openai.ADAPTER
    inputs, outputs, config = _completed(infer_func, inputs, outputs, _stepped(first, config))
    given: dict[str, Any] = {"version": model_version, "strict": True if strict == EXACT else strict}
    given |= {"concurrency": concurrency, "on_unrecoverable": on_unrecoverable}
    names = {"version": "model_version"}
    options = plain_options(config)
    with value_errors_as_bad_config():
        for key, one in given.items():
            options[key] = checked(rows(ModelSpec)[key], one, names.get(key, key))
        ranks = checked(rows(DeclaredInstances)["ranks"], ranks, "ranks")
        gpu_share = checked(rows(DeclaredInstances)["gpu_share"], gpu_share, "gpu_share")
    callables, devices = _paired(_callables(infer_func, adapter), _devices(device))
    _check_answers(config, callables, may_yield=config.decoupled or strict is not True)
    if config.gpu_memory_nbytes and isolation == "thread":
        text = "gpu_memory_nbytes limits a whole process, which here is this program"
        raise BadModelConfig(f"{text}: expected isolation='process', or no limit")
    if problem := device_problem(array_kind(config.array, inputs), devices):
        raise BindError(f"device: {problem}")
    options["max_batch_size"], options["batching"], options["queue"] = batching_options(config)
    options["exact"] = strict == EXACT
    place = devices, ranks, gpu_share, isolation
    spec = build_model_spec(
        model_name,
        inputs,
        outputs,
        _instances(model_name, callables, *place, rate_options(config.rate_limiter), adapter),
        vars(config),
        config.model_warmup,
        sequence=sequence_options(config.sequence_batching),
        **options,
    )
    check_sequences(spec)
    check_ranks(spec)
    check_gpu_shares(spec)
    if not adapter:
        _check_calls(
            callables, [one.name for one in spec.inputs], all_inputs=config.sequence_batching is None
        )
    return spec


def _check_calls(callables: Sequence[Served], inputs: Sequence[str], *, all_inputs: bool) -> None:
    """Raise BindError if a callable cannot be called with requests of these inputs; see ``call_problem``."""
    for one in callables:
        if isinstance(one, types.BuiltinFunctionType):  # written in C: it may have no signature
            continue
        name = getattr(one, "__qualname__", type(one).__qualname__)
        if problem := call_problem(one, name, {}, inputs, all_inputs=all_inputs):
            raise BindError(problem)


def _stepped(first: Any, config: ModelConfig | None) -> ModelConfig | None:
    """Return the config of a stepped callable: decoupled and without batching, unless a config sets them."""
    if not is_stepped(first):
        return config
    if config is None:
        return ModelConfig(batching=False, decoupled=True, max_active=max_active_of(first))
    config = copy.copy(config)
    config.max_active = config.max_active or max_active_of(first)
    return config


def _for_openai(
    inputs: Any, outputs: Any, config: ModelConfig
) -> tuple[Sequence[Tensor], Sequence[Tensor], ModelConfig]:
    """Return tensors and config of a model for OpenAI's clients. It batches only with a ``Batching``."""
    for key, given in (("inputs", inputs), ("outputs", outputs)):
        if given and (problem := openai.tensors_problem(key, given)):
            raise BadModelConfig(problem)
    config = copy.copy(config)
    config.decoupled = True
    config.batching = config.batching if isinstance(config.batching, BatchingSpec) else False
    return openai.INPUTS, openai.OUTPUTS, config


def check_new(spec: ModelSpec, bound: Iterable[ModelSpec], *, one_version: bool = False) -> None:
    """Raise DuplicateModel if the name and version (``one_version``: any) is bound, in any case."""
    for one in bound:
        if one.name.lower() != spec.name.lower():
            continue
        known = f"{spec.name!r} is bound already"
        if one.name != spec.name:
            known += f", as {one.name!r}, and names must differ in more than case"
        elif one.version != spec.version:
            if not one_version:
                continue
            known += f", as version {one.version}, and an attached program serves one version of a name"
        raise DuplicateModel(f"Cannot add model with the same name twice: {known}")


def _completed(
    infer_func: Any,
    inputs: Sequence[Tensor] | None,
    outputs: Sequence[Tensor] | None,
    config: ModelConfig | None,
) -> tuple[Sequence[Tensor], Sequence[Tensor], ModelConfig]:
    """Return the tensors and the config, completed from the attributes of the (first) callable."""
    if inputs is not None and outputs is not None:
        return inputs, outputs, config or ModelConfig()
    from gpuserve.model.self_description import declaration  # here, because it imports numpy

    target = _callables(infer_func)[0]
    try:
        declared = declaration(target, getattr(target, "__qualname__", type(target).__qualname__), {})
    except LoadError as error:
        raise BindError(str(error)) from None
    tensors: list[Sequence[Tensor]] = []
    for key, given in (("inputs", inputs), ("outputs", outputs)):
        if given is None and key not in declared:
            ways = f"say {key}=[Tensor(…)], or give the callable types (gpuserve.typed) or an attribute {key}"
            raise BindError(f"the {key} of {described(target)} are not known: {ways} = [Tensor(…)]")
        tensors.append([Tensor(**one) for one in declared[key]] if given is None else given)
    if config is None:
        said: dict[str, Any] = {key: declared[key] for key in ("array", "decoupled") if key in declared}
        if (size := declared.get("max_batch_size")) is not None:
            said |= {"batching": size > 0, "max_batch_size": size or ModelConfig.max_batch_size}
        config = ModelConfig(**said)
    return tensors[0], tensors[1], config


def _instances(
    model_name: str,
    callables: Sequence[Served],
    devices: Sequence[str],
    ranks: int,
    gpu_share: float,
    isolation: str,
    rate: RateLimiter,
    adapter: str,
) -> tuple[InstanceSpec, ...]:
    """Return an instance for each element. A callable that occurs several times is pickled once."""
    distinct = {id(one): one for one in callables}
    adapted = {"adapter": adapter} if adapter else {}
    if isolation == "thread":
        sources = [{"object": one} for one in distinct.values()]
    else:
        sources = pickled_sources(model_name, [*distinct.values()])
    source_of = {key: source | adapted for key, source in zip(distinct, sources, strict=True)}
    return tuple(
        InstanceSpec(f"{number}", device, source_of[id(one)], rate, ranks=ranks, gpu_share=gpu_share)
        for number, (one, device) in enumerate(zip(callables, devices, strict=True))
    )


def _devices(device: Any) -> list[str]:
    given = [device] if isinstance(device, str) else device
    if not isinstance(given, Sequence) or not given or not all(isinstance(one, str) for one in given):
        raise BindError(f"device must be a string or a non-empty sequence of strings, got {device!r:.200}")
    try:
        return [check_device_name(one) for one in given]
    except ValueError as error:
        raise BindError(f"device: {error}") from None


def _paired(callables: Sequence[Served], devices: Sequence[str]) -> tuple[list[Served], list[str]]:
    """Return a callable and a device for each instance; a single callable or device is repeated."""
    if len(callables) != len(devices) and 1 not in (len(callables), len(devices)):
        counts = f"{len(callables)} callables and {len(devices)} devices"
        raise BindError(f"there are {counts}: give one device, or one for each callable")
    count = max(len(callables), len(devices))
    return [*callables] * (count // len(callables)), [*devices] * (count // len(devices))


def _callables(infer_func: Any, adapter: str = "") -> list[Served]:
    # An adapter calls it, so it need not be callable itself.
    if _is_served(infer_func) or (adapter and not isinstance(infer_func, Sequence)):
        return [infer_func]
    if isinstance(infer_func, Sequence) and infer_func and (adapter or all(map(_is_served, infer_func))):
        return list(infer_func)
    shown = f"an object of type {type(infer_func).__name__}"
    if isinstance(infer_func, list | tuple):
        kinds = ", ".join(type(one).__name__ for one in infer_func) or "nothing"
        shown = f"a {type(infer_func).__name__} of {kinds}"
    raise BindError(f"infer_func must be a callable or a non-empty sequence of callables, got {shown}")


def _is_served(infer_func: Any) -> bool:
    return callable(infer_func) or is_stepped(infer_func)


def _check_answers(config: ModelConfig, callables: Sequence[Served], *, may_yield: bool) -> None:
    """Check that the callables can answer in the way of the config, and that such answers can be cached."""
    if config.response_cache and config.decoupled:
        why = "only a model that gives one response to a request can be answered from memory"
        raise BadModelConfig(f"response_cache does not go with decoupled: {why}")
    yielding = [one for one in callables if kind_of(one) in YIELDING]
    if yielding and not may_yield:
        kind = f"{described(yielding[0])} is {kind_of(yielding[0]).value}"
        advice = "say decoupled=True in ModelConfig, or return one response"
        raise BindError(f"{kind}, which gives any number of responses to a request: {advice}")
