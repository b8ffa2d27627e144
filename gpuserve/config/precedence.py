"""What overrides the file: environment variables, then flags. Pure: the environment is an argument.
``GPUSERVE_MODELS__LINEAR__BATCHING__MAX_QUEUE_DELAY_US`` is a path to a key, its steps joined by two
underscores. A model is named in capitals, ``_`` for what no variable may have. Values are YAML.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuserve.config import schema
from gpuserve.config.entries.kinds import Text
from gpuserve.config.messages import Origin, Problem
from gpuserve.config.positions import Path, parse_value
from gpuserve.options import nearest

PREFIX = "GPUSERVE_"
_SEPARATOR = "__"
#: Variables that Kubernetes sets for a Service called gpuserve or gpuserve-…; they are not for us.
_SERVICE_NAME = re.compile(r"[A-Z0-9_]*(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?)")
_SERVICE_LINK = re.compile(r"[A-Z0-9_]*PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")
#: For a worker that is profiled, for the tests of a machine with a GPU, and for the limit on turns of the
#: event loop; no keys of the schema.
_NO_KEYS = frozenset(
    {"GPUSERVE_CUDA_TIMELINE", "GPUSERVE_TEST_REAL_GPU", "GPUSERVE_TURN_LIMIT_MS", "GPUSERVE_TURN_FILE"}
)


@dataclass(frozen=True)
class Override:
    """A value that replaces the one of the file. ``label`` names what gave it."""

    path: Path
    value: Any
    label: str
    origin: Origin


def from_text(path: Path, text: str, label: str, origin: Origin) -> Override:
    """An override whose value was written as text: as it stands where the schema has text, else YAML."""
    is_text = isinstance(schema.kind_at(path), Text)
    return Override(path, text if is_text else parse_value(text), label, origin)


def variable_name(path: Path) -> str:
    """The environment variable of a key: ``("server", "http_port")`` is GPUSERVE_SERVER__HTTP_PORT."""
    return PREFIX + _SEPARATOR.join(str(step).upper() for step in path)


def from_environment(
    environ: Mapping[str, str], model_names: Sequence[str]
) -> tuple[list[Override], list[Problem]]:
    """The overrides that an environment holds, and the variables that mean nothing."""
    overrides: list[Override] = []
    problems: list[Problem] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in _NO_KEYS or _is_service_link(name, environ):
            continue
        found = _path_of(name.removeprefix(PREFIX), model_names)
        if isinstance(found, str):
            problems.append(Problem(name, found, Origin.ENVIRONMENT))
        else:
            overrides += [from_text(path, environ[name], name, Origin.ENVIRONMENT) for path in found]
    return overrides, problems


def without_models(
    environ: Mapping[str, str], model_names: Sequence[str], left_out: Collection[str]
) -> dict[str, str]:
    """The environment without the variables of the models that are left out."""

    def is_left_out(variable: str) -> bool:
        section, _, key = variable.removeprefix(PREFIX).partition(_SEPARATOR)
        if section != "MODELS" or not variable.startswith(PREFIX):
            return False
        meant = _models_meant(key, model_names)
        return bool(meant) and all(model_names[index] in left_out for index in meant)

    return {name: value for name, value in environ.items() if not is_left_out(name)}


def apply(data: Any, overrides: Iterable[Override]) -> Any:
    """A copy of the data with every override in its place, the later ones on top."""
    whole = copy.deepcopy(data)
    for override in overrides:
        _put(whole, override.path, override.value)
    return whole


def override_of(path: Path, overrides: Sequence[Override]) -> Override | None:
    """The override that gave the value at a path, or a value that it is in; None for the file's own."""
    for override in reversed(overrides):
        if path[: len(override.path)] == override.path:
            return override
    return None


def _path_of(rest: str, model_names: Sequence[str]) -> list[Path] | str:
    """The paths that a variable's name, without its prefix, stands for; else what is wrong with it."""
    section, _, key = rest.partition(_SEPARATOR)
    if section == "MODELS" and key:
        return _model_paths(key, model_names)
    path: Path = tuple(step.lower() for step in rest.split(_SEPARATOR))
    if section == "SERVER" and key and schema.kind_at(path) is not None:
        return [path]
    known = [variable_name(("server", name)) for name in schema.keys_at(("server",))]
    return f"unknown variable{nearest(PREFIX + rest, known) or f'; known are {known[0]} and its like'}"


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
    """The positions of the models with the longest of the names that a variable begins with."""
    indices = [
        index for index, name in enumerate(model_names) if rest.startswith(_capitals(name) + _SEPARATOR)
    ]
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


def _put(whole: Any, path: Path, value: Any) -> None:
    *parents, last = path
    for step, following in zip(parents, (*parents[1:], last), strict=True):
        if isinstance(whole, dict):
            whole = whole.setdefault(step, [] if isinstance(following, int) else {})
        elif isinstance(whole, list) and isinstance(step, int) and step < len(whole):
            whole = whole[step]
        else:
            return
    inside = isinstance(whole, list) and isinstance(last, int) and last < len(whole)
    if isinstance(whole, dict) or inside:
        whole[last] = value
