"""Where an inference callable comes from: an import path, a pickle or an object becomes something to call.

What it leads to, the target, is read like this:

==============================================  ===========================================
the target is                                   the inference callable is
==============================================  ===========================================
a class                                         an instance, made with ``kwargs``
a function decorated by ``gpuserve.decorators``  the function
a function with a parameter named ``requests``   the function
a function, where ``kwargs`` are given           what it returns: it is a factory
a function that needs nothing but ``device``     what it returns: it is a factory
anything else that can be called                 the target itself
==============================================  ===========================================

A source may name an ``adapter``, the path of a function, which makes an inference callable of it.

A class or a factory that has a parameter named ``device`` is given the instance's device, unless
``kwargs`` name one. Whatever goes wrong is a ``LoadError`` with one sentence for the operator. How the
callable is called is not known here; see ``loop.py``.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from importlib.machinery import SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any, Final, NoReturn, TypeAlias

from gpuserve_worker.calling.failure import log_text, log_traceback
from gpuserve_worker.calling.request import accepts_batch, function_of

InferenceCallable: TypeAlias = Callable[[Any], Any]


class LoadError(Exception):
    """The callable cannot be loaded. ``traceback`` is that of the user's code, "" where none ran."""

    def __init__(self, text: str, traceback: str = "") -> None:
        super().__init__(text)
        self.traceback = traceback


class CallableKind(enum.Enum):
    PLAIN = "a function"
    COROUTINE = "an async function"
    GENERATOR = "a generator"
    ASYNC_GENERATOR = "an async generator"


#: Kinds that give any number of responses.
YIELDING: Final = frozenset({CallableKind.GENERATOR, CallableKind.ASYNC_GENERATOR})


def locate(source: MutableMapping[str, Any]) -> Any:
    """The target that ``wire.Init.source`` leads to: imported, unpickled, or the object itself. A pickle is
    taken out of ``source``: arrays of gigabytes are not to be kept twice.
    """
    if "object" in source:
        return source["object"]
    if "pickle" in source:
        # After our own: a module of the user's must not take the place of one that the worker needs.
        sys.path += [path for path in source.get("sys_path", ()) if path not in sys.path]
        return _unpickle(source.pop("pickle"))
    return _import(source["path"], source.get("base_dir") or os.getcwd())


def build(
    target: Any, source: Mapping[str, Any], device: str, *, may_yield: bool = False
) -> InferenceCallable:
    """The inference callable that ``target`` is or makes, by the table above; raises ``LoadError``, also
    where it is a generator and may not be.
    """
    name = str(source.get("path") or getattr(target, "__qualname__", type(target).__name__))
    kwargs = dict(source.get("kwargs") or {})
    made = target
    if _makes_callable(target, kwargs):
        if not isinstance(target, type) and kind_of(target) is not CallableKind.PLAIN:
            raise LoadError(f"{name} is {kind_of(target).value}, which cannot be a factory")
        made = _make(target, name, kwargs, device)
    elif kwargs:
        raise LoadError(f"{name} is called as it is, so it takes no kwargs, but {_names(kwargs)} given")
    if adapter := source.get("adapter"):
        made = _adapted(made, name, adapter)
    if not callable(made):
        came = "" if made is target else "returned "
        raise LoadError(
            f"{name} {came or 'is '}an object of type {type(made).__name__}, which cannot be called; "
            "expected a function, a class, or an object with __call__"
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
    """How a callable answers, seen through decorators that keep ``__wrapped__``."""
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


def _makes_callable(target: Any, kwargs: Mapping[str, Any]) -> bool:
    if isinstance(target, type):
        return True
    if not isinstance(target, FunctionType) or accepts_batch(target):
        return False
    parameters = _parameters(target)
    if "requests" in parameters:
        return False
    return bool(kwargs) or ("device" in parameters and not _needs_more_than_device(parameters))


def _needs_more_than_device(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether something else has to be given, as the requests of an inference callable have."""
    required = [
        one.name
        for one in parameters.values()
        if one.default is one.empty and one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}
    ]
    return bool(set(required) - {"device"})


def _make(target: Callable[..., Any], name: str, kwargs: dict[str, Any], device: str) -> Any:
    if "device" in _parameters(target):
        kwargs.setdefault("device", device)
    try:
        return target(**kwargs)
    except LoadError:  # one of ours, which says it in a sentence
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything; none of it is ours
        raise LoadError(f"{name} raised {log_text(error)}", log_traceback(error)) from None


def _adapted(made: Any, name: str, adapter: str) -> Any:
    """What the function at the path ``adapter`` makes of a callable that is not written for tensors."""
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


def _names(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, kwargs)) + (" was" if len(kwargs) == 1 else " were")


def _unpickle(data: bytes) -> Any:
    try:
        import cloudpickle  # a worker whose callable comes by import path does without

        return cloudpickle.loads(data)
    except (Exception, SystemExit) as error:  # unpickling imports the user's modules
        raise LoadError(
            f"unpickling the inference callable raised {log_text(error)}", log_traceback(error)
        ) from None


def _import(path: str, base_dir: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise LoadError(f"{path!r} is no import path: expected file.py:attribute or package.module:attribute")
    return _attribute(module_at(module_name, base_dir), module_name, attribute)


def module_at(place: str, base_dir: str) -> ModuleType:
    """The module of a file, or of that name; raises ``LoadError``."""
    base_dir = os.path.abspath(base_dir)
    _put_first(base_dir)
    if not place.endswith(".py"):
        return _import_name(place)
    file = os.path.join(base_dir, place)
    _put_first(os.path.dirname(file))  # its neighbours can be imported, as when it is run itself
    return _import_file(file, place)


def _put_first(directory: str) -> None:
    if directory not in sys.path[:1]:
        sys.path.insert(0, directory)


class UncachedSource(SourceFileLoader):
    """Compiles the source at each load: byte code counts as that of a file that was changed within its second
    to one of the same size, and a load anew would bring the old code.
    """

    def path_stats(self, path: str) -> NoReturn:
        raise OSError("no byte code is looked for")


def _import_file(file: str, shown: str) -> ModuleType:
    """The module in ``file`` under its stem's name, registered, so that pickles of its classes load."""
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
            raise LoadError(f"{module_name} has no attribute {attribute!r}{_nearest(value, part)}") from None
    return value


def _nearest(holder: Any, name: str) -> str:
    import difflib  # only an error needs it

    known = [one for one in dir(holder) if not one.startswith("_") and callable(getattr(holder, one, None))]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
