"""The transports by name, and whether one can be used here. No server is imported."""

from __future__ import annotations

import importlib.util
from typing import Final

from gpuserve.errors import ConfigError
from gpuserve.settings import GRPCIO, H2CORN, NATIVE

TRANSPORTS: Final = (NATIVE, H2CORN, GRPCIO)


def check_transport(name: str) -> None:
    """Do nothing if a server can have this transport.

    Raises:
        ConfigError: there is none of that name, or its package is not installed.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"transport is one of {', '.join(TRANSPORTS)}, given {name!r}")
    if name == H2CORN and importlib.util.find_spec("h2corn") is None:
        raise ConfigError("transport h2corn needs a package that is missing: pip install 'gpuserve[h2corn]'")
