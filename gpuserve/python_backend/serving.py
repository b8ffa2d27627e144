"""What a ``model.py`` does with its server besides inference: its log, and the models that are loaded."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from gpuserve.python_backend.errors import TritonModelException
from gpuserve.python_backend.model_file import context
from gpuserve_worker.calling.questions import ModelCallError


class Level(enum.Enum):
    """How much a line that a model logs matters."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


#: The levels as ``logging`` has them.
_LEVELS: Final = {Level.INFO: 20, Level.WARNING: 30, Level.ERROR: 40, Level.VERBOSE: 10}


class Logger:
    """Lines in the server's log, with the model and its instance."""

    LogLevel: ClassVar = Level
    INFO: ClassVar = Level.INFO
    WARNING: ClassVar = Level.WARNING
    ERROR: ClassVar = Level.ERROR
    VERBOSE: ClassVar = Level.VERBOSE

    @staticmethod
    def log(message: str, level: Level = Level.INFO) -> None:
        if not isinstance(level, Level):
            raise TypeError(f"the level of a log line is pb_utils.Logger.INFO and so on, not {level!r}")
        context().log(_LEVELS[level], str(message))

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Level.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Level.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Level.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Level.VERBOSE)


def load_model(model_name: str, config: str = "", files: Mapping[str, Any] | None = None) -> None:
    """Load a model of the server, or load it anew; it is served when this returns."""
    if files:
        raise TritonModelException(
            f"Failed to load model: {model_name!r} was given files ({', '.join(map(repr, files))}), which "
            "this server does not take: put them into the model's folder, and load it without"
        )
    try:
        context().load_model(model_name, config=config)
    except ModelCallError as error:
        raise TritonModelException(f"Failed to load model: {error}") from None


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model of the server, and with it the models of its steps."""
    try:
        context().unload_model(model_name, unload_dependents=unload_dependents)
    except ModelCallError as error:
        raise TritonModelException(f"Failed to unload model: {error}") from None


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model takes requests."""
    try:
        return context().is_model_ready(model_name, version=model_version)
    except ModelCallError as error:
        raise TritonModelException(f"Failed to check model readiness: {error}") from None
