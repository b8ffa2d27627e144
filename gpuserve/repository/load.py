"""A whole repository: its folders read, translated, completed by what the models say of themselves, and
checked as a config file is. What is wrong with a model is told of that model, and the others are served.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from gpuserve.config import precedence
from gpuserve.config.load import Configuration, resolve
from gpuserve.config.messages import ConfigProblems, Origin, Problem
from gpuserve.config.positions import Path
from gpuserve.config.precedence import Override
from gpuserve.errors import DeviceError
from gpuserve.placement.server_devices import ServerDevices
from gpuserve.repository.finish import finished
from gpuserve.repository.folders import EmptyRepository, ModelFolder, RepositoryError, model_folders
from gpuserve.repository.pbtxt import PbtxtError, parse
from gpuserve.repository.self_description import SelfDescriptions
from gpuserve.repository.sources import RepositorySources, problem_at
from gpuserve.repository.translation import Translation, translated
from gpuserve.settings.server import NO_CONTROL

#: What a repository says of the server, below variables and flags: the rest is served without what fails.
_SERVER: Final = {"exit_on_error": False}

#: By the name of a model, what is wrong with it.
Broken: TypeAlias = dict[str, list[Problem]]


def load_repository(
    paths: Sequence[str],
    environ: Mapping[str, str],
    flags: Sequence[Override] = (),
    devices: ServerDevices | None = None,
) -> Configuration:
    """The configuration of model repositories, under an environment and flags. Models that cannot be served
    are ``broken`` in it. Raises ConfigProblems: there is no such repository, it has no model that can be
    served, or a variable or a flag is wrong.
    """
    loader = RepositoryLoader(paths, environ, flags, devices or ServerDevices())
    return loader.load()


class RepositoryLoader:
    """Model repositories, under the environment and the flags of a server; loaded as often as wanted."""

    def __init__(
        self,
        paths: Sequence[str],
        environ: Mapping[str, str],
        flags: Sequence[Override],
        devices: ServerDevices,
    ) -> None:
        self.paths = tuple(paths)
        self._environ = dict(environ)
        self._flags = tuple(flags)
        self._devices = devices
        self._descriptions = SelfDescriptions()

    def names(self) -> list[str]:
        """The models that there are folders for now. Raises ConfigProblems: a repository cannot be read."""
        folders, broken, _ = self._folders()
        return [*(one.name for one in folders), *broken]

    def load(self, wanted: Collection[str] | None = None) -> Configuration:
        """All models, or those that are wanted and what they need. Raises as ``load_repository``."""
        folders, broken, empty = self._folders()
        read = _Reading(folders, self._has_gpu)
        read.read([one.name for one in folders if wanted is None or one.name in wanted])
        translations, silent = self._descriptions.completed(read.translations)
        names = [one.name for one in folders]
        configuration = self._served(translations, broken | read.broken | silent, names)
        nothing_comes = configuration.settings.model_control == NO_CONTROL
        if nothing_comes and (empty or not configuration.models):
            broken_ones = [one for error in configuration.broken.values() for one in error.problems]
            raise ConfigProblems([*empty, *broken_ones])
        return configuration

    def _folders(self) -> tuple[list[ModelFolder], Broken, list[Problem]]:
        """The folders of models, those that are in two repositories, and what is said of repositories that
        have none. Raises ConfigProblems: a repository cannot be read.
        """
        found: dict[str, ModelFolder] = {}
        broken: Broken = {}
        problems: list[Problem] = []
        empty: list[Problem] = []
        for path in self.paths:
            try:
                folders = model_folders(path)
            except RepositoryError as error:
                of_kind = empty if isinstance(error, EmptyRepository) else problems
                of_kind.append(Problem(path, str(error), Origin.FILE))
                continue
            for folder in folders:
                if (first := found.setdefault(folder.name, folder)) is not folder:
                    text = f"model {folder.name!r} is in {first.path} as well; expected it in one repository"
                    broken[folder.name] = [Problem(folder.path, text, Origin.FILE, model=folder.name)]
        if problems:
            raise ConfigProblems(problems)
        return [one for name, one in found.items() if name not in broken], broken, empty

    def _has_gpu(self) -> bool:
        try:
            return bool(self._devices.devices_named("cuda:*"))
        except DeviceError:
            return False

    def _served(
        self, translations: Sequence[Translation], broken: Broken, names: Sequence[str]
    ) -> Configuration:
        """The configuration of the models that hold. Those that do not are left out until the others do, for
        an ensemble falls with a model of its steps.
        """
        while True:
            problems: Sequence[Problem] = ()
            try:
                configuration = self._resolved(translations, names, broken)
                problems = self._device_problems(configuration)
            except ConfigProblems as error:
                problems = error.problems
            if not problems:
                return finished(configuration, translations, broken)
            for one in problems:
                if not one.model:
                    raise ConfigProblems([*_all(broken), *problems])
                broken.setdefault(one.model, []).append(one)
            translations = [one for one in translations if one.folder.name not in broken]

    def _resolved(
        self, translations: Iterable[Translation], names: Sequence[str], broken: Collection[str]
    ) -> Configuration:
        pairs = [(one, entry) for one in translations for entry in one.entries]
        data = {"server": dict(_SERVER), "models": [entry for _, entry in pairs]}
        sources = RepositorySources(
            ", ".join(self.paths),
            None,
            others=frozenset((*names, *broken)),
            models=[(one.folder, one.draft) for one, _ in pairs],
        )
        served = {one.folder.name for one, _ in pairs}
        environ = precedence.without_models(self._environ, names, [one for one in names if one not in served])
        return resolve(data, sources, ".", environ, self._flags, [])

    def _device_problems(self, configuration: Configuration) -> list[Problem]:
        problems = []
        for index, (entry, spec) in enumerate(
            zip(configuration.entries.models, configuration.models, strict=True)
        ):
            path: Path = ("models", index, "instances")
            try:
                for position, one in enumerate(entry.instances if spec.instances else ()):
                    path = ("models", index, "instances", position, "device")
                    self._devices.devices_named(one.device)
                self._devices.place([spec])
            except DeviceError as error:
                problems.append(configuration.sources.problem(path, str(error)))
        return problems


class _Reading:
    """The folders that were read, each by itself: its translation, or what is wrong with it."""

    def __init__(self, folders: Iterable[ModelFolder], has_gpu: Callable[[], bool]) -> None:
        self.translations: list[Translation] = []
        self.broken: Broken = {}
        self._folders = {one.name: one for one in folders}
        self._has_gpu = has_gpu

    def read(self, names: Iterable[str]) -> None:
        """Read these models, and those of the steps of their ensembles."""
        left, seen = list(names), set(names)
        for name in left:
            folder = self._folders[name]
            found = _translated(folder, self._has_gpu)
            if isinstance(found, Problem):
                self.broken[name] = [found]
            elif found.draft.faults:
                self.broken[name] = [problem_at(folder, found.draft, one) for one in found.draft.faults]
            else:
                self.translations.append(found)
                new = [one for one in found.members if one in self._folders and one not in seen]
                left += new
                seen.update(new)


def _translated(folder: ModelFolder, has_gpu: Callable[[], bool]) -> Translation | Problem:
    if folder.problem:
        return Problem(folder.label, folder.problem, Origin.FILE, model=folder.name)
    try:
        return translated(folder, parse(folder.config or ""), has_gpu)
    except PbtxtError as error:
        line = (folder.config or "").split("\n")[error.span.line - 1]
        return Problem(folder.label, str(error), Origin.FILE, error.span, line, folder.name)


def _all(broken: Broken) -> list[Problem]:
    return [one for name in sorted(broken) for one in broken[name]]
