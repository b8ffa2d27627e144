"""Which files belong to which model, beside those that its declaration names: what its workers have imported,
and, of a model that could not be loaded, whatever else of Python lies in its folders. Pure.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

#: Loads of a version whose imports count: the one that serves, and the one that was begun last.
_LOADS: Final = 2


class ImportedFile(NamedTuple):
    """A file that workers of a model have imported."""

    model: str
    path: str


class SourceFolder(NamedTuple):
    """A folder of a model that cannot be loaded: what it lacks may appear here. The files of other models are
    not of it.
    """

    model: str
    path: str
    without: frozenset[str]


class FollowedFiles:
    """The files of all models of one server."""

    def __init__(self) -> None:
        #: By model and version the imports of its last loads, each by the number of its generation.
        self._imports: dict[tuple[str, int], dict[int, set[str]]] = {}
        self._broken: dict[str, frozenset[SourceFolder]] = {}

    def imported(self, model: str, version: int, generation: int, files: Iterable[str]) -> None:
        """Note what a worker of a load has imported."""
        loads = self._imports.setdefault((model, version), {})
        loads.setdefault(generation, set()).update(files)
        for old in sorted(loads)[:-_LOADS]:
            del loads[old]

    def files(self, model: str) -> set[str]:
        loads = [one for (name, _), one in self._imports.items() if name == model]
        return {path for one in loads for paths in one.values() for path in paths}

    def loaded(self, models: Collection[str]) -> None:
        """Note that these models are as their files say."""
        for model in models:
            self._broken.pop(model, None)

    def sources(self, models: Iterable[str], folders: Iterable[str]) -> set[SourceFolder]:
        """Return where these models may find what they lack: in ``folders``, or beside what they import. A
        model that is not known by its name yet is "".
        """
        return {
            SourceFolder(model, path, self._files_of_others(model))
            for model in models
            for path in {*folders, *map(os.path.dirname, self.files(model))}
        }

    def failed(self, models: Collection[str], sources: Iterable[SourceFolder]) -> None:
        """Note that these models could not be loaded from their files, and where they looked for them."""
        for model in models:
            self._broken[model] = frozenset(one for one in sources if one.model == model)

    def all(self) -> set[ImportedFile | SourceFolder]:
        """Return all that is to be looked at."""
        files = {ImportedFile(name, path) for name, _ in self._imports for path in self.files(name)}
        return files.union(*self._broken.values())

    def _files_of_others(self, model: str) -> frozenset[str]:
        others = {name for name, _ in self._imports} - {model}
        return frozenset().union(*map(self.files, others)) - self.files(model)

    def folders(self) -> set[str]:
        """Return the folders in which changes of all that are to be seen."""
        return {
            os.path.dirname(one.path) if isinstance(one, ImportedFile) else one.path for one in self.all()
        }
