"""``gpuserve new``: creation of a project that can be served and tested without changes."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Final

import typer

from gpuserve.backends.registry import name_of
from gpuserve.core.errors import ConfigError

_SUFFIX: Final = ".template"
_COMMON: Final = "common"
_GITIGNORE: Final = "gitignore"


#: Where pip finds the package itself; a release to an index makes this "".
_NOT_ON_AN_INDEX: Final = "  # first, in a checkout of gpuserve: pip install ."


class ProjectError(ConfigError):
    """A project cannot be created in the folder."""

    only_flags = True


@dataclass(frozen=True)
class ProjectKind:
    """A kind of project: its files, the target to serve, and the library that the target needs."""

    name: str
    about: str
    target: str = "config.yaml"
    #: A module, and the extra that installs it.
    library: tuple[str, str] = ("", "")

    def missing_extra(self) -> str:
        """Return the extra that has to be installed, or ""."""
        module, extra = self.library
        return extra if module and importlib.util.find_spec(module) is None else ""


KINDS: Final = {
    one.name: one
    for one in (
        ProjectKind("batch", "a function of arrays, the rows of many requests at once"),
        ProjectKind("stream", "a generator, whose responses go out as they are produced"),
        ProjectKind("torch", "a network of PyTorch", library=("torch", "pytorch")),
        ProjectKind("onnx", "an ONNX file, without code", library=("onnxruntime", "onnx")),
        ProjectKind("openai", "chat for OpenAI's clients", library=("pydantic", "openai")),
        ProjectKind("triton", "a model repository of Triton with a model.py", target="models"),
    )
}


@dataclass(frozen=True)
class Project:
    """A project to create in a folder; ``model`` is the name of its model."""

    folder: str
    kind: ProjectKind

    @property
    def model(self) -> str:
        return name_of(os.path.abspath(self.folder))

    def create(self) -> list[str]:
        """Write the files, and return their paths relative to the folder, or raise ProjectError."""
        self._require_empty()
        files = self.files()
        try:
            for path, content in files.items():
                whole = os.path.join(self.folder, path)
                os.makedirs(os.path.dirname(whole), exist_ok=True)
                with open(whole, "wb") as file:
                    file.write(content)
        except OSError as error:
            raise ProjectError(f"{error.filename or self.folder}: {(error.strerror or '').lower()}") from None
        return sorted(files)

    def files(self) -> dict[str, bytes]:
        """Return the contents of all files by path."""
        root = resources.files("gpuserve.cli.new").joinpath("templates")
        found: dict[str, bytes] = {}
        for folder in (_COMMON, self.kind.name):
            for path, template in _template_files(root.joinpath(folder), ""):
                name = path.removesuffix(_SUFFIX).replace("@MODEL@", self.model)
                name = f".{name}" if name == _GITIGNORE else name
                found[name] = self._fill_template(path, template.read_bytes())
        return found

    def next_steps(self) -> list[str]:
        """Return the next commands for the user, one a line."""
        return [f"cd {shlex.quote(self.folder)}", f"gpuserve dev {self.kind.target}", "pytest"]

    def _require_empty(self) -> None:
        try:
            entries = os.listdir(self.folder)
        except FileNotFoundError:
            return
        except OSError as error:
            reason = (error.strerror or "unknown reason").lower()
            raise ProjectError(f"{self.folder}: expected a new or an empty folder, {reason}") from None
        if entries:
            raise ProjectError(f"{self.folder} is not empty: expected a new or an empty folder")

    def _fill_template(self, path: str, content: bytes) -> bytes:
        if not path.endswith(_SUFFIX):  # a binary file
            return content
        extra = self.kind.library[1]
        values = {
            "MODEL": self.model,
            "TARGET": self.kind.target,
            "PACKAGE": f"'gpuserve[{extra}]'" if extra else "gpuserve",
            "NOTE": _NOT_ON_AN_INDEX,
        }
        text = content.decode()
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        return text.encode()


def _template_files(folder: Traversable, within: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        path = f"{within}{entry.name}"
        if entry.is_dir():
            yield from _template_files(entry, f"{path}/")
        else:
            yield path, entry


_KINDS_TEXT = "; ".join(f"{one.name}: {one.about}" for one in KINDS.values())


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
    project = Project(name, KINDS[kind])
    files = project.create()
    lines = [f"Created {name}: {', '.join(files)}", "Next:", *(f"  {one}" for one in project.next_steps())]
    if extra := KINDS[kind].missing_extra():
        lines.append(f"This kind needs a library that is not installed: pip install 'gpuserve[{extra}]'")
    sys.stdout.write("\n".join(lines) + "\n")
