"""setuptools, but a wheel is made in a folder that is gone afterwards: ``pip install .`` leaves no build/,
and no file of an earlier build comes into a wheel.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the hooks that stay as they are

_GLOBAL = "--global-option"


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """The hook of PEP 517; what is given by the caller stays in force."""
    given = dict(config_settings or {})
    options = given.get(_GLOBAL, [])
    options = [options] if isinstance(options, str) else options
    with tempfile.TemporaryDirectory() as folder:
        given[_GLOBAL] = [*options, "build", f"--build-base={folder}"]
        return str(build_meta.build_wheel(wheel_directory, given, metadata_directory))
