"""The files that a pod needs beside its config: callables and what they import, labels, samples for warm-ups.

The only file of this package that reads. They travel in one ConfigMap, so they are few and small, and lie in
the folder of the config file; what is larger, and every ``package.module:attribute``, belongs into the image.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpuserve.config.fields import split_callable
from gpuserve.config.messages import ConfigProblems, Problem
from gpuserve.export.quantities import readable

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.positions import Path

#: etcd takes 1 MiB an object; names, metadata and the text around the files are in it too.
MAX_NBYTES: Final = 960 << 10
_KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_SEPARATOR: Final = ".."


@dataclass
class Bundle:
    """Contents by path below the folder of the config, the config itself first, and what stood in the way."""

    config: str
    contents: dict[str, bytes] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.contents.values()))


def bundle(configuration: Configuration) -> Bundle:
    """The config file and everything beside it that it names.

    Raises:
        ConfigProblems: a file is elsewhere, is not readable, or all together are too large.
    """
    name = configuration.sources.name
    found = Bundle("config.json" if name.endswith(".json") else "config.yaml")
    with open(name, "rb") as file:
        found.contents[found.config] = file.read()
    for path, relative in _named_files(configuration):
        _add(found, configuration, path, relative)
    if not found.problems and found.nbytes > MAX_NBYTES:
        found.problems.append(_too_large(found, configuration))
    if found.problems:
        raise ConfigProblems(found.problems)
    return found


def map_key(relative: str) -> str:
    """The key of a file in a ConfigMap, which has no folders."""
    return relative.replace("/", _SEPARATOR)


def _named_files(configuration: Configuration) -> Iterator[tuple[Path, str]]:
    """Every file that a model names, with the key that names it."""
    for index, model in enumerate(configuration.entries.models):
        if model.callable is not None:
            place, _ = split_callable(model.callable)
            of_module = _module_files(configuration.base_dir, place)
            for file in [place] if place.endswith(".py") else of_module:
                yield ("models", index, "callable"), file
        for position, output in enumerate(model.outputs):
            if output.label_filename:
                yield ("models", index, "outputs", position, "label_filename"), output.label_filename
        for position, warmup in enumerate(model.warmup):
            for name, entry in warmup.inputs.items():
                if entry.file:
                    yield ("models", index, "warmup", position, "inputs", name, "file"), entry.file


def _add(found: Bundle, configuration: Configuration, path: Path, relative: str) -> None:
    """The file, and if it is Python the modules beside it that it imports."""
    relative = os.path.normpath(relative)
    if relative in found.contents:
        return
    problem = _misplaced(relative, found)
    if problem:
        found.problems.append(configuration.sources.problem(path, problem))
        return
    whole = os.path.join(configuration.base_dir, relative)
    try:
        with open(whole, "rb") as file:
            content = file.read(MAX_NBYTES + 1)
    except OSError as error:
        text = f"{relative!r} cannot be read: {(error.strerror or 'unknown reason').lower()}"
        found.problems.append(configuration.sources.problem(path, text))
        return
    found.contents[relative] = content
    if relative.endswith(".py"):
        for module in sorted(_imported(content, os.path.dirname(relative))):
            for candidate in _module_files(configuration.base_dir, module):
                _add(found, configuration, path, candidate)


def _misplaced(relative: str, found: Bundle) -> str:
    if os.path.isabs(relative) or relative.startswith(".."):
        return (
            f"{relative!r} is outside the folder of the config file, and a pod has only what is in it: move "
            "it there, or put it into the image and name it package.module:attribute"
        )
    if _KEY.fullmatch(map_key(relative)) is None or map_key(relative) in map(map_key, found.contents):
        return (
            f"{relative!r} cannot be in a ConfigMap: expected letters, digits, '-', '_' and '.' in its name"
        )
    return ""


def _imported(source: bytes, folder: str) -> set[str]:
    """Modules that a file of this folder imports, wherever in it; nothing of a file that is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    package = folder.split("/") if folder else []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names.update(f"{module}.{alias.name}".lstrip(".") for alias in node.names)
    return names


def _module_files(base_dir: str, module: str) -> Iterator[str]:
    """The files of a module and of the packages it is in, as far as they lie beside the config: workers look
    there first.
    """
    steps = module.split(".")
    for count in range(1, len(steps) + 1):
        stem = "/".join(steps[:count])
        for candidate in (f"{stem}.py", f"{stem}/__init__.py"):
            if os.path.isfile(os.path.join(base_dir, candidate)):
                yield candidate


def _too_large(found: Bundle, configuration: Configuration) -> Problem:
    largest = max(found.contents, key=lambda one: len(found.contents[one]))
    path = next(
        (path for path, name in _named_files(configuration) if os.path.normpath(name) == largest), ("models",)
    )
    whole, part = readable(found.nbytes), readable(len(found.contents[largest]))
    text = (
        f"the config and its files have {whole}, and a ConfigMap takes {readable(MAX_NBYTES)}: {largest!r} "
        f"alone has {part}; put it into the image"
    )
    return configuration.sources.problem(path, text)
