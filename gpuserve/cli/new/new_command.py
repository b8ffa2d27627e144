"""``gpuserve new``: creation of a project that can be served and tested without changes."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Final, NamedTuple

import typer

from gpuserve.backends.registry import name_of
from gpuserve.core.errors import ConfigError

_SUFFIX: Final = ".template"
_GITIGNORE: Final = "gitignore"
#: Where pip finds the package itself; a release to an index makes this "".
_NOT_ON_AN_INDEX: Final = "  # first, in a checkout of gpuserve: pip install ."


class ProjectError(ConfigError):
    """A project cannot be created in the folder."""

    only_flags = True


class ProjectKind(NamedTuple):
    """A kind of project: the target to serve, and the library that it needs, which an extra installs."""

    about: str
    target: str = "config.yaml"
    library: str = ""
    extra: str = ""

    def is_installed(self) -> bool:
        return not self.library or importlib.util.find_spec(self.library) is not None


#: The kinds by name, which is the name of the folder with their templates.
KINDS: Final = {
    "batch": ProjectKind("a function of arrays, the rows of many requests at once"),
    "stream": ProjectKind("a generator, whose responses go out as they are produced"),
    "torch": ProjectKind("a network of PyTorch", library="torch", extra="pytorch"),
    "onnx": ProjectKind("an ONNX file, without code", library="onnxruntime", extra="onnx"),
    "openai": ProjectKind("chat for OpenAI's clients", library="pydantic", extra="openai"),
    "triton": ProjectKind("a model repository of Triton with a model.py", target="models"),
}


def create_project(folder: str, kind: str) -> list[str]:
    """Write the files of a project, and return their paths relative to the folder, or raise ProjectError."""
    _require_empty(folder)
    model, (_, target, _, extra) = name_of(os.path.abspath(folder)), KINDS[kind]
    values = {
        "@MODEL@": model,
        "@TARGET@": target,
        "@PACKAGE@": f"'gpuserve[{extra}]'" if extra else "gpuserve",
        "@NOTE@": _NOT_ON_AN_INDEX,
    }
    templates = resources.files("gpuserve.cli.new").joinpath("templates")
    created = []
    for path, template in (
        *_template_files(templates.joinpath("common"), ""),
        *_template_files(templates.joinpath(kind), ""),
    ):
        content = template.read_bytes()
        if path.endswith(_SUFFIX):  # others are binary files
            content = _filled(content.decode(), values).encode()
        name = _filled(path.removesuffix(_SUFFIX), values)
        created.append(f".{name}" if name == _GITIGNORE else name)
        _write(folder, created[-1], content)
    return sorted(created)


def _require_empty(folder: str) -> None:
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise ProjectError(f"{folder}: expected a new or an empty folder, {reason}") from None
    if entries:
        raise ProjectError(f"{folder} is not empty: expected a new or an empty folder")


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def _write(folder: str, path: str, content: bytes) -> None:
    whole = os.path.join(folder, path)
    try:
        os.makedirs(os.path.dirname(whole), exist_ok=True)
        with open(whole, "wb") as file:
            file.write(content)
    except OSError as error:
        raise ProjectError(f"{error.filename or folder}: {(error.strerror or '').lower()}") from None


def _template_files(folder: Traversable, within: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        path = f"{within}{entry.name}"
        if entry.is_dir():
            yield from _template_files(entry, f"{path}/")
        else:
            yield path, entry


_KINDS_TEXT = "; ".join(f"{name}: {one.about}" for name, one in KINDS.items())


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The folder to create; the model gets the same name.")
    ],
    kind: Annotated[str, typer.Option(metavar="KIND", help=f"The kind of model. {_KINDS_TEXT}.")] = "batch",
) -> None:
    """Create a project: a model, its config, a test, a README.

    `gpuserve dev` serves the project and `pytest` tests it, without changes.

    Examples:
      gpuserve new sentiment
      gpuserve new chat --kind openai
    """
    if kind not in KINDS:
        raise typer.BadParameter(f"expected one of {', '.join(KINDS)}, given {kind!r}", param_hint="--kind")
    files, chosen = create_project(name, kind), KINDS[kind]
    steps = [f"cd {shlex.quote(name)}", f"gpuserve dev {chosen.target}", "pytest"]
    lines = [f"Created {name}: {', '.join(files)}", "Next:", *(f"  {one}" for one in steps)]
    if not chosen.is_installed():
        text = f"This kind needs a library that is not installed: pip install 'gpuserve[{chosen.extra}]'"
        lines.append(text)
    sys.stdout.write("\n".join(lines) + "\n")
