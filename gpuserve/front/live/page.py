"""What the live page of one server is made from."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from gpuserve.config.settings.server import OFF, ServerSettings
from gpuserve.front.live.feed import LiveFeed
from gpuserve.front.live.sampler import LiveSampler
from gpuserve.front.live.settings import ShownSettings
from gpuserve.front.service.service import InferenceService


@dataclass(frozen=True, slots=True)
class LivePage:
    """What all who watch follow, and the settings that they are shown."""

    feed: LiveFeed
    settings: ShownSettings


def live_page(service: InferenceService, settings: ServerSettings, epoch: int) -> LivePage | None:
    """The page of a front, which is the server's ``epoch``-th; None where there is to be none."""
    if settings.dashboard == OFF:
        return None
    sampler = LiveSampler(service.models, service.control.gpus, time.monotonic)
    server = {**service.metadata(), "pid": os.getpid(), "restarts": epoch - 1}
    del server["extensions"]
    return LivePage(LiveFeed(sampler, service.health, service.events, server), ShownSettings(settings))
