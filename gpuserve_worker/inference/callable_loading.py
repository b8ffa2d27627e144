"""Loading of inference callables: from an import path, a pickle or an object to a callable object.

The source leads to a target, which is read as follows:

==============================================  ===========================================
the target is                                   the inference callable is
==============================================  ===========================================
a class                                         an instance, made with ``kwargs``
a function decorated by ``gpuserve.decorators``  the function
a function with a parameter named ``requests``   the function
a function, where ``kwargs`` are given           its return value: it is a factory
a function that needs nothing but ``device``     its return value: it is a factory
anything else that can be called                 the target itself
==============================================  ===========================================

A source may name an ``adapter``, the path of a function that converts the target into an inference callable.

A class or a factory with a parameter named ``device`` is given the instance's device, unless ``kwargs`` name
one. Every failure is a ``LoadError`` with one sentence for the operator.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib.machinery import SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any, Final, NoReturn, TypeAlias

from gpuserve_worker.inference.failure import log_text, log_traceback
from gpuserve_worker.inference.inference_request import accepts_batch, function_of
from gpuserve_worker.inference.stepping import is_stepped

InferenceCallable: TypeAlias = Callable[[Any], Any]


class LoadError(Exception):
    """The callable cannot be loaded. ``traceback`` is that of the user's code, "" if none ran."""

    def __init__(self, text: str, traceback: str = "") -> None:
        super().__init__(text)
        self.traceback = traceback


class CallableKind(enum.Enum):
    """The kind of results that a callable returns."""

    PLAIN = "a function"
    COROUTINE = "an async function"
    GENERATOR = "a generator"
    ASYNC_GENERATOR = "an async generator"


#: Kinds that return any number of responses.
YIELDING: Final = frozenset({CallableKind.GENERATOR, CallableKind.ASYNC_GENERATOR})


def locate(source: MutableMapping[str, Any]) -> Any:
    """Return the target of ``wire.Init.source``: imported, unpickled, or the object itself. A pickle is
    removed from ``source``, so that arrays of gigabytes are not kept twice.
    """
    if "object" in source:
        return source["object"]
    if "pickle" in source:
        # The user's paths come last: a user module must not replace one that the worker needs.
        sys.path += [path for path in source.get("sys_path", ()) if path not in sys.path]
        return _unpickle(source.pop("pickle"), source.pop("buffers", ()))
    path = source["path"]
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise LoadError(f"{path!r} is no import path: expected file.py:attribute or package.module:attribute")
    module = module_at(module_name, source.get("base_dir") or os.getcwd())
    return _attribute(module, module_name, attribute)


def build(
    target: Any, source: Mapping[str, Any], device: str, *, may_yield: bool = False
) -> InferenceCallable:
    """Return the inference callable that ``target`` is or makes, by the table above. Raise ``LoadError``,
    also if the callable is a generator and the model is not decoupled.
    """
    name = str(source.get("path") or getattr(target, "__qualname__", type(target).__name__))
    kwargs = dict(source.get("kwargs") or {})
    made = target
    if makes_callable(target, kwargs):
        if not isinstance(target, type) and kind_of(target) is not CallableKind.PLAIN:
            raise LoadError(f"{name} is {kind_of(target).value}, which cannot be a factory")
        made = _make(target, name, kwargs, device)
    elif kwargs:
        raise LoadError(unused_kwargs(name, kwargs))
    if adapter := source.get("adapter"):
        made = _adapted(made, name, adapter)
    if not (callable(made) or is_stepped(made)):
        came = "" if made is target else "returned "
        raise LoadError(
            f"{name} {came or 'is '}an object of type {type(made).__name__}, which cannot be called; "
            "expected a function, a class, or an object with __call__, or with admit and step"
        )
    kind = kind_of(made)
    if kind in YIELDING and not may_yield:
        raise LoadError(
            f"{name} is {kind.value}, which gives any number of responses to a request, but the model is not "
            "decoupled; make it so (decoupled=True in ModelConfig, decoupled: true in a config file), or "
            "return one response"
        )
    inference_callable: InferenceCallable = made
    return inference_callable


def kind_of(inference_callable: Any) -> CallableKind:
    """Return the kind of a callable's results. Decorators that keep ``__wrapped__`` are unwrapped."""
    while isinstance(inference_callable, functools.partial):
        inference_callable = inference_callable.func
    function = inspect.unwrap(function_of(inference_callable) or inference_callable)
    if inspect.isasyncgenfunction(function):
        return CallableKind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(function):
        return CallableKind.COROUTINE
    if inspect.isgeneratorfunction(function):
        return CallableKind.GENERATOR
    return CallableKind.PLAIN


