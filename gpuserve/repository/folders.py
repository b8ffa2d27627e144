"""Model repositories on the disk: which folders are models, their config.pbtxt, their versions and files.
Nothing is understood here, and no model's file is opened.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gpuserve.stamps import folder_stamp

CONFIG: Final = "config.pbtxt"
#: No config.pbtxt is larger.
MAX_CONFIG_NBYTES: Final = 4 << 20
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_VERSION: Final = re.compile(r"[1-9]\d{0,17}")


class RepositoryError(Exception):
    """A folder that is no model repository; one sentence."""


class EmptyRepository(RepositoryError):
    """A folder without models, which may come yet."""


@dataclass(frozen=True)
class ModelFolder:
    """The folder of one model, whose name it has. ``config`` is the text of its config.pbtxt, None for none;
    ``problem`` says why that cannot be read. ``versions`` has the files of each version folder.
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
        """What stands for the model in messages: its config.pbtxt, or its folder where there is none."""
        return self.path if self.config is None and not self.problem else self.config_path

    def file(self, version: int, name: str) -> str:
        """The whole path of a file of a version."""
        return os.path.join(os.path.abspath(self.path), str(version), name)


def model_folders(repository: str) -> list[ModelFolder]:
    """The models of a repository by their names. Raises RepositoryError: it is not there, or none;
    EmptyRepository: it has no models.
    """
    names = _folders(repository)
    if os.path.isfile(os.path.join(repository, CONFIG)):
        parent = os.path.dirname(os.path.abspath(repository))
        raise RepositoryError(
            f"{repository} is the folder of one model (it has a {CONFIG}); serve the repository that it is "
            f"in: {os.path.relpath(parent)}"
        )
    if not names:
        raise EmptyRepository(
            f"the model repository {repository} has no models: expected a folder for each, with a {CONFIG} "
            "and version folders (1, 2, …)"
        )
    return [model_folder(repository, name) for name in names]


def _folders(repository: str) -> list[str]:
    try:
        with os.scandir(repository) as entries:
            return sorted(
                one.name for one in entries if one.is_dir() and not one.name.startswith((".", "__"))
            )
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise RepositoryError(f"the model repository {repository} cannot be read: {reason}") from None


def _names(repository: str) -> list[str]:
    with os.scandir(repository) as entries:
        return sorted(one.name for one in entries if one.is_dir() and not one.name.startswith((".", "__")))


def model_folder(repository: str, name: str) -> ModelFolder:
    path = os.path.join(repository, name)
    try:
        config, problem = _config(os.path.join(path, CONFIG)), ""
        if config is not None and len(config) > MAX_CONFIG_NBYTES:
            config, problem = None, f"is larger than a config.pbtxt may be, {MAX_CONFIG_NBYTES >> 20} MiB"
    except OSError as error:
        config, problem = None, f"cannot be read: {(error.strerror or 'unknown reason').lower()}"
    except UnicodeDecodeError as error:
        config, problem = None, f"is not UTF-8 text: the byte at offset {error.start} is no character"
    return ModelFolder(name, path, config, dict(_versions(path)), problem)


def _config(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read(MAX_CONFIG_NBYTES + 1)
    except FileNotFoundError:
        return None


def _versions(path: str) -> Iterator[tuple[int, frozenset[str]]]:
    for name in _listed(path):
        if _VERSION.fullmatch(name) and os.path.isdir(folder := os.path.join(path, name)):
            yield int(name), frozenset(_listed(folder))


def _listed(path: str) -> list[str]:
    """What is in a folder; nothing where it cannot be read, or goes away just now."""
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        if error.errno in _EXHAUSTED:  # the folder is there: without it the model would be unloaded
            raise
        return []


def stamps(repository: str) -> dict[str, Hashable]:
    """For each model something that differs once anything in its folder has changed. Raises OSError: the
    repository cannot be read.
    """
    return {name: folder_stamp(os.path.join(repository, name)) for name in _names(repository)}


def model_paths(repository: str) -> list[str]:
    """The folders of its models. Raises OSError: the repository cannot be read."""
    return [os.path.join(repository, name) for name in _names(repository)]


def revision(path: str) -> str:
    """A text that differs once anything in a folder has changed."""
    return hashlib.sha256(repr(folder_stamp(path)).encode()).hexdigest()


def chosen(policy: str, available: Iterable[int], number: int, named: Iterable[int]) -> list[int]:
    """Which of the versions that are there a policy serves: the ``number`` latest, all, or those named."""
    there = sorted(available)
    if policy == "all":
        return there
    if policy == "specific":
        return sorted(set(named).intersection(there))
    return there[-max(1, number) :]
