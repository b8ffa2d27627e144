"""The config file as a running server reads it again: for one model, or for all that has changed."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Final

from gpuserve.config.described import Said
from gpuserve.config.load import Configuration, load_file
from gpuserve.config.messages import ConfigProblems
from gpuserve.config.precedence import Override
from gpuserve.declare.spec import ModelSpec
from gpuserve.runtimes.table import is_model_path
from gpuserve.settings.checks import missing
from gpuserve.stamps import file_stamp, folder_stamp, folders_in

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
        self._files = named_files(start)
        self.start_stamps = self.stamps()

    def names(self) -> Sequence[str]:
        return self._known

    def read(self, model: str) -> Sequence[ModelSpec]:
        """The versions of a model as the file has them now; the callables of others are not asked again what
        they say. Raises ConfigProblems: the file cannot be read, or any of it is wrong.
        """
        others = [one for one in self._said if one.model != model]
        return [one for one in self._read(others).models if one.name == model]

    def read_all(self, changed: Collection[str] | None = None) -> Configuration:
        """All that the file says now. Where the models whose files have ``changed`` are given, the callables
        of others are not asked again what they say, and a model whose callable cannot be is ``broken``.
        Raises ConfigProblems: the file cannot be read, any of it is wrong, or tracing needs a package that is
        not there.
        """
        if changed is None:
            return self._read(())
        return self._read([one for one in self._said if one.model not in changed], self._said)

    def _read(self, known: Iterable[Said], stale: Iterable[Said] = ()) -> Configuration:
        configuration = load_file(self.path, self._environ, self._flags, known=known, stale=stale)
        problem = missing(configuration.settings.trace.mode)
        if problem is not None:
            raise ConfigProblems([configuration.sources.problem(("server", "trace", "mode"), problem)])
        self._known = _names(configuration)
        self._files = named_files(configuration, self._files)
        self._said = configuration.said
        return configuration

    def stamps(self) -> Mapping[Hashable, Hashable]:
        """What tells that the config, or under a model's name a file that its callable or its arguments name,
        has changed. From any thread.
        """
        return {WHOLE: file_stamp(self.path), **stamps_of(self._files)}

    def folders(self) -> Collection[str]:
        return {os.path.dirname(os.path.abspath(self.path)), *folders_of(self._files)}


def named_files(
    configuration: Configuration, before: Mapping[str, Collection[str]] | None = None
) -> dict[str, tuple[str, ...]]:
    """The files that models' callables and their arguments name, and folders that are model files: those that
    are there, or were ``before``.
    """
    found: dict[str, dict[str, None]] = {}
    for entry in configuration.entries.models:
        known = (before or {}).get(entry.name, ())
        target = entry.callable or ""
        named = [target.partition(":")[0], *(one for one in entry.kwargs.values() if isinstance(one, str))]
        paths = [os.path.join(configuration.base_dir, one) for one in named if one]
        there = [one for one in paths if os.path.isfile(one) or one in known]
        if is_model_path(target) and os.path.isdir(paths[0]):
            there.append(paths[0])
        found.setdefault(entry.name, {}).update(dict.fromkeys(there))
    return {name: tuple(paths) for name, paths in found.items()}


def stamps_of(files: Mapping[str, Sequence[str]]) -> dict[Hashable, Hashable]:
    """By model, what tells that any of its files has changed."""
    return {model: tuple(map(_stamp, paths)) for model, paths in files.items()}


def _stamp(path: str) -> Hashable:
    return folder_stamp(path) if os.path.isdir(path) else file_stamp(path)


def folders_of(files: Mapping[str, Iterable[str]]) -> set[str]:
    """The folders in which changes of these files are to be seen."""
    found: set[str] = set()
    for path in (path for paths in files.values() for path in paths):
        found.add(os.path.dirname(path))
        found.update(folders_in(path) if os.path.isdir(path) else [os.path.dirname(os.path.realpath(path))])
    return found


def _names(configuration: Configuration) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.name for one in configuration.models))
