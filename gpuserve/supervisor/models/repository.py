"""Where the declarations of models come from. The supervisor neither reads files nor knows their format:
``gpuserve serve`` hands it a repository that does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from gpuserve.config.settings.server import ServerSettings
from gpuserve.errors import GpuserveError
from gpuserve.model.spec import ModelSpec


class Repository(Protocol):
    """The models that may be loaded by name. Called in the reactor's thread."""

    def names(self) -> Sequence[str]:
        """Every model that is known, loaded or not."""

    def read(self, model: str) -> Sequence[ModelSpec]:
        """The versions of a model as they are declared now; none where there is no such model. Raises
        GpuserveError: the declarations cannot be read, or are wrong. The text is for the log.
        """


class ServerDeclaration(Protocol):
    """All that a config file says. The models are not placed on devices."""

    @property
    def settings(self) -> ServerSettings:
        """The settings of the server as a whole."""

    @property
    def models(self) -> Sequence[ModelSpec]:
        """Every version of every model that can be served."""

    @property
    def broken(self) -> Mapping[str, GpuserveError]:
        """The models that cannot be served as they are declared, and why."""


class ConfigSource(Protocol):
    """The config file of a server."""

    @property
    def path(self) -> str:
        """The path of the config file."""

    @property
    def start(self) -> ServerDeclaration:
        """What it said when the server started."""

    @property
    def start_fingerprints(self) -> Mapping[Hashable, Hashable]:
        """What ``stamps`` were when the server started."""

    def fingerprints(self) -> Mapping[Hashable, Hashable]:
        """Return for each model something that differs once any of its files has changed, and under "" for
        what is of all. Quick, and from any thread. Raises OSError: nothing can be said at this moment.
        """

    def folders(self) -> Collection[str]:
        """Return the folders in which what ``stamps`` look at changes, comes and goes. As for these."""

    def read_all(self, changed: Collection[str] | None = None) -> ServerDeclaration:
        """What it says now. Not in the reactor's thread: models may be asked what they are. Raises
        GpuserveError: it cannot be read, or any of it is wrong. The text has every problem. Where the models
        whose files have ``changed`` are given, only these are asked, and one that cannot be is ``broken``.
        """


class DeclaredModels:
    """A repository of models whose declarations do not change: those that ``bind()`` was given."""

    def __init__(self, specs: Iterable[ModelSpec] = ()) -> None:
        self._specs = {(one.name, one.version): one for one in specs}

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
    return [one for one in models if names is None or one.name in names]


def wanted_at_start(names: Iterable[str], chosen: Collection[str] | None) -> list[str]:
    """Return those of the names that are chosen to be loaded at the start; None chooses all."""
    return [one for one in names if chosen is None or one in chosen]


def members(model: str, read: Callable[[str], Sequence[ModelSpec] | None]) -> list[str]:
    """Return the models of an ensemble's steps, and of theirs; ``read`` gives the versions of a model."""
    found: dict[str, None] = {}
    left = [model]
    while left:
        steps = [step for spec in read(left.pop()) or () for step in spec.steps]
        new = [step.model for step in steps if step.model not in found]
        found.update(dict.fromkeys(new))
        left += new
    return list(found)
