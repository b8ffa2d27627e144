"""The limits of connections as the settings have them, and a door's part of those that it watches alone."""

from __future__ import annotations

import dataclasses

from gpuserve.front.exchange.limits import Limits
from gpuserve.settings.server import ServerSettings


def limits_of(settings: ServerSettings) -> Limits:
    return Limits(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(Limits)})


def limits_of_door(settings: ServerSettings) -> Limits:
    """What one of the doors may hold, so that all together hold what they may. Who is admitted says the
    front, which counts over all of them.
    """
    whole = limits_of(settings)
    return dataclasses.replace(
        whole,
        max_unsent_nbytes=-(-whole.max_unsent_nbytes // settings.doors),
        max_half_requests=-(-whole.max_half_requests // settings.doors),
    )
