"""The files that a pod needs beside its config. They are in one ConfigMap, so they must be few and small."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpuserve.backends.registry import HUB, is_model_path, source_of
from gpuserve.cli.export.pod_sizing import readable_size
from gpuserve.config.entries import split_callable
from gpuserve.config.problems import ConfigProblems, Problem, dotted

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.yaml_document import Path


#: etcd accepts 1 MiB an object, which includes names, metadata and the text around the files.
MAX_BUNDLE_NBYTES: Final = 960 << 10
_MAX_KEY_LENGTH: Final = 253
_KEY: Final = re.compile(rf"[-._a-zA-Z0-9]{{1,{_MAX_KEY_LENGTH}}}")
_SEPARATOR: Final = ".."


@dataclass
class ConfigBundle:
    """File contents by path below the config's folder, the config itself first, and the problems."""

    config: str
    contents: dict[str, bytes] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.contents.values()))


def bundle_config(configuration: Configuration) -> ConfigBundle:
    """Return the config and the files that it names, or raise ConfigProblems if a file is unfit."""
    sources = configuration.sources
    if sources.document is None:
        raise ValueError("only a config from a file can be in a pod")
    found = ConfigBundle("config.json" if sources.name.endswith(".json") else "config.yaml")
    # The text that was parsed: the file may be a pipe, or may have changed.
    found.contents[found.config] = sources.document.text.encode()
    for path, relative in _named_files(configuration):
        _add_file(found, configuration, path, relative)
    if not found.problems and found.nbytes > MAX_BUNDLE_NBYTES:
        found.problems.append(_size_problem(found, configuration))
    if found.problems:
        raise ConfigProblems(found.problems)
    return found


def config_map_key(relative: str) -> str:
    """Return the key of a file in a ConfigMap, which has no folders."""
    return relative.replace("/", _SEPARATOR)


def _named_files(configuration: Configuration) -> Iterator[tuple[Path, str]]:
    """Yield every file that a model names, with the path of its key."""
    for index, model in enumerate(configuration.entries.models):
        if model.callable is not None and not model.callable.startswith(
            HUB
        ):  # each pod downloads such a model
            named = model.callable
            place = named if is_model_path(named) else split_callable(named)[0]
            is_file = place == named or place.endswith(".py")
            for file in [place] if is_file else _module_files(configuration.base_dir, place):
                yield ("models", index, "callable"), file
        for position, output in enumerate(model.outputs):
            if output.label_filename:
                yield ("models", index, "outputs", position, "label_filename"), output.label_filename
        for position, warmup in enumerate(model.warmup):
            for name, entry in warmup.inputs.items():
                if entry.file:
                    yield ("models", index, "warmup", position, "inputs", name, "file"), entry.file


def _add_file(found: ConfigBundle, configuration: Configuration, path: Path, relative: str) -> None:
    """Add a file, and if it is Python the modules beside it that it imports."""
    relative = os.path.normpath(relative)
    if relative in found.contents and relative != found.config:
        return
    content, problem = b"", _placement_problem(relative, configuration.base_dir, found)
    if not problem:
        content, problem = _read_file(configuration.base_dir, relative)
    if problem:
        located = configuration.sources.problem(path, f"{dotted(path)}: {problem}")
        found.problems += [located] if located not in found.problems else []
        return
    found.contents[relative] = content
    if relative.endswith(".py"):
        for module in sorted(_imported_modules(content, os.path.dirname(relative))):
            for candidate in _module_files(configuration.base_dir, module):
                _add_file(found, configuration, path, candidate)


def _read_file(base_dir: str, relative: str) -> tuple[bytes, str]:
    """Return the content of a file, or why it cannot be read."""
    try:
        with open(os.path.join(base_dir, relative), "rb") as file:
            return file.read(MAX_BUNDLE_NBYTES + 1), ""
    except OSError as error:
        return b"", f"{relative!r} cannot be read: {(error.strerror or 'unknown reason').lower()}"


def _placement_problem(relative: str, base_dir: str, found: ConfigBundle) -> str:
    """Return why the file cannot be in a ConfigMap, or ""."""
    if os.path.isabs(relative) or relative.startswith(".."):
        text = f"{relative!r} is outside the folder of the config file, and a pod gets only that folder: "
        return f"{text}move the file there, or put it into the image and name it package.module:attribute"
    if os.path.isdir(os.path.join(base_dir, relative)):
        runtime, _ = source_of(relative if os.sep in relative else f"./{relative}", {}, base_dir)
        text = f"{relative!r} is a folder, which no ConfigMap can hold: put it into the image and write "
        return f"{text}callable: {runtime}, kwargs: {{file: PATH}}"
    folder = os.path.realpath(base_dir)
    if os.path.commonpath([folder, os.path.realpath(os.path.join(folder, relative))]) != folder:
        text = f"{relative!r} leads out of the folder of the config file through a link, whose target would "
        return f"{text}be published with the config: put a copy into the folder, or into the image"
    if _KEY.fullmatch(config_map_key(relative)) is None:
        form = f"expected letters, digits, '-', '_' and '.' in its name, at most {_MAX_KEY_LENGTH}"
        return f"{relative!r} cannot be in a ConfigMap: {form}"
    same_key = next((one for one in found.contents if config_map_key(one) == config_map_key(relative)), None)
    if same_key is not None:
        owner = "the config" if same_key == found.config else repr(same_key)
        return f"{relative!r} would have the key of {owner} in the ConfigMap; give it another name"
    return ""


def _imported_modules(source: bytes, folder: str) -> set[str]:
    """Return the modules that a Python file of this folder imports, at any place."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # no Python, or nested too deeply
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
    """Yield the files of a module and its packages beside the config, where workers look first."""
    steps = module.split(".")
    for count in range(1, len(steps) + 1):
        stem = "/".join(steps[:count])
        for candidate in (f"{stem}.py", f"{stem}/__init__.py"):
            if os.path.isfile(os.path.join(base_dir, candidate)):
                yield candidate


def _size_problem(found: ConfigBundle, configuration: Configuration) -> Problem:
    largest = max(found.contents, key=lambda one: len(found.contents[one]))
    named = ((path, os.path.normpath(name)) for path, name in _named_files(configuration))
    path = next((path for path, name in named if name == largest), ("models",))
    whole, part = readable_size(found.nbytes), readable_size(len(found.contents[largest]))
    most = readable_size(MAX_BUNDLE_NBYTES)
    text = f"{dotted(path)}: the config and its files have {whole}, and a ConfigMap holds at most {most}"
    text += f": {largest!r} alone has {part}; put it into the image"
    return configuration.sources.problem(path, text)
