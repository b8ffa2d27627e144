"""Loading of a whole configuration: read, overridden, checked and converted, with all its mistakes in one
error. A callable is asked for its declaration only if the file leaves out tensors; the values of the file
take precedence, key by key. Devices are checked in ``cli/preflight.py``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpuserve.backends.registry import FILE_SUFFIXES, is_model_path, path_problem, supported_files
from gpuserve.config import model_specs as models
from gpuserve.config import precedence, rules, schema
from gpuserve.config import yaml_document as positions
from gpuserve.config.entries import MISSING, Mistake, split_callable
from gpuserve.config.model_specs import callable_of
from gpuserve.config.precedence import SECRET, Override, Sources
from gpuserve.config.problems import ConfigProblems, Origin, Problem, sentence, without_token
from gpuserve.config.settings.checks import missing
from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.settings.tls import TlsFileError, check_files, tls_files, with_absolute_paths
from gpuserve.config.yaml_document import Path
from gpuserve.model import openai_declaration as openai
from gpuserve.model.options import declared
from gpuserve.model.rules import Violation, mapping
from gpuserve.model.spec import ModelSpec

if TYPE_CHECKING:
    from gpuserve.config.schema import ModelEntry
    from gpuserve.model.describe import CallableAnswer, CallableQuestion


_TENSORS: Final = {"inputs": "--input", "outputs": "--output"}
TENSOR_FORM: Final = "name:dtype:shape, such as x:float32:-1 or image:uint8:224,224,3"


def _leaves_tensors(entry: ModelEntry) -> bool:
    return entry.callable is not None and not entry.given.issuperset(_TENSORS)


class ModelDescription(NamedTuple):
    """The answer of a model's callable to a question."""

    model: str
    question: CallableQuestion
    answer: CallableAnswer


def ask_model_callables(
    models: Sequence[ModelEntry],
    indices: Sequence[int],
    base_dir: str,
    known: Iterable[ModelDescription],
    stale: Sequence[ModelDescription],
    sources: Sources,
) -> tuple[list[ModelDescription], dict[str, ConfigProblems]]:
    """Return the answers of the callables, and by model the problems that a ``stale`` answer replaces. A
    question in ``known`` with a valid answer is not asked again.
    """
    from gpuserve.model.describe import ask_callables  # most configurations ask nothing

    answers = [(one.question, one.answer) for one in known if one.answer.problem is None]
    questions = [_question(models[index], base_dir) for index in indices]
    found = [next((answer for same, answer in answers if same == one), None) for one in questions]
    new = iter(ask_callables(one for one, answer in zip(questions, found, strict=True) if answer is None))
    descriptions: list[ModelDescription] = []
    broken: dict[str, ConfigProblems] = {}
    for index, question, answer in zip(indices, questions, found, strict=True):
        made = ModelDescription(models[index].name, question, answer or next(new))
        earlier = (one for one in stale if one[:2] == made[:2] and one.answer.problem is None)
        if made.answer.problem is not None and (same := next(earlier, None)) is not None:
            broken[made.model] = ConfigProblems([import_problem(made, index, sources)])
            made = same
        descriptions.append(made)
    return descriptions, broken


def described_overrides(
    models: Sequence[ModelEntry],
    indices: Sequence[int],
    descriptions: Sequence[ModelDescription],
    data: Any,
    sources: Sources,
) -> list[Override]:
    """Return, as overrides, the values that callables declare beyond the ``data``; raise ConfigProblems."""
    problems: list[Problem] = []
    values: list[Override] = []
    for index, description in zip(indices, descriptions, strict=True):
        entry, model, answer = data["models"][index], models[index], description.answer
        if answer.problem is not None:
            problems.append(import_problem(description, index, sources))
            continue
        for key in [one for one in _TENSORS if one not in {*entry, *answer.declared}]:
            ways = f"give the callable types (gpuserve.typed) or an attribute {key} = [Tensor(…)]"
            text = f"its {key} are not known: {ways}, or "
            if sources.document is None:
                text += f"use {_TENSORS[key]} {TENSOR_FORM}"
                problems.append(Problem(sources.name, text, Origin.FLAG))
            else:
                text = f"model {model.name!r}: {text}write {key} here"
                problems.append(sources.problem(("models", index), text))
        given = dict(answer.declared)
        if entry.get("max_batch_size") == 0:  # a model that does not batch has no ragged tensors
            for key in given.keys() & _TENSORS.keys():
                given[key] = [{name: one[name] for name in one if name != "ragged"} for one in given[key]]
        if model.openai:
            given = openai.with_own_tensors(given, entry)
        values += _missing(given, entry, ("models", index), str(model.callable))
    if problems:
        raise ConfigProblems(problems)
    return values


