"""A whole configuration: read, overridden, checked and converted, with all its mistakes told at once. The
only file of this package that reads files. Callables are asked only where they have to say what the file
leaves out (``described.py``); devices are not looked at, they are for ``cli/console/preflight.py``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpuserve.config import models, positions, precedence, rules, schema
from gpuserve.config.described import Said, ask_models, described, undescribed, with_stale
from gpuserve.config.entries.fields import split_callable
from gpuserve.config.entries.kinds import MISSING, Mistake
from gpuserve.config.messages import ConfigProblems, Origin, Problem, sentence, without_token
from gpuserve.config.precedence import Override
from gpuserve.config.sources import SECRET, Sources
from gpuserve.declare import openai
from gpuserve.declare.rules import mapping
from gpuserve.declare.spec import ModelSpec
from gpuserve.options import declared
from gpuserve.runtimes.table import is_model_path, known_looks, path_problem
from gpuserve.settings.server import ServerSettings
from gpuserve.settings.tls import TlsFileError, check_files, tls_files, with_whole_paths

#: How a config file may be called whatever is in it.
CONFIG_SUFFIXES: Final = (".yaml", ".yml", ".json")
#: No config is larger.
MAX_CONFIG_NBYTES: Final = 16 << 20


@dataclass(frozen=True)
class Configuration:
    """A configuration that holds in itself, and where it came from."""

    settings: ServerSettings
    models: tuple[ModelSpec, ...]
    entries: schema.ConfigFile
    sources: Sources
    base_dir: str
    #: The positions of the models whose callables said some of it.
    described: frozenset[int] = frozenset()
    #: What those said.
    said: tuple[Said, ...] = ()
    #: Models that are declared and cannot be served, by name, and why.
    broken: Mapping[str, ConfigProblems] = field(default_factory=dict)
    #: What is declared and has no effect, a line each, for the log.
    remarks: tuple[str, ...] = ()


def load_file(
    path: str,
    environ: Mapping[str, str],
    flags: Sequence[Override] = (),
    *,
    served_here: bool = True,
    known: Iterable[Said] = (),
    stale: Iterable[Said] = (),
) -> Configuration:
    """The configuration of a file, under an environment and flags. Not ``served_here``: another machine has
    the files of TLS, which are not looked at. Callables that are ``known`` are not asked again; a ``stale``
    answer stands in for one that cannot be had now, and its model is ``broken``. Raises ConfigProblems: all
    that is wrong with the file, the variables and the flags.
    """
    try:
        document = positions.parse(_read(path), schema.usual_key)
        _require_config(path, document.data)
    except positions.YamlSyntaxError as error:
        _require_config(path, None)
        text, span = error.fault
        line = without_token(error.source_line)
        raise ConfigProblems([Problem(path, text, Origin.FILE, span, line)]) from None
    problems = [
        Problem(path, fault.text, Origin.FILE, fault.span, without_token(document.line(fault.span.line)))
        for fault in document.faults
    ]
    base_dir = os.path.dirname(os.path.abspath(path))
    sources = Sources(path, document)
    return resolve(
        document.data,
        sources,
        base_dir,
        environ,
        flags,
        problems,
        served_here=served_here,
        known=known,
        stale=stale,
    )


def _require_config(path: str, data: Any) -> None:
    """Refuse a file that is no config by its name, nor by what is in it."""
    if path.endswith(CONFIG_SUFFIXES) or not schema.CONFIG_KEYS.isdisjoint(mapping(data)):
        return
    text = (
        "neither a config (server and models, in a file such as config.yaml), nor a Python file (.py), nor a "
        f"model file: {known_looks()}"
    )
    raise ConfigProblems([Problem(path, text, Origin.FILE)])


def load_data(
    data: Any, name: str, base_dir: str, environ: Mapping[str, str], flags: Sequence[Override] = ()
) -> Configuration:
    """The configuration of plain data in the form of a file; ``name`` stands for it in messages. Raises
    ConfigProblems: all that is wrong with the data, the variables and the flags.
    """
    return resolve(data, Sources(name, None), base_dir, environ, flags, [])


def resolve(
    data: Any,
    sources: Sources,
    base_dir: str,
    environ: Mapping[str, str],
    flags: Sequence[Override],
    problems: list[Problem],
    *,
    served_here: bool = True,
    known: Iterable[Said] = (),
    stale: Iterable[Said] = (),
) -> Configuration:
    """Precedence, then schema, then rules; ``problems`` are those that reading has met. Raises
    ConfigProblems: those, and all that is wrong with the data, the variables and the flags.
    """
    if data is None:
        data = {}
    from_variables, unknown = precedence.from_environment(environ, _model_names(data))
    sources = dataclasses.replace(sources, overrides=(*from_variables, *flags))
    merged = openai.completed(precedence.apply(data, sources.overrides))
    entries, found = _checked(merged, base_dir, sources)
    problems = problems + unknown + found
    asked = [] if problems else undescribed(entries.models)
    said: list[Said] = []
    broken: Mapping[str, ConfigProblems] = {}
    if asked:
        said = ask_models(entries.models, asked, base_dir, known)
        said, broken = with_stale(entries.models, asked, said, stale, sources)
        told = described(entries.models, asked, said, merged, sources)
        sources = dataclasses.replace(sources, overrides=(*told, *sources.overrides))
        merged = openai.completed(precedence.apply(data, sources.overrides))
        entries, problems = _checked(merged, base_dir, sources)
    if problems:
        raise ConfigProblems(sorted(problems, key=_reading_order))

    def folder_of(key: str) -> str:  # a path of the file is one from its folder, others are from here
        return base_dir if precedence.override_of(("server", key), sources.overrides) is None else os.getcwd()

    settings = with_whole_paths(declared(ServerSettings, entries.server.plain()), folder_of)
    specs = tuple(models.model_spec(entry, base_dir) for entry in entries.models)
    configuration = Configuration(
        settings, specs, entries, sources, base_dir, frozenset(asked), tuple(said), broken
    )
    if problems := _bad_together(configuration, served_here=served_here):
        raise ConfigProblems(sorted(problems, key=_reading_order))
    return configuration


def _checked(data: Any, base_dir: str, sources: Sources) -> tuple[schema.ConfigFile, list[Problem]]:
    """The entries of the whole configuration, and what is wrong with them by themselves."""
    mistakes: list[Mistake] = []
    entries: schema.ConfigFile = schema.ConfigFile.read(data, (), mistakes)
    others = sources.others
    problems = [
        _schema_problem(one, sources) for one in mistakes if others is None or one.path != ("models",)
    ]
    problems += [sources.problem(path, text) for path, text in rules.violations(data, others or ())]
    problems += _missing_files(data, base_dir, sources)
    if not problems:
        problems += [
            sources.problem(path, text)
            for index, entry in enumerate(entries.models)
            for path, text in models.violations(entry, base_dir, ("models", index))
        ]
    return entries, problems


def _schema_problem(mistake: Mistake, sources: Sources) -> Problem:
    path, text = mistake.path, sentence(mistake)
    if path[:2] in SECRET:
        text = text.partition(", given ")[0]
    if mistake.kind == MISSING:
        return sources.problem(path[:-1], text)
    return sources.problem(path, text, at_key=mistake.at_key)


def _bad_together(configuration: Configuration, *, served_here: bool) -> list[Problem]:
    entries = configuration.entries.models
    retried = ["retry_on_worker_death" in one.given and one.retry_on_worker_death for one in entries]
    found = [*models.violations_together(configuration.models, retried, configuration.settings)]
    files = tls_files(configuration.settings) if served_here else None
    try:
        if files is not None:
            check_files(files)
    except TlsFileError as error:
        found.append(rules.Violation(("server", error.key), f"{error.key}: {error}"))
    return [configuration.sources.problem(path, text) for path, text in found]


def _missing_files(data: Any, base_dir: str, sources: Sources) -> list[Problem]:
    problems = []
    for index, model in rules.entries(mapping(data).get("models")):
        path = model.get("callable")
        text = _missing_file(path, base_dir) if isinstance(path, str) else None
        if text is not None:
            text = f"models[{index}].callable: {text}"
            problems.append(sources.problem(("models", index, "callable"), text))
    return problems


def _missing_file(path: str, base_dir: str) -> str | None:
    if is_model_path(path):
        return path_problem(path, base_dir)
    try:
        place, _ = split_callable(path)
    except ValueError:  # told as a mistake
        return None
    if place.endswith(".py") and not os.path.isfile(os.path.join(base_dir, place)):
        return f"there is no file {place!r} in {base_dir}"
    return None


def _model_names(data: Any) -> list[str]:
    """The models' names as far as they can be read; the list keeps its positions."""
    listed = mapping(data).get("models")
    names = [mapping(entry).get("name") for entry in (listed if isinstance(listed, list) else ())]
    return [name if isinstance(name, str) else "" for name in names]


def _reading_order(problem: Problem) -> tuple[int, int, int]:
    """The file from top to bottom, then what is not in it."""
    if problem.span is None:
        return (1, 0, 0)
    return (0, problem.span.line, problem.span.column)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = file.read(MAX_CONFIG_NBYTES + 1)
        if len(content) <= MAX_CONFIG_NBYTES:
            return content
        text = f"is larger than a config may be, {MAX_CONFIG_NBYTES >> 20} MiB"
    except OSError as error:
        text = f"cannot be read: {(error.strerror or 'unknown reason').lower()}"
    except UnicodeDecodeError as error:
        text = f"is not UTF-8 text: the byte at offset {error.start} is 0x{error.object[error.start]:02x}"
        text += f"; a config is, and a model file is known by its name: expected {known_looks()}"
    raise ConfigProblems([Problem(path, text, Origin.FILE)])
