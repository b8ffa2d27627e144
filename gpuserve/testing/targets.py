"""Targets of tests: a callable, a path or a server, and its models, found as a server finds them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Final, TypeAlias, Unpack

from gpuserve.api.pickled_callables import described, pickled_sources
from gpuserve.api.server import Server
from gpuserve.config.load import Configuration, load_data
from gpuserve.config.problems import ConfigProblems
from gpuserve.config.repositories import entry_of, is_callable_path
from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.triton.load import RepositoryLoader, load_target
from gpuserve.core.errors import BindError
from gpuserve.model.self_description import declaration, plain_tensors
from gpuserve.model.spec import MODEL_NAME, ModelSpec
from gpuserve.testing.local_models import LocalModel, Other, OtherModels
from gpuserve.testing.local_requests import Outputs, WrongCall
from gpuserve_worker.inference.model_calls import CallOptions
from gpuserve_worker.inference.stepping import Served, is_stepped

#: A target of a test: callables, a server with bound models, or a path that can be served.
Target: TypeAlias = Served | Mapping[str, Served] | Server | str | PathLike[str]

NO_OTHERS: Final[Mapping[str, Other]] = {}
_NAMELESS: Final = "model"
_TENSORS: Final = ("inputs", "outputs")


def target_models(
    target: Target, kwargs: Mapping[str, Any], declared: Mapping[str, Any], *, pickled: bool
) -> tuple[ServerSettings, tuple[ModelSpec, ...]]:
    """Return the server settings and the models of a target. ``pickled``: callables will be sent to workers.
    Raise ConfigError or BindError, or WrongCall if the other arguments do not apply to such a target.
    """
    made: Any = target
    if isinstance(target, Mapping):
        callables: Mapping[str, Any] = target
    elif callable(made) or is_stepped(made):
        name = str(getattr(made, "__name__", type(made).__name__))
        callables = {name if MODEL_NAME.fullmatch(name) else _NAMELESS: made}
    elif not isinstance(made, Server) and is_callable_path(os.fspath(made)):
        path, given = os.fspath(made), {"kwargs": dict(kwargs)} if kwargs else {}
        entry = entry_of(path, os.getcwd())
        model = {**entry, **given, **_plain_declarations(declared, entry["name"])}
        configuration = load_data({"models": [model]}, path, os.getcwd(), os.environ)
        return configuration.settings, configuration.models
    elif kwargs or declared:
        names = ", ".join([*(["kwargs"] if kwargs else []), *declared])
        raise WrongCall(f"{names}: expected with a callable alone, given with {target}")
    else:
        return _all_models(made)
    specs = [callable_spec(one, name, kwargs, declared, pickled=pickled) for name, one in callables.items()]
    return ServerSettings(), tuple(specs)


def callable_spec(
    target: Served,
    name: str,
    kwargs: Mapping[str, Any],
    declared: Mapping[str, Any],
    *,
    pickled: bool = False,
) -> ModelSpec:
    declarations = declaration(target, name, kwargs)
    entry = {"name": name, "callable": "the.test:callable"}
    entry |= {**declarations, **_plain_declarations(declared, name)}
    missing = [key for key in _TENSORS if key not in entry and not entry.get("openai")]
    if missing:
        raise BindError(
            f"the {' and '.join(missing)} of {described(target)} are not known: say {missing[0]}=[…], or "
            f"give the callable types (gpuserve.typed) or an attribute {missing[0]} = [Tensor(…)]"
        )
    (spec,) = load_data({"models": [entry]}, name, os.getcwd(), {}).models
    source = pickled_sources(name, [target])[0] if pickled else {"object": target}
    adapter = {key: spec.instances[0].source[key] for key in ("adapter",) if key in spec.instances[0].source}
    whole = {**source, "kwargs": dict(kwargs), **adapter}
    instances = tuple(dataclasses.replace(one, source=whole) for one in spec.instances)
    return dataclasses.replace(spec, instances=instances)


def open_triton_model(
    folder: str | PathLike[str], *, version: int | None = None, others: Mapping[str, Other] = NO_OTHERS
) -> LocalModel:
    """Open the model in a folder of a model repository.

    The folder has a ``config.pbtxt``, or a version folder with a ``model.py`` that completes its
    configuration.

    Args:
        folder: Path of the model's folder.
        version: Version of the model, the newest if None.
        others: Answers to the model's calls of other models: a ``LocalModel``, or a function from inputs to
            outputs by name.

    Raises:
        ConfigProblems: if the model cannot be served.
    """
    path = os.path.abspath(folder)
    name = os.path.basename(path)
    models = _folder_configuration(path).models
    found = [one for one in models if one.name == name and version in (None, one.version)]
    if not found:
        raise WrongCall(f"there is no version {version} of the model in {path}")
    spec = max(found, key=lambda one: one.version)
    return LocalModel(spec, spec.instances[0].source, OtherModels(others))


def open_callable(
    target: Served,
    /,
    *,
    name: str = _NAMELESS,
    kwargs: Mapping[str, Any] | None = None,
    others: Mapping[str, Other] = NO_OTHERS,
    **declared: Any,
) -> LocalModel:
    """Open the model of an inference callable: a function, a class or an object.

    Args:
        target: The callable.
        name: Name of the model.
        kwargs: Arguments of a class or a factory.
        others: As for ``open_triton_model``.
        declared: Keys of a config file's entry (``inputs``, ``outputs``, ``max_batch_size``, ``decoupled``).
            They override the callable's own declaration.

    Raises:
        ConfigProblems, BindError: if the model cannot be served.
        LoadError: if the callable's declaration is wrong.
    """
    spec = callable_spec(target, name, kwargs or {}, declared)
    return LocalModel(spec, spec.instances[0].source, OtherModels(others))


def run_triton_model(
    folder: str | PathLike[str],
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    /,
    *,
    others: Mapping[str, Other] = NO_OTHERS,
    **options: Unpack[CallOptions],
) -> Any:
    """Run one ``execute`` of the model in a folder of a model repository, from ``initialize`` to
    ``finalize``.

    Args:
        folder: Path of the model's folder.
        inputs: Inputs of one request, arrays or lists by name; or a list of such inputs for several requests
            of one batch.
        others: As for ``open_triton_model``.
        options: Options of ``ModelContext.infer``.

    Returns:
        The outputs of the request, or a list of outputs for a list of inputs. For a decoupled model, the
        outputs of all responses to the request.

    Raises:
        ConfigProblems: if the model cannot be served.
        ModelCallError: if a server would refuse the request, if the model does, or if its answer cannot be
            sent.
    """
    with open_triton_model(folder, others=others) as model:
        return _run(model, inputs, options)


def run_callable(
    target: Served,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    /,
    *,
    kwargs: Mapping[str, Any] | None = None,
    others: Mapping[str, Other] = NO_OTHERS,
    **declared: Any,
) -> Any:
    """Run one call of an inference callable, with its declarations. Otherwise as ``run_triton_model``."""
    with open_callable(target, kwargs=kwargs, others=others, **declared) as model:
        return _run(model, inputs, {})


def _run(
    model: LocalModel, inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]], options: CallOptions
) -> Outputs | list[Outputs]:
    if not isinstance(inputs, Mapping):
        return model.infer_batch(inputs, **options)
    return model.stream(inputs, **options) if model.spec.decoupled else model.infer(inputs, **options)


def _plain_declarations(declared: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return declarations of a test in the form of a config file."""
    return {key: plain_tensors(one, key, name) if key in _TENSORS else one for key, one in declared.items()}


def _all_models(target: Server | str | PathLike[str]) -> tuple[ServerSettings, tuple[ModelSpec, ...]]:
    if isinstance(target, Server):
        return target.settings, target.declared
    path = os.fspath(target)
    is_one_model = os.path.isdir(path) and _is_model_folder(path)
    folder = os.path.abspath(path)
    configuration = _folder_configuration(folder) if is_one_model else load_target(path, os.environ)
    if configuration.broken:
        raise ConfigProblems([one for each in configuration.broken.values() for one in each.problems])
    return configuration.settings, configuration.models


def _folder_configuration(path: str) -> Configuration:
    """Return the configuration of a repository's model and its dependencies."""
    name = os.path.basename(path)
    loader = RepositoryLoader([os.path.dirname(path)], {}, ())
    configuration = loader.load({name})
    if name in configuration.broken:
        raise configuration.broken[name]
    return configuration


def _is_model_folder(path: str) -> bool:
    """Return whether a folder is a model and not a repository: its versions are folders named by numbers."""
    with os.scandir(path) as entries:
        return any(
            one.name == "config.pbtxt"
            or (one.name.isdigit() and not os.path.exists(os.path.join(one.path, "config.pbtxt")))
            for one in entries
        )
