"""From what a test names, a callable, a path, a server, to the models that it means: what is declared of them
is found as a server finds it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Final, TypeAlias, Unpack

from gpuserve.api.pickled_callables import described, pickled_source
from gpuserve.api.server import Server
from gpuserve.config.load import Configuration, load_data
from gpuserve.config.problems import ConfigProblems
from gpuserve.config.repositories import entry_of, is_callable_path
from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.triton.load import RepositoryLoader, load_target
from gpuserve.core.errors import BindError
from gpuserve.model.self_description import declaration, plain_tensors
from gpuserve.model.spec import ModelSpec, check_model_name
from gpuserve.supervisor.placement import ServerDevices
from gpuserve.testing.answers import Outputs
from gpuserve.testing.local_model import LocalModel
from gpuserve.testing.others import Other, OtherModels
from gpuserve.testing.requests import WrongCall
from gpuserve_worker.calling.questions import CallOptions

#: What can be tested: callables, a server to which models are bound, the path of what can be served.
Target: TypeAlias = Callable[..., Any] | Mapping[str, Callable[..., Any]] | Server | str | PathLike[str]

_NO_OTHERS: Final[Mapping[str, Other]] = {}
_NAMELESS: Final = "model"
_TENSORS: Final = ("inputs", "outputs")


def models_of(
    target: Target, kwargs: Mapping[str, Any], declared: Mapping[str, Any], *, pickled: bool
) -> tuple[ServerSettings, tuple[ModelSpec, ...]]:
    """The settings of the server that a target means, and its models. ``pickled``: callables are to be sent
    to workers. Raises ConfigError, BindError: it cannot be served; WrongCall: what is said besides is not
    for such a target.
    """
    if isinstance(target, Mapping):
        named: Mapping[str, Any] = target
    elif callable(target):
        named = {name_of(target): target}
    elif not isinstance(target, Server) and is_callable_path(os.fspath(target)):
        configuration = _at_path(os.fspath(target), kwargs, declared)
        return configuration.settings, configuration.models
    elif kwargs or declared:
        given = ", ".join([*(["kwargs"] if kwargs else []), *declared])
        raise WrongCall(f"{given}: expected with a callable alone, given with {target}")
    else:
        return _whole(target)
    specs = [callable_spec(one, name, kwargs, declared, pickled=pickled) for name, one in named.items()]
    return ServerSettings(), tuple(specs)


def name_of(target: Callable[..., Any]) -> str:
    """The name of the model that a callable is: its own, if a model may have it."""
    name = getattr(target, "__name__", type(target).__name__)
    try:
        check_model_name(name)
    except BindError:
        return _NAMELESS
    return str(name)


def callable_spec(
    target: Callable[..., Any],
    name: str,
    kwargs: Mapping[str, Any],
    declared: Mapping[str, Any],
    *,
    pickled: bool = False,
) -> ModelSpec:
    """The model of an inference callable; raises as ``open_callable``."""
    said = declaration(target, name, kwargs)
    entry = {"name": name, "callable": "the.test:callable", **said, **_plain(declared, name)}
    missing = [key for key in _TENSORS if key not in entry and not entry.get("openai")]
    if missing:
        raise BindError(
            f"the {' and '.join(missing)} of {described(target)} are not known: say {missing[0]}=[…], or "
            f"give the callable types (gpuserve.typed) or an attribute {missing[0]} = [Tensor(…)]"
        )
    (spec,) = load_data({"models": [entry]}, name, os.getcwd(), {}).models
    source = pickled_source(name, target) if pickled else {"object": target}
    adapter = {key: spec.instances[0].source[key] for key in ("adapter",) if key in spec.instances[0].source}
    whole = {**source, "kwargs": dict(kwargs), **adapter}
    instances = tuple(dataclasses.replace(one, source=whole) for one in spec.instances)
    return dataclasses.replace(spec, instances=instances)


def open_triton_model(
    folder: str | PathLike[str], *, version: int | None = None, others: Mapping[str, Other] = _NO_OTHERS
) -> LocalModel:
    """The model in a folder of a model repository: a ``config.pbtxt``, or a version folder with a
    ``model.py`` that completes its configuration. The newest version where none is named. ``others`` answer
    what it asks other models: a ``LocalModel``, or a function from inputs to outputs by name.

    Raises:
        ConfigProblems: the model cannot be served.
    """
    path = os.path.abspath(folder)
    name = os.path.basename(path)
    models = _model_folder(path).models
    found = [one for one in models if one.name == name and version in (None, one.version)]
    if not found:
        raise WrongCall(f"there is no version {version} of the model in {path}")
    spec = max(found, key=lambda one: one.version)
    return LocalModel(spec, spec.instances[0].source, OtherModels(others))


def open_callable(
    target: Callable[..., Any],
    /,
    *,
    name: str = _NAMELESS,
    kwargs: Mapping[str, Any] | None = None,
    others: Mapping[str, Other] = _NO_OTHERS,
    **declared: Any,
) -> LocalModel:
    """The model of an inference callable: a function, a class, an object. ``declared`` has keys of a config
    file's entry (``inputs``, ``outputs``, ``max_batch_size``, ``decoupled``), which go before what the
    callable says of itself; ``kwargs`` and ``others`` are as there and in ``open_triton_model``.

    Raises:
        ConfigProblems, BindError: the model cannot be served.
        LoadError: the callable says wrong things of itself.
    """
    spec = callable_spec(target, name, kwargs or {}, declared)
    return LocalModel(spec, spec.instances[0].source, OtherModels(others))


def run_triton_model(
    folder: str | PathLike[str],
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    /,
    *,
    others: Mapping[str, Other] = _NO_OTHERS,
    **options: Unpack[CallOptions],
) -> Any:
    """One ``execute`` of the model in a folder of a model repository, from ``initialize`` to ``finalize``.

    ``inputs`` are those of one request, arrays or lists by name, or a list of them for several requests of
    one batch; the outputs come back in that form. Of a decoupled model, those of all responses to one
    request.

    Raises:
        ConfigProblems: the model cannot be served.
        ModelCallError: a server would refuse the request, the model did, or its answer cannot be sent.
    """
    with open_triton_model(folder, others=others) as model:
        return _run(model, inputs, options)


def run_callable(
    target: Callable[..., Any],
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    /,
    *,
    kwargs: Mapping[str, Any] | None = None,
    others: Mapping[str, Other] = _NO_OTHERS,
    **declared: Any,
) -> Any:
    """One call of an inference callable, with what it declares; as ``run_triton_model``."""
    with open_callable(target, kwargs=kwargs, others=others, **declared) as model:
        return _run(model, inputs, {})


def _run(
    model: LocalModel, inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]], options: CallOptions
) -> Outputs | list[Outputs]:
    if not isinstance(inputs, Mapping):
        return model.infer_batch(inputs, **options)
    return model.stream(inputs, **options) if model.spec.decoupled else model.infer(inputs, **options)


# ---- paths and servers --------------------------------------------------------------------------


def _plain(declared: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What was declared in a test, as a file has it."""
    return {key: plain_tensors(one, key, name) if key in _TENSORS else one for key, one in declared.items()}