def makes_callable(target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a target is called once, to make the inference callable, by the table above."""
    if isinstance(target, type):
        return True
    if not isinstance(target, FunctionType) or accepts_batch(target):
        return False
    parameters = _parameters(target)
    if "requests" in parameters:
        return False
    return bool(kwargs) or ("device" in parameters and not _needs_more_than_device(parameters))


def _needs_more_than_device(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a parameter other than ``device`` has no default."""
    return any(is_required(one) and one.name != "device" for one in parameters.values())


def is_required(parameter: inspect.Parameter) -> bool:
    """Return whether a call must pass the parameter."""
    variadic = parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD
    return parameter.default is parameter.empty and parameter.kind not in variadic


def _make(target: Callable[..., Any], name: str, kwargs: dict[str, Any], device: str) -> Any:
    if problem := kwargs_problem(target, name, kwargs):
        raise LoadError(problem)
    if "device" in _parameters(target):
        kwargs.setdefault("device", device)
    try:
        return target(**kwargs)
    except LoadError:  # already one sentence for the operator
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise LoadError(f"{name} raised {log_text(error)}", log_traceback(error)) from None


def kwargs_problem(target: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return why a class or a factory cannot be called with ``kwargs``, or None."""
    try:
        signature = inspect.signature(target)
    except (ValueError, TypeError):
        return None  # classes of extension modules may have no signature
    given = dict(kwargs)
    if "device" in signature.parameters:
        given.setdefault("device", "cpu")
    try:
        signature.bind(**given)
    except TypeError as error:
        return f"{name!r} cannot be made with these kwargs: {error}"
    return None


def _adapted(made: Any, name: str, adapter: str) -> Any:
    """Return the inference callable that the function at the path ``adapter`` makes."""
    module_name, _, attribute = adapter.partition(":")
    adapt = _attribute(_import_name(module_name), module_name, attribute)
    try:
        return adapt(made)
    except TypeError as error:
        raise LoadError(f"{name}: {error}") from None


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # written in C without a signature
        return {}


def unused_kwargs(name: str, kwargs: Mapping[str, Any]) -> str:
    """Return the error of kwargs for a callable that is not made by a call."""
    given = ", ".join(map(repr, kwargs)) + (" was" if len(kwargs) == 1 else " were")
    return f"{name} is called as it is, so it takes no kwargs, but {given} given"


def _unpickle(data: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    try:
        return pickle.loads(data, buffers=buffers)
    except (Exception, SystemExit) as error:  # unpickling imports the user's modules
        raise LoadError(
            f"unpickling the inference callable raised {log_text(error)}", log_traceback(error)
        ) from None


def module_at(place: str, base_dir: str) -> ModuleType:
    """Return the module in a file, or of a name. Raise ``LoadError``."""
    base_dir = os.path.abspath(base_dir)
    _put_first(base_dir)
    if not place.endswith(".py"):
        return _import_name(place)
    file = os.path.join(base_dir, place)
    _put_first(os.path.dirname(file))  # so that files beside it can be imported, as in a script
    return _import_file(file, place)


def _put_first(directory: str) -> None:
    if directory not in sys.path[:1]:
        sys.path.insert(0, directory)


class UncachedSource(SourceFileLoader):
    """A loader that compiles the source at each load. Python takes byte code as valid for a file that was
    changed within one second to the same size, and a reload would run the old code.
    """

    def path_stats(self, path: str) -> NoReturn:
        raise OSError("no byte code is looked for")


def _import_file(file: str, shown: str) -> ModuleType:
    """Return a file's module, in ``sys.modules`` by its stem, so that pickles of its classes load."""
    if not os.path.isfile(file):
        raise LoadError(f"{shown} was not found: there is no file {file}")
    name = os.path.basename(file).removesuffix(".py")
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == file:
        return known
    if known is not None:
        raise LoadError(f"{shown} has the name of a module that is already in use, {name!r}; rename the file")
    spec = importlib.util.spec_from_file_location(name, file, loader=UncachedSource(name, file))
    if spec is None or spec.loader is None:
        raise LoadError(f"{shown} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        del sys.modules[name]
        raise _import_failed(shown, error) from None
    return module


def _import_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise LoadError(f"module {name!r} was not found: there is no module {error.name!r}") from None
        raise _import_failed(name, error) from None
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise _import_failed(name, error) from None


def _import_failed(shown: str, error: BaseException) -> LoadError:
    return LoadError(f"importing {shown} raised {log_text(error)}", log_traceback(error))


def _attribute(module: ModuleType, module_name: str, attribute: str) -> Any:
    value: Any = module
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            import difflib  # only an error needs it

            known = [x for x in dir(value) if not x.startswith("_") and callable(getattr(value, x, None))]
            near = difflib.get_close_matches(part, known, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise LoadError(f"{module_name} has no attribute {attribute!r}{hint}") from None
    return value
