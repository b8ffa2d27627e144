"""The config file as a running server reads it again: for one model, or for all that has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuserve.config.load import Configuration, load_file
from gpuserve.config.messages import ConfigProblems
from gpuserve.config.precedence import Override
from gpuserve.declare.spec import ModelSpec
from gpuserve.settings.checks import missing


class FileRepository:
    """A config file, read again for each load and each reload, under the environment and the flags of the
    start. ``start`` is what it said then, with its models as they are declared, not placed.
    """

    def __init__(
        self, path: str, environ: Mapping[str, str], flags: Sequence[Override], start: Configuration
    ) -> None:
        self.start = start
        self.path = path
        self._environ = dict(environ)
        self._flags = flags
        self._known = _names(start)

    def names(self) -> Sequence[str]:
        return self._known

    def read(self, model: str) -> Sequence[ModelSpec]:
        """The versions of a model as the file has them now. Raises ConfigProblems: the file cannot be read,
        or any of it is wrong.
        """
        return [one for one in self.read_all().models if one.name == model]

    def read_all(self) -> Configuration:
        """All that the file says now. Raises ConfigProblems: the file cannot be read, any of it is wrong, or
        tracing needs a package that is not there.
        """
        configuration = load_file(self.path, self._environ, self._flags)
        problem = missing(configuration.settings.trace.mode)
        if problem is not None:
            raise ConfigProblems([configuration.sources.problem(("server", "trace", "mode"), problem)])
        self._known = _names(configuration)
        return configuration


def _names(configuration: Configuration) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.name for one in configuration.models))