def _question(entry: ModelEntry, base_dir: str) -> CallableQuestion:
    from gpuserve.model.describe import CallableQuestion  # see ``ask_model_callables``

    by_types = _leaves_tensors(entry)
    path, kwargs = callable_of(entry, base_dir)
    python = os.path.join(base_dir, entry.python) if entry.python else ""
    decoupled = None if by_types and "decoupled" not in entry.given else entry.decoupled
    inputs = tuple(one.name for one in entry.inputs) if "inputs" in entry.given else None
    if "sequence_batching" in entry.given:  # its controls are inputs, too
        inputs = None
    ranks = max((one.ranks for one in entry.instances), default=1)
    return CallableQuestion(path, base_dir, kwargs, decoupled, python, by_types, inputs, entry.openai, ranks)


def import_problem(description: ModelDescription, index: int, sources: Sources) -> Problem:
    prefix = "" if sources.document is None else f"model {description.model!r}: "
    return sources.problem(("models", index, "callable"), f"{prefix}{description.answer.problem}")


def _missing(descriptions: Mapping[str, Any], given: Any, path: Path, label: str) -> Iterator[Override]:
    """Yield the declared values that are not given; for a mapping that is given in part, its other keys."""
    for key, value in descriptions.items():
        if key not in mapping(given):
            yield Override((*path, key), value, label, Origin.ATTRIBUTE)
        elif isinstance(value, Mapping) and isinstance(given[key], Mapping):
            yield from _missing(value, given[key], (*path, key), label)


CONFIG_SUFFIXES: Final = (".yaml", ".yml", ".json")
MAX_CONFIG_NBYTES: Final = 16 << 20


@dataclass(frozen=True)
class Configuration:
    """A valid configuration and its sources."""

    settings: ServerSettings
    models: tuple[ModelSpec, ...]
    entries: schema.ConfigFile
    sources: Sources
    base_dir: str
    #: The positions of the models whose callables declared some of the values.
    described: frozenset[int] = frozenset()
    descriptions: tuple[ModelDescription, ...] = ()
    #: Models that are declared and cannot be served, by name, with the reason.
    broken: Mapping[str, ConfigProblems] = field(default_factory=dict)
    #: Declared values without effect, one line each, for the log.
    remarks: tuple[str, ...] = ()


def load_file(
    path: str,
    environ: Mapping[str, str],
    flags: Sequence[Override] = (),
    *,
    served_here: bool = True,
    known: Iterable[ModelDescription] = (),
    stale: Iterable[ModelDescription] = (),
) -> Configuration:
    """Return the configuration of a file, under an environment and flags; raise ConfigProblems with all
    mistakes. TLS files are not checked unless the configuration is ``served_here``. ``known`` are answers of
    callables that are not asked again; ``stale`` ones replace problems, and the model of such a problem is
    ``broken``.
    """
    if path.partition(":")[0].lower().endswith((".py", *FILE_SUFFIXES)):
        text = "this command takes a config file, such as config.yaml, with this as the callable of a model"
        raise ConfigProblems([Problem(path, text, Origin.FILE)])
    try:
        document = positions.parse(_file_text(path), schema.canonical_key)
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
    return resolve(
        document.data, Sources(path, document), base_dir, environ, flags, problems,
        served_here=served_here, known=known, stale=stale,
    )  # fmt: skip


def trace_problems(configuration: Configuration) -> list[Problem]:
    """Return a problem if the packages that tracing needs are not installed."""
    problem = missing(configuration.settings.trace.mode)
    return [configuration.sources.problem(("server", "trace", "mode"), problem)] if problem else []


def _require_config(path: str, data: Any) -> None:
    """Raise ConfigProblems if neither the name nor the content of a file is that of a config."""
    if path.endswith(CONFIG_SUFFIXES) or not schema.CONFIG_KEYS.isdisjoint(mapping(data)):
        return
    text = "neither a config (server and models, in a file such as config.yaml), nor a Python file (.py), "
    text += f"nor a model file: {supported_files()}"
    raise ConfigProblems([Problem(path, text, Origin.FILE)])