def _at_path(target: str, kwargs: Mapping[str, Any], declared: Mapping[str, Any]) -> Configuration:
    """The configuration of a callable or a model file that is named by its path. Raises ConfigProblems."""
    given = {"kwargs": dict(kwargs)} if kwargs else {}
    entry = entry_of(target, os.getcwd())
    model = {**entry, **given, **_plain(declared, entry["name"])}
    return load_data({"models": [model]}, target, os.getcwd(), os.environ)


def _whole(target: Server | str | PathLike[str]) -> tuple[ServerSettings, tuple[ModelSpec, ...]]:
    if isinstance(target, Server):
        return target.settings, target.declared
    configuration = _configuration(os.fspath(target))
    if configuration.broken:
        raise ConfigProblems([one for each in configuration.broken.values() for one in each.problems])
    return configuration.settings, configuration.models


def _configuration(path: str) -> Configuration:
    is_one_model = os.path.isdir(path) and _is_model_folder(path)
    return _model_folder(os.path.abspath(path)) if is_one_model else load_target(path, os.environ)


def _model_folder(path: str) -> Configuration:
    """The configuration of one model of a repository, and of those that it needs. Raises ConfigProblems."""
    name = os.path.basename(path)
    loader = RepositoryLoader([os.path.dirname(path)], {}, (), ServerDevices())
    configuration = loader.load({name})
    if name in configuration.broken:
        raise configuration.broken[name]
    return configuration


def _is_model_folder(path: str) -> bool:
    """Whether a folder is that of a model, and not one of models: versions are folders named by a number."""
    with os.scandir(path) as entries:
        return any(
            one.name == "config.pbtxt" or (one.name.isdigit() and not _has_config(one.path))
            for one in entries
        )


def _has_config(path: str) -> bool:
    return os.path.exists(os.path.join(path, "config.pbtxt"))
