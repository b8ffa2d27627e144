"""Models for tests, from a folder of Triton or from a callable at hand: what is declared of them is found as
a server finds it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Unpack

from gpuserve.config.load import load_data
from gpuserve.describe.declaration import declaration
from gpuserve.placement.server_devices import ServerDevices
from gpuserve.repository.load import RepositoryLoader
from gpuserve.testing.answers import Outputs
from gpuserve.testing.local_model import LocalModel
from gpuserve.testing.others import Other, OtherModels
from gpuserve_worker.calling.questions import CallOptions

_NO_OTHERS: Final[Mapping[str, Other]] = {}


def open_triton_model(
    folder: str | Path, *, version: int | None = None, others: Mapping[str, Other] = _NO_OTHERS
) -> LocalModel:
    """The model in a folder of a model repository: a ``config.pbtxt``, or a version folder with a
    ``model.py`` that completes its configuration. The newest version where none is named. ``others`` answer
    what it asks other models: a ``LocalModel``, or a function from inputs to outputs by name.

    Raises:
        ConfigProblems: the model cannot be served.
    """
    path = os.path.abspath(folder)
    name = os.path.basename(path)
    loader = RepositoryLoader([os.path.dirname(path)], {}, (), ServerDevices())
    configuration = loader.load({name})
    if name in configuration.broken:
        raise configuration.broken[name]
    found = [one for one in configuration.models if one.name == name and version in (None, one.version)]
    if not found:
        raise ValueError(f"there is no version {version} of the model in {path}")
    spec = max(found, key=lambda one: one.version)
    return LocalModel(spec, spec.instances[0].source, OtherModels(others))


def open_callable(
    target: Callable[..., Any],
    /,
    *,
    name: str = "model",
    kwargs: Mapping[str, Any] | None = None,
    others: Mapping[str, Other] = _NO_OTHERS,
    **declared: Any,
) -> LocalModel:
    """The model of an inference callable: a function, a class, an object. ``declared`` has keys of a config
    file's entry (``inputs``, ``outputs``, ``max_batch_size``, ``decoupled``), which go before what the
    callable says of itself; ``kwargs`` and ``others`` are as there and in ``open_triton_model``.

    Raises:
        ConfigProblems: the model cannot be served.
        LoadError: the callable says wrong things of itself.
    """
    given = dict(kwargs or {})
    entry = {"name": name, "callable": "the.test:callable", **declaration(target, name, given), **declared}
    (spec,) = load_data({"models": [entry]}, name, os.getcwd(), {}).models
    return LocalModel(spec, {"object": target, "kwargs": given}, OtherModels(others))


def run_triton_model(
    folder: str | Path,
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
        ValueError: a server would refuse the request.
        ModelCallError: the model refused it, or its answer cannot be sent.
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
