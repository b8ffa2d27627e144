"""Model repositories on disk: model folders, their config.pbtxt, versions and files, not interpreted."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gpuserve.config.fingerprints import folder_fingerprint

CONFIG: Final = "config.pbtxt"
MAX_CONFIG_NBYTES: Final = 4 << 20
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_VERSION: Final = re.compile(r"[1-9]\d{0,17}")


class RepositoryError(Exception):
    """A folder that is no model repository; the text is one sentence."""


class EmptyRepository(RepositoryError):
    """A model repository without models, which may be added later."""


@dataclass(frozen=True)
class ModelFolder:
    """The folder of one model, which has the model's name. ``config`` is the text of config.pbtxt, or None;
    ``problem`` says why it cannot be read. ``versions`` has the files of each version folder.
    """

    name: str
    path: str
    config: str | None
    versions: Mapping[int, frozenset[str]]
    problem: str = ""

    @property
    def config_path(self) -> str:
        return os.path.join(self.path, CONFIG)

    @property
    def label(self) -> str:
        """Return the name of the model in messages: its config.pbtxt, or its folder if there is none."""
        return self.path if self.config is None and not self.problem else self.config_path

    def file(self, version: int, name: str) -> str:
        return os.path.join(os.path.abspath(self.path), str(version), name)


def model_folders(repository: str) -> list[ModelFolder]:
    """Return the model folders of a repository by name; raise RepositoryError if there are none."""
    try:
        names = _names(repository)
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise RepositoryError(f"the model repository {repository} cannot be read: {reason}") from None
    if os.path.isfile(os.path.join(repository, CONFIG)):
        parent = os.path.dirname(os.path.abspath(repository))
        text = f"{repository} is the folder of one model (it has a {CONFIG})"
        raise RepositoryError(f"{text}; serve the repository that it is in: {os.path.relpath(parent)}")
    if not names:
        expected = f"expected a folder for each, with a {CONFIG} and version folders (1, 2, …)"
        own = os.path.join(repository, "config.yaml")
        hint = f"; or serve {own}" if os.path.isfile(own) else ""
        raise EmptyRepository(f"the model repository {repository} has no models: {expected}{hint}")
    return [model_folder(repository, name) for name in names]


def _names(repository: str) -> list[str]:
    with os.scandir(repository) as entries:
        return sorted(one.name for one in entries if one.is_dir() and not one.name.startswith((".", "__")))


def model_folder(repository: str, name: str) -> ModelFolder:
    path = os.path.join(repository, name)
    config, problem = None, ""
    try:
        with open(os.path.join(path, CONFIG), encoding="utf-8-sig") as file:
            config = file.read(MAX_CONFIG_NBYTES + 1)
        if len(config) > MAX_CONFIG_NBYTES:
            config, problem = None, f"is larger than a config.pbtxt may be, {MAX_CONFIG_NBYTES >> 20} MiB"
    except FileNotFoundError:
        pass
    except OSError as error:
        problem = f"cannot be read: {(error.strerror or 'unknown reason').lower()}"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text: the byte at offset {error.start} is no character"
    numbers = [one for one in _listed(path) if _VERSION.fullmatch(one)]
    folders = {int(one): os.path.join(path, one) for one in numbers}
    versions = {one: frozenset(_listed(folder)) for one, folder in folders.items() if os.path.isdir(folder)}
    return ModelFolder(name, path, config, versions, problem)


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        if error.errno in _EXHAUSTED:  # the folder exists, and an empty list would unload the model
            raise
        return []


def model_fingerprints(repository: str) -> dict[str, Hashable]:
    """Return a fingerprint of each model's folder; raise OSError if the repository cannot be read."""
    return {name: folder_fingerprint(os.path.join(repository, name)) for name in _names(repository)}


def model_paths(repository: str) -> list[str]:
    """Return the folders of the models; raise OSError if the repository cannot be read."""
    return [os.path.join(repository, name) for name in _names(repository)]


def revision(path: str) -> str:
    """Return a text that changes when anything in a folder changes."""
    return hashlib.sha256(repr(folder_fingerprint(path)).encode()).hexdigest()


def versions_served(policy: str, available: Iterable[int], number: int, named: Iterable[int]) -> list[int]:
    """Return the available versions that a policy serves: the ``number`` latest, all, or the named ones."""
    ordered = sorted(available)
    if policy == "all":
        return ordered
    if policy == "specific":
        return sorted(set(named).intersection(ordered))
    return ordered[-max(1, number) :]
