"""Overrides of the file by environment variables and flags, and the source of every value. Flags take
precedence over variables. ``GPUSERVE_MODELS__LINEAR__BATCHING__MAX_QUEUE_DELAY_US`` is the path of a key, its
steps joined by two underscores, model names in capitals with ``_`` for other characters. Values are YAML.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.config import schema
from gpuserve.config.entries import Scalar
from gpuserve.config.problems import Origin, Problem, dotted, without_token
from gpuserve.config.yaml_document import Document, Path, parse_value
from gpuserve.core.suggestions import nearest

PREFIX = "GPUSERVE_"
_SEPARATOR = "__"
#: Variables that Kubernetes sets for a Service called gpuserve or gpuserve-…; they are ignored.
_SERVICE_NAME = re.compile(r"[A-Z0-9_]*(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?)")
_SERVICE_LINK = re.compile(r"[A-Z0-9_]*PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")
#: Variables that are no keys of the schema.
_NO_KEYS = frozenset(
    {"GPUSERVE_CUDA_TIMELINE", "GPUSERVE_TEST_REAL_GPU", "GPUSERVE_TURN_LIMIT_MS", "GPUSERVE_TURN_FILE"}
)


@dataclass(frozen=True)
class Override:
    """A value that replaces the value of the file. ``label`` names its source."""

    path: Path
    value: Any
    label: str
    origin: Origin


def from_text(path: Path, text: str, label: str, origin: Origin) -> Override:
    """Return an override with a value given as text, which is parsed as YAML unless the key takes text."""
    kind = schema.kind_at(path)
    is_text = isinstance(kind, Scalar) and kind.is_text
    return Override(path, text if is_text else parse_value(text), label, origin)


def variable_name(path: Path) -> str:
    """Return the environment variable of a key: ``("server", "http_port")`` is GPUSERVE_SERVER__HTTP_PORT."""
    return PREFIX + _SEPARATOR.join(str(step).upper() for step in path)


def from_environment(
    environ: Mapping[str, str], model_names: Sequence[str]
) -> tuple[list[Override], list[Problem]]:
    overrides: list[Override] = []
    problems: list[Problem] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in _NO_KEYS or _is_service_link(name, environ):
            continue
        section, _, key = name.removeprefix(PREFIX).partition(_SEPARATOR)
        path: Path = tuple(step.lower() for step in name.removeprefix(PREFIX).split(_SEPARATOR))
        path = (*path[:-1], schema.canonical_key(path))
        found: list[Path] | str
        if section == "MODELS" and key:
            found = _model_paths(key, model_names)
        elif section == "SERVER" and key and schema.kind_at(path) is not None:
            found = [path]
        else:
            known = [variable_name(("server", one)) for one in schema.keys_at(("server",))]
            found = f"unknown variable{nearest(name, known) or f'; known are {known[0]} and its like'}"
        if isinstance(found, str):
            problems.append(Problem(name, found, Origin.ENVIRONMENT))
        else:
            overrides += [from_text(one, environ[name], name, Origin.ENVIRONMENT) for one in found]
    return overrides, problems


def without_models(
    environ: Mapping[str, str], model_names: Sequence[str], left_out: Collection[str]
) -> dict[str, str]:
    """Return the environment without the variables of the models in ``left_out``."""

    def is_left_out(variable: str) -> bool:
        section, _, key = variable.removeprefix(PREFIX).partition(_SEPARATOR)
        if section != "MODELS" or not variable.startswith(PREFIX):
            return False
        meant = _models_meant(key, model_names)
        return bool(meant) and all(model_names[index] in left_out for index in meant)

    return {name: value for name, value in environ.items() if not is_left_out(name)}


def apply(data: Any, overrides: Iterable[Override]) -> Any:
    """Return a copy of the data with all overrides applied; later overrides take precedence."""
    whole = copy.deepcopy(data)
    for override in overrides:
        inner, (*parents, last) = whole, override.path
        for step, following in itertools.pairwise((*parents, last)):
            if isinstance(inner, dict):
                inner = inner.setdefault(step, [] if isinstance(following, int) else {})
            elif isinstance(inner, list) and isinstance(step, int) and step < len(inner):
                inner = inner[step]
            else:
                inner = None  # no value has such a path: the schema reports what is there
        is_inside = isinstance(inner, list) and isinstance(last, int) and last < len(inner)
        if isinstance(inner, dict) or is_inside:
            inner[last] = override.value
    return whole


def override_of(path: Path, overrides: Sequence[Override]) -> Override | None:
    """Return the last override of the value at a path or around it; None if the file gave the value."""
    for override in reversed(overrides):
        if path[: len(override.path)] == override.path:
            return override
    return None


def _model_paths(rest: str, model_names: Sequence[str]) -> list[Path] | str:
    meant = _models_meant(rest, model_names)
    if not meant:
        known = ", ".join(map(_capitals, model_names)) or "none"
        return f"no model has this name; the models are {known}"
    longest = len(model_names[meant[0]])
    if len({model_names[index] for index in meant}) > 1:
        return f"it could mean any of the models {', '.join(model_names[index] for index in meant)}"
    steps = rest[longest + len(_SEPARATOR) :].lower().split(_SEPARATOR)
    path: Path = ("models", meant[0], *steps)
    if schema.kind_at(path) is not None:
        return [("models", index, *steps) for index in meant]
    parent = next(path[:end] for end in range(len(path) - 1, 0, -1) if schema.kind_at(path[:end]))
    known_keys = schema.keys_at(parent)
    unknown = str(path[len(parent)])
    hint = nearest(unknown, known_keys) or f"; known keys are {', '.join(known_keys) or 'none'}"
    return f"unknown key {unknown!r} of the model {model_names[meant[0]]!r}{hint}"


def _models_meant(rest: str, model_names: Sequence[str]) -> list[int]:
    """Return the positions of the models with the longest name that the variable begins with."""
    names = list(enumerate(model_names))
    indices = [index for index, name in names if rest.startswith(_capitals(name) + _SEPARATOR)]
    longest = max((len(model_names[index]) for index in indices), default=0)
    return [index for index in indices if len(model_names[index]) == longest]


def _capitals(model_name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", model_name.upper())


def _is_service_link(name: str, environ: Mapping[str, str]) -> bool:
    rest = name.removeprefix(PREFIX)
    if _SEPARATOR in rest:
        return False
    if _SERVICE_NAME.fullmatch(rest):
        return True
    linked = _SERVICE_LINK.fullmatch(rest) is not None
    return linked and ("_TCP" in rest or "_UDP" in rest or bool(_SERVICE_URL.fullmatch(environ[name])))


#: Paths whose values must not reach a terminal or a log.
SECRET: Final[tuple[Path, ...]] = (("server", "access_token"), ("server", "access_rules"))


@dataclass(frozen=True)
class Sources:
    """The sources of values: a file (unless ``document`` is None), variables, flags, a callable."""

    name: str
    document: Document | None
    overrides: tuple[Override, ...] = ()
    #: Models that are declared besides those of the data, which may lack all of them; None: there are none.
    others: frozenset[str] | None = None

    def problem(self, path: Path, text: str, *, at_key: bool = False) -> Problem:
        """Return the problem at a path with its source. ``at_key``: the mistake is in the key itself."""
        override = override_of(path, self.overrides)
        if override is not None:
            if override.path == path:  # the label names the place
                text = text.removeprefix(f"{dotted(path)}: ")
            return Problem(override.label, text, override.origin)
        if self.document is None:
            return Problem(self.name, text, Origin.ATTRIBUTE)
        for ours, written in self.document.other_names(path).items():
            text = re.sub(rf"\b{ours}\b", written, text)
        span = self.document.span_of_key(path) if at_key else self.document.span_of_value(path)
        # A malformed rule may have its token anywhere.
        line = "" if path[:2] == SECRET[1] else without_token(self.document.line(span.line))
        return Problem(self.name, text, Origin.FILE, span, line)
