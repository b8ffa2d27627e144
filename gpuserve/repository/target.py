"""Whatever can be served, by its path: a config file, a callable, a model file, a model repository."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from gpuserve.config.callable_target import CallableFlags, is_callable_path, load_callable
from gpuserve.config.load import Configuration, load_file
from gpuserve.config.precedence import Override
from gpuserve.repository.load import load_repository


def load_target(
    target: str,
    environ: Mapping[str, str],
    server: Sequence[Override] = (),
    model: CallableFlags | None = None,
) -> Configuration:
    """What a target would serve, under an environment and flags; those of a ``model`` are for a callable.
    ConfigError: the configuration is wrong.
    """
    if is_callable_path(target):
        return load_callable(target, model or CallableFlags(), server, environ)
    if os.path.isdir(target):
        return load_repository([target], environ, server)
    return load_file(target, environ, server)
