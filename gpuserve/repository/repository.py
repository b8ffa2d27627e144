"""Model repositories as a running server reads them again: for one model, or for all that has changed."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from gpuserve.config.load import Configuration
from gpuserve.config.messages import ConfigProblems
from gpuserve.config.precedence import Override
from gpuserve.declare.spec import ModelSpec
from gpuserve.placement.server_devices import ServerDevices
from gpuserve.repository.folders import model_paths, stamps
from gpuserve.repository.load import RepositoryLoader
from gpuserve.settings.checks import missing
from gpuserve.stamps import folders_in


class TritonRepository:
    """Model repositories, read again for each load and each reload, under the environment and the flags of
    the start. ``start`` is what they said then. Raises ConfigProblems: they are not there, or have nothing
    that can be served.
    """

    def __init__(
        self,
        paths: Sequence[str],
        environ: Mapping[str, str],
        flags: Sequence[Override],
        devices: ServerDevices | None = None,
    ) -> None:
        self.path = ", ".join(paths)
        self._loader = RepositoryLoader(paths, environ, flags, devices or ServerDevices())
        self.start = self._loader.load()
        self._known = _names(self.start)
        self.start_stamps = self.stamps()

    def stamps(self) -> Mapping[Hashable, Hashable]:
        """What tells that a file in the folder of a model has changed. From any thread. Raises OSError: the
        repositories cannot be read.
        """
        return {name: one for path in self._loader.paths for name, one in stamps(path).items()}

    def folders(self) -> Collection[str]:
        models = [model for path in self._loader.paths for model in model_paths(path)]
        return {*self._loader.paths, *(one for model in models for one in folders_in(model))}

    def names(self) -> Sequence[str]:
        return self._known

    def read(self, model: str) -> Sequence[ModelSpec]:
        """The versions of a model as its folder has them now; none where there is no such folder. Raises
        ConfigProblems: it cannot be served.
        """
        if model not in self._loader.names():
            return ()
        configuration = self._loader.load([model])
        if model in configuration.broken:
            raise configuration.broken[model]
        self._known = tuple(dict.fromkeys((*self._known, model)))
        return [one for one in configuration.models if one.name == model]

    def read_all(self, changed: Collection[str] | None = None) -> Configuration:
        """All that the folders say now, not only those that have ``changed``; models that cannot be served
        are ``broken``. Raises ConfigProblems: nothing can be served, or tracing needs a missing package.
        """
        configuration = self._loader.load()
        problem = missing(configuration.settings.trace.mode)
        if problem is not None:
            raise ConfigProblems([configuration.sources.problem(("server", "trace", "mode"), problem)])
        self._known = _names(configuration)
        return configuration


def _names(configuration: Configuration) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*(one.name for one in configuration.models), *configuration.broken)))
