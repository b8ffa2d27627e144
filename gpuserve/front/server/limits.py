"""The limits of connections as the settings have them, and a door's part of what it counts alone."""

from __future__ import annotations

import dataclasses
from typing import Final

from gpuserve.config.settings.server import ServerSettings
from gpuserve.front.exchange.limits import Limits

#: What each door counts alone.
_PARTS: Final = ("max_unsent_nbytes", "max_half_requests", "max_streams", "max_intake_nbytes")


def limits_of(settings: ServerSettings) -> Limits:
    return Limits(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(Limits)})


def part_of_door(settings: ServerSettings) -> ServerSettings:
    """The settings with what one of the doors may hold, so that all together hold what they may. How many
    connections are admitted says the front, which counts over all of them.
    """
    return dataclasses.replace(
        settings, **{name: -(-getattr(settings, name) // settings.doors) for name in _PARTS}
    )
