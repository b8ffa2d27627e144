"""Interfaces to the declarations of models, whose files and format the supervisor does not know."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from gpuserve.model.spec import ModelSpec

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration


class Repository(Protocol):
    """The models that can be loaded by name. Called in the reactor's thread."""

    def names(self) -> Sequence[str]:
        """Return the name of every known model, loaded or not."""

    def read(self, model: str) -> Sequence[ModelSpec]:
        """Return a model's versions as declared now, or nothing; raise GpuserveError, for the log."""


class ConfigSource(Protocol):
    """The config file of a server."""

    @property
    def path(self) -> str:
        """The path of the config file."""

    @property
    def start(self) -> Configuration:
        """The content of the file when the server started."""

    @property
    def start_fingerprints(self) -> Mapping[Hashable, Hashable]:
        """The result of ``stamps`` when the server started."""

    def fingerprints(self) -> Mapping[Hashable, Hashable]:
        """Return the fingerprints of each model's files by the model's name, and of the config itself by "".
        A fingerprint changes if any of the files changes. Quick; may be called from any thread. Raise OSError
        if the files cannot be read at this moment.
        """

    def folders(self) -> Collection[str]:
        """Return the folders that hold the files of ``stamps``. Raise OSError as ``stamps`` does."""

    def read_all(self, changed: Collection[str] | None = None) -> Configuration:
        """Return the present content of the file. Raise GpuserveError, with every problem in its text, if the
        file cannot be read or is wrong. Not for the reactor's thread, because this may run callables. With
        ``changed`` only the models whose files have changed are described, and a failure is ``broken``.
        """


class DeclaredModels:
    """A repository of the models that ``bind()`` was given. Their declarations do not change."""

    def __init__(self, specs: Iterable[ModelSpec] = ()) -> None:
        self._specs = {(spec.name, spec.version): spec for spec in specs}

    def names(self) -> Sequence[str]:
        return list(dict.fromkeys(name for name, _ in self._specs))

    def read(self, model: str) -> Sequence[ModelSpec]:
        return [spec for (name, _), spec in self._specs.items() if name == model]

    def add(self, spec: ModelSpec) -> None:
        self._specs[spec.name, spec.version] = spec

    def remove(self, model: str) -> None:
        for key in [key for key in self._specs if key[0] == model]:
            del self._specs[key]


def loaded_at_start(models: Iterable[ModelSpec], names: Collection[str] | None) -> list[ModelSpec]:
    return [spec for spec in models if names is None or spec.name in names]


def wanted_at_start(names: Iterable[str], chosen: Collection[str] | None) -> list[str]:
    """Return the names that are chosen to be loaded at the start; None chooses all."""
    return [name for name in names if chosen is None or name in chosen]
