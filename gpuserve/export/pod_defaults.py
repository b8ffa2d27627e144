"""The keys of ``server`` that have another default in a pod; what the file says of them holds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from gpuserve.export.reasoned import Reasoned

if TYPE_CHECKING:
    from collections.abc import Collection

    from gpuserve.config.load import Configuration

#: A connection to a pod is made anew after so long.
CONNECTION_AGE_S: Final = 300
#: As long as clients with connections that they keep need to hear of the end by an answer.
LAME_DUCK_S: Final = 2
_DEFAULTS: Final[dict[str, str | Reasoned]] = {
    "log_format": "json",
    "max_connection_age_s": Reasoned(
        str(CONNECTION_AGE_S), "Clients that connect anew find pods that were not there before."
    ),
    "lame_duck_s": Reasoned(
        str(LAME_DUCK_S),
        "After SIGTERM connections that are kept are told that they end, and served meanwhile.",
    ),
}


def in_pod(configuration: Configuration) -> Configuration:
    """A configuration as its pods run it, as far as sizes and times depend on it."""
    if "lame_duck_s" in said(configuration):
        return configuration
    settings = dataclasses.replace(configuration.settings, lame_duck_s=float(LAME_DUCK_S))
    return dataclasses.replace(configuration, settings=settings)


def said(configuration: Configuration) -> frozenset[str]:
    """The keys of ``server`` that the file has."""
    return frozenset(configuration.entries.server.model_fields_set)


def variables(said_keys: Collection[str]) -> list[dict[str, Any]]:
    """What the environment of the container says in place of a file that does not."""
    return [
        {"name": f"GPUSERVE_SERVER__{key.upper()}", "value": value}
        for key, value in _DEFAULTS.items()
        if key not in said_keys
    ]
