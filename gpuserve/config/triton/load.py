"""Loading of Triton model repositories, once and again while a server runs: folders are read, translated,
completed by the models' own declarations, and checked like a config file. A model with a problem is
``broken``, and the others are served. Models declare in child processes (``gpuserve/model/describe.py``) what
their config.pbtxt leaves out, and again only if their files have changed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpuserve.backends.registry import source_of
from gpuserve.config import precedence
from gpuserve.config.fingerprints import folders_in
from gpuserve.config.load import Configuration, load_file, resolve, trace_problems
from gpuserve.config.precedence import Override, Sources
from gpuserve.config.problems import ConfigProblems, Origin, Problem, dotted
from gpuserve.config.repositories import CallableFlags, is_callable_path, load_callable
from gpuserve.config.settings.server import NO_CONTROL
from gpuserve.config.triton.folders import (
    EmptyRepository,
    ModelFolder,
    RepositoryError,
    model_fingerprints,
    model_folders,
    model_paths,
    revision,
)
from gpuserve.config.triton.pbtxt import EntryDraft, PbtxtError, Remark, parse
from gpuserve.config.triton.translation import Translation, translated
from gpuserve.config.yaml_document import Path
from gpuserve.core.errors import DeviceError
from gpuserve.model.placement import ServerDevices
from gpuserve.model.spec import ModelSpec
from gpuserve.model.triton_config import kept_config

if TYPE_CHECKING:
    from gpuserve.model.describe import CallableAnswer, CallableQuestion


_ENTRY: Final = re.compile(r"models\[(\d+)\]")


@dataclass(frozen=True)
class RepositorySources(Sources):
    """The sources of a repository's values. ``models`` has, for each entry, its folder and its draft. A
    mistake in an entry is reported at the field of the config.pbtxt that it comes from.
    """

    models: Sequence[tuple[ModelFolder, EntryDraft]] = ()

    def problem(self, path: Path, text: str, *, at_key: bool = False) -> Problem:
        index = path[1] if len(path) > 1 and path[0] == "models" else None
        if not isinstance(index, int) or precedence.override_of(path, self.overrides) is not None:
            return super().problem(path, text, at_key=at_key)
        folder, draft = self.models[index]
        origin = draft.origin(path[2:])
        own = text.removeprefix(f"{dotted(path)}: ")
        if own != text and origin:
            own = f"{dotted(origin)}: {own}"
        own = _ENTRY.sub(lambda found: f"model {self.models[int(found[1])][1].name!r}", own)
        return problem_at(folder, draft, Remark(origin, own), at_name=at_key)


def problem_at(folder: ModelFolder, draft: EntryDraft, remark: Remark, *, at_name: bool = False) -> Problem:
    text = remark.text
    if folder.config is None:
        return Problem(folder.label, text, Origin.FILE, model=folder.name)
    span = draft.pbtxt.span(remark.path, at_name=at_name or not draft.pbtxt.has(*remark.path))
    line = draft.pbtxt.line(span.line) if remark.path else ""
    return Problem(folder.label, text, Origin.FILE, span, line, folder.name)


def _under(given: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values, and below them the declared values, key by key."""
    found = dict(said) | dict(given)
    for key, value in said.items():
        if isinstance(value, Mapping) and isinstance(given.get(key), Mapping):
            found[key] = _under(given[key], value)
    return found


def with_repository_values(
    configuration: Configuration, translations: Sequence[Translation], broken: Mapping[str, Sequence[Problem]]
) -> Configuration:
    """Return the configuration with fingerprints of the versions' files, which a reload compares."""
    known = {one.folder.name: one for one in translations}
    models = tuple(_finished(one, known[one.name]) for one in configuration.models)
    noted: dict[str, list[str]] = {}  # the models by the text of a note about a field without effect
    for translation in translations:
        for note in translation.draft.notes:
            noted.setdefault(note.text, []).append(translation.folder.name)
    return dataclasses.replace(
        configuration,
        models=models,
        broken={name: ConfigProblems(broken[name]) for name in sorted(broken)},
        described=frozenset(index for index, one in enumerate(models) if known[one.name].asks),
        remarks=tuple(f"{text} (model {', '.join(dict.fromkeys(names))})" for text, names in noted.items()),
    )


