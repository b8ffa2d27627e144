"""The TLS files of a config file: where they are, and what is wrong with them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from gpuserve.config import precedence
from gpuserve.config.plain import Violation
from gpuserve.config.positions import Path
from gpuserve.config.precedence import Override
from gpuserve.settings import ServerSettings
from gpuserve.tls import TlsFileError, check_files, tls_files, with_whole_paths

_SERVER: Path = ("server",)


def with_paths(settings: ServerSettings, base_dir: str, overrides: Sequence[Override]) -> ServerSettings:
    """The settings with whole paths. A path of the file is one from its folder, others are from here."""

    def folder_of(key: str) -> str:
        return base_dir if precedence.override_of((*_SERVER, key), overrides) is None else os.getcwd()

    return with_whole_paths(settings, folder_of)


def violations(settings: ServerSettings) -> Iterator[Violation]:
    """The first file that cannot be used."""
    files = tls_files(settings)
    if files is None:
        return
    try:
        check_files(files)
    except TlsFileError as error:
        yield Violation((*_SERVER, error.key), f"{error.key}: {error}")
