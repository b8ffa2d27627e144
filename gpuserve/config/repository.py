"""The config file as a running server reads it again: for one model, or for all that has changed."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final

from gpuserve.config.described import Said
from gpuserve.config.load import Configuration, load_file
from gpuserve.config.messages import ConfigProblems
from gpuserve.config.precedence import Override
from gpuserve.config.stamps import file_stamp
from gpuserve.declare.spec import ModelSpec
from gpuserve.settings.checks import missing

#: What a change of the config itself is told under, which no model can be called.
WHOLE: Final = ""


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
        self._said = start.said
        self._files = _files(start)
        self.start_stamps = self.stamps()

    def names(self) -> Sequence[str]:
        return self._known

    def read(self, model: str) -> Sequence[ModelSpec]:
        """The versions of a model as the file has them now; the callables of others are not asked again what
        they say. Raises ConfigProblems: the file cannot be read, or any of it is wrong.
        """
        others = [one for one in self._said if one.model != model]
        return [one for one in self._read(others).models if one.name == model]

    def read_all(self) -> Configuration:
        """All that the file says now. Raises ConfigProblems: the file cannot be read, any of it is wrong, or
        tracing needs a package that is not there.
        """
        return self._read(())

    def _read(self, known: Iterable[Said]) -> Configuration:
        configuration = load_file(self.path, self._environ, self._flags, known=known)
        problem = missing(configuration.settings.trace.mode)
        if problem is not None:
            raise ConfigProblems([configuration.sources.problem(("server", "trace", "mode"), problem)])
        self._known = _names(configuration)
        self._files = _files(configuration)
        self._said = configuration.said
        return configuration

    def stamps(self) -> Mapping[str, Hashable]:
        """What tells that the config, or under a model's name a file that its callable or its arguments name,
        has changed. From any thread.
        """
        return {
            WHOLE: file_stamp(self.path),
            **{model: tuple(map(file_stamp, paths)) for model, paths in self._files.items()},
        }


def _files(configuration: Configuration) -> dict[str, tuple[str, ...]]:
    """The files that models' callables and their arguments name."""
    found: dict[str, dict[str, None]] = {}
    for entry in configuration.entries.models:
        place = (entry.callable or "").partition(":")[0]
        named = [place, *(one for one in entry.kwargs.values() if isinstance(one, str))]
        paths = [os.path.join(configuration.base_dir, one) for one in named if one]
        there = [one for one in paths if os.path.isfile(one)]
        found.setdefault(entry.name, {}).update(dict.fromkeys(there))
    return {name: tuple(paths) for name, paths in found.items()}


def _names(configuration: Configuration) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.name for one in configuration.models))
