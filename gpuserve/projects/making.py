"""From the name of a folder and a kind of model to a project that can be served and tested as it is."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from gpuserve.backends.registry import name_of
from gpuserve.core.errors import ConfigError

_SUFFIX: Final = ".template"
_COMMON: Final = "common"
_GITIGNORE: Final = "gitignore"


class ProjectError(ConfigError):
    """A project cannot be made there, as the command line wants it."""

    only_flags = True


@dataclass(frozen=True)
class ProjectKind:
    """A kind of project: what is served of it, and what that needs beside gpuserve."""

    name: str
    about: str
    target: str = "config.yaml"
    #: A module, and the extra that brings it.
    library: tuple[str, str] = ("", "")

    def missing_extra(self) -> str:
        """The extra that has to be installed, "" where nothing is missing."""
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
    """A project that is to be made in a folder. ``model`` is the name of its model."""

    folder: str
    kind: ProjectKind

    @property
    def model(self) -> str:
        return name_of(os.path.abspath(self.folder))

    def make(self) -> list[str]:
        """Write its files, and return their paths in the folder. Raises ProjectError: the folder is not
        empty, or cannot be written to; nothing has been written then.
        """
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
        """What it consists of, by path."""
        root = resources.files("gpuserve.projects").joinpath("templates")
        found: dict[str, bytes] = {}
        for folder in (_COMMON, self.kind.name):
            for path, template in _templates(root.joinpath(folder), ""):
                found[self._named(path)] = self._filled(path, template.read_bytes())
        return found

    def next_steps(self) -> list[str]:
        """What to type next, a line each."""
        return [f"cd {self.folder}", f"gpuserve dev {self.kind.target}", "pytest"]

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

    def _named(self, path: str) -> str:
        name = path.removesuffix(_SUFFIX).replace("@MODEL@", self.model)
        return f".{name}" if name == _GITIGNORE else name

    def _filled(self, path: str, content: bytes) -> bytes:
        if not path.endswith(_SUFFIX):  # it is no text
            return content
        extra = self.kind.library[1]
        values = {
            "MODEL": self.model,
            "TARGET": self.kind.target,
            "PACKAGE": f"gpuserve[{extra}]" if extra else "gpuserve",
        }
        text = content.decode()
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        return text.encode()


def _templates(folder: Traversable, within: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        path = f"{within}{entry.name}"
        if entry.is_dir():
            yield from _templates(entry, f"{path}/")
        else:
            yield path, entry