def _finished(spec: ModelSpec, translation: Translation) -> ModelSpec:
    folder = translation.folder
    files = {"revision": revision(os.path.join(folder.path, str(spec.version)))}
    instances = tuple(dataclasses.replace(one, source=one.source | files) for one in spec.instances)
    labels = tuple(
        dataclasses.replace(one, filename=one.filename and os.path.relpath(one.filename, folder.path))
        for one in spec.labels
    )
    config = kept_config(translation.config)
    return dataclasses.replace(spec, instances=instances, labels=labels, triton_config=config)


#: The server settings of a repository, below variables and flags.
_SERVER: Final = {"exit_on_error": False}

Broken: TypeAlias = dict[str, list[Problem]]


class RepositoryLoader:
    """A loader of model repositories under the environment and the flags of a server."""

    def __init__(self, paths: Sequence[str], environ: Mapping[str, str], flags: Sequence[Override]) -> None:
        self.paths = tuple(paths)
        self._environ = dict(environ)
        self._flags = tuple(flags)
        self._devices = ServerDevices()
        #: Each model's last answer about its declaration, with its callable, arguments and fingerprint then.
        self._answers: dict[str, tuple[tuple[str, ...], CallableAnswer]] = {}

    def load(self, wanted: Collection[str] | None = None) -> Configuration:
        """Return the configuration of all models, or of ``wanted`` ones and their steps' models."""
        folders, broken, empty = self._folders()
        names = [one.name for one in folders]
        read, unread = self._read(folders, [one for one in names if wanted is None or one in wanted])
        translations, silent = self._completed(read)
        configuration = self._served(translations, broken | unread | silent, names)
        nothing_comes = configuration.settings.model_control == NO_CONTROL
        if nothing_comes and (empty or not configuration.models):
            broken_ones = [one for error in configuration.broken.values() for one in error.problems]
            raise ConfigProblems([*empty, *broken_ones])
        return configuration

    def _read(self, folders: Iterable[ModelFolder], names: Iterable[str]) -> tuple[list[Translation], Broken]:
        """Return the translations of these models and of their ensembles' steps, and the others' problems."""
        by_name = {one.name: one for one in folders}
        translations: list[Translation] = []
        broken: Broken = {}
        left = list(names)
        for name in left:  # which grows by the models of steps
            folder = by_name[name]
            if folder.problem:
                broken[name] = [Problem(folder.label, folder.problem, Origin.FILE, model=name)]
                continue
            text = folder.config or ""
            try:
                found = translated(folder, parse(text), self._has_gpu)
            except PbtxtError as error:
                line = text.split("\n")[error.span.line - 1]
                broken[name] = [Problem(folder.label, str(error), Origin.FILE, error.span, line, name)]
                continue
            if found.draft.faults:
                broken[name] = [problem_at(folder, found.draft, one) for one in found.draft.faults]
                continue
            translations.append(found)
            members = dict.fromkeys(one.model_name for one in found.draft.message.ensemble_scheduling.step)
            left += [one for one in members if one in by_name and one not in left]
        return translations, broken

    def _completed(self, translations: Sequence[Translation]) -> tuple[list[Translation], Broken]:
        """Return the translations with the models' declarations, and the problems of those without one."""
        answers = self._asked([one for one in translations if one.asks])
        found: list[Translation] = []
        broken: Broken = {}
        for one in translations:
            answer = answers.get(one.folder.name)
            if answer is None:
                found.append(one)
                continue
            text = answer.problem
            if not (text or answer.declared.get("outputs") or "outputs" in one.draft.entry):
                text = "its outputs are not known, for the model does not say them: write output in its "
                text += "config.pbtxt"
            if text:
                broken[one.folder.name] = [problem_at(one.folder, one.draft, Remark((), text))]
            else:
                entries = tuple(_under(entry, answer.declared) for entry in one.entries)
                found.append(dataclasses.replace(one, entries=entries))
        return found, broken

    def _asked(self, translations: Sequence[Translation]) -> dict[str, CallableAnswer]:
        """Return the answers of models; a model is asked again only if the question has changed."""
        found: dict[str, CallableAnswer] = {}
        new: dict[str, tuple[tuple[str, ...], CallableQuestion]] = {}
        for one in translations:
            name, entry = one.folder.name, one.entries[-1]
            arguments = json.dumps(entry["kwargs"], sort_keys=True)
            asked = entry["callable"], arguments, revision(one.folder.path)
            last = self._answers.get(name)
            if last is not None and last[0] == asked:
                found[name] = last[1]
                continue
            from gpuserve.model.describe import CallableQuestion  # most repositories ask nothing

            path, kwargs = source_of(entry["callable"], entry["kwargs"], ".")
            decoupled = True if entry.get("decoupled") else None
            new[name] = asked, CallableQuestion(path, ".", kwargs, decoupled, entry.get("python", ""))
        if new:
            from gpuserve.model.describe import ask_callables  # as above

            answers = ask_callables(question for _, question in new.values())
            for name, answer in zip(new, answers, strict=True):
                found[name] = answer
                if answer.problem is None:  # the cause of a problem may be gone the next time
                    self._answers[name] = new[name][0], answer
        return found

    def _folders(self) -> tuple[list[ModelFolder], Broken, list[Problem]]:
        """Return the folders, duplicate models and problems of empty repositories; raise ConfigProblems."""
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
        """Return the configuration of the valid models: an ensemble fails with a model of its steps."""
        while True:
            problems: Sequence[Problem] = ()
            try:
                configuration = self._resolved(translations, names, broken)
                problems = self._device_problems(configuration)
            except ConfigProblems as error:
                problems = error.problems
            if not problems:
                return with_repository_values(configuration, translations, broken)
            for one in problems:
                if not one.model:
                    every = [problem for name in sorted(broken) for problem in broken[name]]
                    raise ConfigProblems([*every, *problems])
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
        pairs = zip(configuration.entries.models, configuration.models, strict=True)
        for index, (entry, spec) in enumerate(pairs):
            path: Path = ("models", index, "instances")
            try:
                for position, one in enumerate(entry.instances if spec.instances else ()):
                    path = ("models", index, "instances", position, "device")
                    self._devices.devices_named(one.device)
                self._devices.place([spec])
            except DeviceError as error:
                problems.append(configuration.sources.problem(path, str(error)))
        return problems


