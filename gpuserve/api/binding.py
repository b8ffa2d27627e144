"""From the arguments of ``Server.bind()`` to a ``ModelSpec``. No process and no socket here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from gpuserve.api.pickling import described, pickled_source
from gpuserve.devices.names import CPU, check_device_name
from gpuserve.errors import BadModelConfig, BindError, DuplicateModel
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
from gpuserve.model.rules import check_sequences, value_errors_as_bad_config
from gpuserve.model.spec import (
    SHUTDOWN,
    BatchingSpec,
    InstanceSpec,
    ModelSpec,
    RateLimiter,
    check_model_name,
)
from gpuserve_worker.calling.callable import YIELDING, LoadError, kind_of

#: The ``strict`` of PyTriton's programs.
EXACT: Final = "exact"


def model_spec(
    model_name: str,
    infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
    inputs: Sequence[Tensor] | None,
    outputs: Sequence[Tensor] | None,
    model_version: int,
    config: ModelConfig | None,
    strict: bool | str,
    isolation: str,
    concurrency: int | None = None,
    on_unrecoverable: str = SHUTDOWN,
    device: str | Sequence[str] = CPU,
) -> ModelSpec:
    """What ``bind()`` was given, as a ``ModelSpec``. Raises BindError: any of it cannot be served."""
    check_model_name(model_name)
    if config is not None and not isinstance(config, ModelConfig):
        raise BadModelConfig(f"config must be a ModelConfig, got an object of type {type(config).__name__}")
    _check_isolation(isolation)
    adapter = ""
    if config is None and inputs is None and outputs is None and openai.is_for_openai(_first(infer_func)):
        config = ModelConfig(openai=True)
    if config is not None and config.openai is True:
        inputs, outputs, config = _for_openai(inputs, outputs, config)
        adapter = openai.ADAPTER
    inputs, outputs, config = _completed(infer_func, inputs, outputs, config)
    options = plain_options(config) | _arguments(
        version=model_version,
        strict=True if strict == EXACT else strict,
        concurrency=concurrency,
        on_unrecoverable=on_unrecoverable,
    )
    callables, devices = _paired(_callables(infer_func, adapter), _devices(device))
    _check_answers(config, callables, may_yield=config.decoupled or strict is not True)
    if problem := device_problem(array_kind(config.array, inputs), devices):
        raise BindError(f"device: {problem}")
    options["max_batch_size"], options["batching"], options["queue"] = batching_options(config)
    options["exact"] = strict == EXACT
    spec = build_model_spec(
        model_name,
        inputs,
        outputs,
        _instances(model_name, callables, devices, isolation, rate_options(config.rate_limiter), adapter),
        vars(config),
        config.model_warmup,
        sequence=sequence_options(config.sequence_batching),
        **options,
    )
    check_sequences(spec)
    return spec


def _first(infer_func: Any) -> Any:
    return infer_func[0] if isinstance(infer_func, Sequence) and infer_func else infer_func


def _for_openai(
    inputs: Any, outputs: Any, config: ModelConfig
) -> tuple[Sequence[Tensor], Sequence[Tensor], ModelConfig]:
    """The tensors and the config of a model for OpenAI's clients, which batches only where it says so by a
    ``Batching``: the streams of a batch end together. Raises BadModelConfig: it has tensors of its own.
    """
    for key, given in (("inputs", inputs), ("outputs", outputs)):
        if given and (problem := openai.tensors_problem(key, given)):
            raise BadModelConfig(problem)
    config = copy.copy(config)
    config.decoupled = True
    config.batching = config.batching if isinstance(config.batching, BatchingSpec) else False
    return openai.INPUTS, openai.OUTPUTS, config


def _arguments(**given: Any) -> dict[str, Any]:
    """The options that are arguments of ``bind()`` itself."""
    names = {"version": "model_version"}
    with value_errors_as_bad_config():
        return {key: checked(rows(ModelSpec)[key], one, names.get(key, key)) for key, one in given.items()}


def check_new(spec: ModelSpec, bound: Iterable[ModelSpec], *, one_version: bool = False) -> None:
    """Raise DuplicateModel unless a model of this name and version may join those that are bound: it is
    bound, or with ``one_version`` any version is; case does not tell names apart.
    """
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
    """The tensors and the config, where they are left out as the (first) callable says of itself."""
    if inputs is not None and outputs is not None:
        return inputs, outputs, config or ModelConfig()
    from gpuserve.model.self_description import declaration  # brings numpy, which a server does without

    target = _callables(infer_func)[0]
    try:
        said = declaration(target, getattr(target, "__qualname__", type(target).__qualname__), {})
    except LoadError as error:
        raise BindError(str(error)) from None
    given = {"inputs": inputs, "outputs": outputs}
    tensors = [_said_tensors(key, said, target) if one is None else one for key, one in given.items()]
    return tensors[0], tensors[1], config or _said_config(said)


def _said_tensors(key: str, said: Mapping[str, Any], target: Callable[..., Any]) -> list[Tensor]:
    if key not in said:
        raise BindError(
            f"the {key} of {described(target)} are not known: say {key}=[Tensor(…)], or give the callable "
            f"types (gpuserve.typed) or an attribute {key} = [Tensor(…)]"
        )
    return [Tensor(**one) for one in said[key]]


def _said_config(said: Mapping[str, Any]) -> ModelConfig:
    options = {key: said[key] for key in ("array", "decoupled") if key in said}
    size = said.get("max_batch_size")
    if size is not None:
        options |= {"batching": size > 0, "max_batch_size": size or ModelConfig.max_batch_size}
    return ModelConfig(**options)


def _check_isolation(isolation: object) -> None:
    if isolation not in ("process", "thread"):
        raise BindError(f"isolation must be 'process' or 'thread', got {isolation!r}")


def _instances(
    model_name: str,
    callables: Sequence[Callable[..., Any]],
    devices: Sequence[str],
    isolation: str,
    rate: RateLimiter,
    adapter: str,
) -> tuple[InstanceSpec, ...]:
    """One instance an element. A callable that is there several times is pickled, and held, once."""
    distinct = {id(one): one for one in callables}
    adapted = {"adapter": adapter} if adapter else {}
    sources = {key: _source(model_name, one, isolation) | adapted for key, one in distinct.items()}
    return tuple(
        InstanceSpec(f"{number}", device, sources[id(one)], rate)
        for number, (one, device) in enumerate(zip(callables, devices, strict=True))
    )


def _devices(device: Any) -> list[str]:
    """What ``device`` names, one at least."""
    given = [device] if isinstance(device, str) else device
    if not isinstance(given, Sequence) or not given or not all(isinstance(one, str) for one in given):
        raise BindError(f"device must be a string or a non-empty sequence of strings, got {device!r:.200}")
    try:
        return [check_device_name(one) for one in given]
    except ValueError as error:
        raise BindError(f"device: {error}") from None


def _paired(
    callables: Sequence[Callable[..., Any]], devices: Sequence[str]
) -> tuple[list[Callable[..., Any]], list[str]]:
    """One callable and one device for each instance, where one of either may stand for several."""
    if len(callables) != len(devices) and 1 not in (len(callables), len(devices)):
        raise BindError(
            f"there are {len(callables)} callables and {len(devices)} devices: give one device, or one for "
            "each callable"
        )
    count = max(len(callables), len(devices))
    return [*callables] * (count // len(callables)), [*devices] * (count // len(devices))


def _callables(infer_func: Any, adapter: str = "") -> list[Callable[..., Any]]:
    if adapter and not isinstance(infer_func, Sequence):  # it need not be called as it is
        return [infer_func]
    if callable(infer_func):
        return [infer_func]
    if adapter and infer_func:
        return list(infer_func)
    if isinstance(infer_func, Sequence) and infer_func and all(map(callable, infer_func)):
        return list(infer_func)
    raise BindError(
        f"infer_func must be a callable or a non-empty sequence of callables, got {_shown(infer_func)}"
    )


def _shown(infer_func: Any) -> str:
    if not isinstance(infer_func, list | tuple):
        return f"an object of type {type(infer_func).__name__}"
    kinds = ", ".join(type(one).__name__ for one in infer_func)
    return f"a {type(infer_func).__name__} of {kinds or 'nothing'}"


def _check_answers(config: ModelConfig, callables: Sequence[Callable[..., Any]], *, may_yield: bool) -> None:
    """Whether the model's way to answer is one that its callables have, and that can be cached."""
    if config.response_cache and config.decoupled:
        raise BadModelConfig(
            "response_cache does not go with decoupled: only a model that gives one response to a request "
            "can be answered from memory"
        )
    yielding = [one for one in callables if kind_of(one) in YIELDING]
    if yielding and not may_yield:
        raise BindError(
            f"{described(yielding[0])} is {kind_of(yielding[0]).value}, which gives any number of responses "
            "to a request: say decoupled=True in ModelConfig, or return one response"
        )


def _source(model_name: str, infer_func: Callable[..., Any], isolation: str) -> dict[str, Any]:
    return {"object": infer_func} if isolation == "thread" else pickled_source(model_name, infer_func)
