"""The server as a ``model.py`` sees it: the model that this process serves, the server's log, other models'
loading, and custom metrics (``MetricFamily``, ``Metric``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from gpuserve.backends.python_backend.errors import TritonModelException, text_of
from gpuserve_worker.inference import callable_metrics as metrics
from gpuserve_worker.inference.callable_metrics import MetricError, MetricKind
from gpuserve_worker.inference.model_calls import ModelCallError
from gpuserve_worker.inference.model_context import ALONE, ModelContext, current_model

T = TypeVar("T")


class ServedModel(NamedTuple):
    """The model of this process. ``folder`` is the folder of the version, which contains ``model.py``."""

    name: str
    version: int
    folder: str


class _ServedState:
    """The model and the worker of this process, for all threads, including threads that the model starts."""

    model: ServedModel | None = None
    context: ModelContext = ALONE


def set_served_model(model: ServedModel) -> None:
    _ServedState.model = model
    with suppress(LookupError):  # no server created the model
        _ServedState.context = current_model()


def served_triton_model() -> ServedModel:
    """Return the model of this process. Raise ``TritonModelException`` if there is none."""
    if _ServedState.model is None:
        raise TritonModelException(
            "no model is served here: this only works inside a model.py that a server runs"
        )
    return _ServedState.model


def worker_context() -> ModelContext:
    """Return the model context of this thread or process, ``ALONE`` without a server."""
    try:
        return current_model()
    except LookupError:  # a thread that the model has started
        return _ServedState.context


def get_model_dir() -> str:
    """Return the folder that contains ``model.py``."""
    return served_triton_model().folder


class TritonLogLevel(enum.Enum):
    """The severity of a line that a model logs."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


#: The levels of the module ``logging``.
_LEVELS: Final = {
    TritonLogLevel.INFO: 20,
    TritonLogLevel.WARNING: 30,
    TritonLogLevel.ERROR: 40,
    TritonLogLevel.VERBOSE: 10,
}


class Logger:
    """The server's log. Each line carries the model and its instance."""

    LogLevel: ClassVar = TritonLogLevel
    INFO: ClassVar = TritonLogLevel.INFO
    WARNING: ClassVar = TritonLogLevel.WARNING
    ERROR: ClassVar = TritonLogLevel.ERROR
    VERBOSE: ClassVar = TritonLogLevel.VERBOSE

    @staticmethod
    def log(message: str | bytes, level: TritonLogLevel = TritonLogLevel.INFO) -> None:
        if not isinstance(level, TritonLogLevel):
            raise TypeError(f"the level of a log line is pb_utils.Logger.INFO and so on, not {level!r}")
        worker_context().log(_LEVELS[level], text_of(message, "a log line"))

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, TritonLogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, TritonLogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, TritonLogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, TritonLogLevel.VERBOSE)


def load_model(model_name: str, config: str = "", files: Mapping[str, Any] | None = None) -> None:
    """Load or reload a model of the server. The model is served when the function returns."""
    if files:
        raise TritonModelException(
            f"Failed to load model: {model_name!r} was given files ({', '.join(map(repr, files))}), which "
            "this server does not take: put them into the model's folder, and load it without"
        )
    _call(worker_context().load_model, model_name, config=config, failure="Failed to load model: ")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model of the server and, with ``unload_dependents``, the models of its steps."""
    unload, failure = worker_context().unload_model, "Failed to unload model: "
    _call(unload, model_name, unload_dependents=unload_dependents, failure=failure)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether a model accepts requests."""
    is_ready, failure = worker_context().is_model_ready, "Failed to check model readiness: "
    return _call(is_ready, model_name, version=model_version, failure=failure)


class MetricFamily:
    """All metrics of one name. The instances and models of a server share the family."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._registry = worker_context().metrics
        self._family = _call(self._registry.family, name, description, kind)

    def Metric(  # noqa: N802 - Triton's name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric with these labels. ``buckets`` are the upper bounds of a histogram's buckets."""
        return Metric(_call(self._registry.series, self._family, labels, buckets))


class Metric:
    """One series of a metric family, identified by its labels."""

    __slots__ = ("_series",)

    def __init__(self, series: metrics.Metric) -> None:
        self._series = series

    def increment(self, value: float) -> None:
        _call(self._series.increment, value)

    def set(self, value: float) -> None:
        _call(self._series.set, value)

    def observe(self, value: float) -> None:
        _call(self._series.observe, value)

    def value(self) -> float:
        """Return the value that this instance has contributed."""
        return _call(self._series.value)


def _call(function: Callable[..., T], *arguments: Any, failure: str = "", **options: Any) -> T:
    """Return what a function of the server returns. Raise its error as ``TritonModelException``."""
    try:
        return function(*arguments, **options)
    except (MetricError, ModelCallError) as error:
        raise TritonModelException(f"{failure}{error}") from None