def load_data(
    data: Any, name: str, base_dir: str, environ: Mapping[str, str], flags: Sequence[Override] = ()
) -> Configuration:
    """Return the configuration of plain data in the form of a file; ``name`` is the file's in messages."""
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
    known: Iterable[ModelDescription] = (),
    stale: Iterable[ModelDescription] = (),
) -> Configuration:
    """Apply overrides, check schema and rules, and convert; raise ConfigProblems with ``problems`` too."""
    if data is None:
        data = {}
    listed = mapping(data).get("models")
    given = [mapping(entry).get("name") for entry in (listed if isinstance(listed, list) else ())]
    names = [name if isinstance(name, str) else "" for name in given]
    from_variables, unknown = precedence.from_environment(environ, names)
    sources = dataclasses.replace(sources, overrides=(*from_variables, *flags))
    merged = openai.with_openai_tensors(precedence.apply(data, sources.overrides))
    entries, found = _checked(merged, base_dir, sources)
    problems = problems + unknown + found
    asked = [] if problems else [at for at, one in enumerate(entries.models) if _leaves_tensors(one)]
    descriptions: list[ModelDescription] = []
    broken: Mapping[str, ConfigProblems] = {}
    if asked:
        descriptions, broken = ask_model_callables(
            entries.models, asked, base_dir, known, tuple(stale), sources
        )
        overrides = described_overrides(entries.models, asked, descriptions, merged, sources)
        sources = dataclasses.replace(sources, overrides=(*overrides, *sources.overrides))
        merged = openai.with_openai_tensors(precedence.apply(data, sources.overrides))
        entries, problems = _checked(merged, base_dir, sources)
    if problems:
        raise ConfigProblems(sorted(problems, key=_reading_order))

    def folder_of(key: str) -> str:
        # Paths in the file are relative to its folder, others to the current directory.
        return base_dir if precedence.override_of(("server", key), sources.overrides) is None else os.getcwd()

    settings = with_absolute_paths(declared(ServerSettings, entries.server.plain()), folder_of)
    specs = tuple(models.model_spec(entry, base_dir) for entry in entries.models)
    of_callables = (frozenset(asked), tuple(descriptions), broken)
    configuration = Configuration(settings, specs, entries, sources, base_dir, *of_callables)
    if problems := _bad_together(configuration, served_here=served_here):
        raise ConfigProblems(sorted(problems, key=_reading_order))
    return configuration


def _checked(data: Any, base_dir: str, sources: Sources) -> tuple[schema.ConfigFile, list[Problem]]:
    mistakes: list[Mistake] = []
    entries: schema.ConfigFile = schema.ConfigFile.read(data, (), mistakes)
    problems: list[Problem] = []
    for one in mistakes:
        path, text = one.path, sentence(one)
        if path[:2] in SECRET:
            text = text.partition(", given ")[0]
        if one.kind == MISSING:
            problems.append(sources.problem(path[:-1], text))
        elif sources.others is None or path != ("models",):
            problems.append(sources.problem(path, text, at_key=one.at_key))
    found = rules.violations(data, sources.others or ())
    problems += [sources.problem(path, text) for path, text in found]
    problems += _missing_files(data, base_dir, sources)
    if not problems:
        for index, entry in enumerate(entries.models):
            found = models.violations(entry, base_dir, ("models", index))
            problems += [sources.problem(path, text) for path, text in found]
    return entries, problems


def _bad_together(configuration: Configuration, *, served_here: bool) -> list[Problem]:
    entries = configuration.entries.models
    retried = ["retry_on_worker_death" in one.given and one.retry_on_worker_death for one in entries]
    found = [*models.violations_together(configuration.models, retried, configuration.settings)]
    try:
        if served_here and (files := tls_files(configuration.settings)):
            check_files(files)
    except TlsFileError as error:
        found.append(Violation(("server", error.key), f"{error.key}: {error}"))
    return [configuration.sources.problem(path, text) for path, text in found]


def _missing_files(data: Any, base_dir: str, sources: Sources) -> list[Problem]:
    problems = []
    for index, model in rules.entries(mapping(data).get("models")):
        path, text = model.get("callable"), None
        if not isinstance(path, str):
            continue
        if is_model_path(path):
            text = path_problem(path, base_dir)
        else:
            with suppress(ValueError):  # the schema reports a malformed path
                place, _ = split_callable(path)
                if place.endswith(".py") and not os.path.isfile(os.path.join(base_dir, place)):
                    text = f"there is no file {place!r} in {base_dir}"
        if text is not None:
            text = f"models[{index}].callable: {text}"
            problems.append(sources.problem(("models", index, "callable"), text))
    return problems


def _reading_order(problem: Problem) -> tuple[int, int, int]:
    if problem.span is None:
        return (1, 0, 0)
    return (0, problem.span.line, problem.span.column)


def _file_text(path: str) -> str:
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
        if not path.endswith(CONFIG_SUFFIXES):
            text += f"; a config is, and a model file is known by its name: expected {supported_files()}"
    raise ConfigProblems([Problem(path, text, Origin.FILE)])