class TritonRepository(RepositoryLoader):
    """Model repositories, read again for each load and each reload, under the environment and the flags of
    the start. Raise ConfigProblems if a repository is missing, or has no model that can be served.
    """

    def __init__(self, paths: Sequence[str], environ: Mapping[str, str], flags: Sequence[Override]) -> None:
        super().__init__(paths, environ, flags)
        self.path = ", ".join(paths)
        self.start = self.load()
        self._known = _names(self.start)
        self.start_fingerprints = self.fingerprints()

    def fingerprints(self) -> Mapping[Hashable, Hashable]:
        """Return the fingerprint of each model's folder, or raise OSError. May be called from any thread."""
        return {name: one for path in self.paths for name, one in model_fingerprints(path).items()}

    def folders(self) -> Collection[str]:
        models = [model for path in self.paths for model in model_paths(path)]
        return {*self.paths, *(one for model in models for one in folders_in(model))}

    def names(self) -> Sequence[str]:
        return self._known

    def read(self, model: str) -> Sequence[ModelSpec]:
        """Return the versions of a model in its current folder, if any, or raise ConfigProblems."""
        folders, broken, _ = self._folders()
        if model not in (*(one.name for one in folders), *broken):
            return ()
        configuration = self.load([model])
        if model in configuration.broken:
            raise configuration.broken[model]
        self._known = tuple(dict.fromkeys((*self._known, model)))
        return [one for one in configuration.models if one.name == model]

    def read_all(self, changed: Collection[str] | None = None) -> Configuration:
        """Return the configuration of all folders, with ``broken`` models; raise ConfigProblems."""
        configuration = self.load()
        if problems := trace_problems(configuration):
            raise ConfigProblems(problems)
        self._known = _names(configuration)
        return configuration


def _names(configuration: Configuration) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*(one.name for one in configuration.models), *configuration.broken)))


def load_target(
    target: str,
    environ: Mapping[str, str],
    server: Sequence[Override] = (),
    model: CallableFlags | None = None,
) -> Configuration:
    """Return the configuration of a file, a callable or a repository; raise ConfigError if it is wrong."""
    if is_callable_path(target):
        return load_callable(target, model or CallableFlags(), server, environ)
    if os.path.isdir(target):
        return RepositoryLoader([target], environ, server).load()
    return load_file(target, environ, server)
