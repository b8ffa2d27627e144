"""Looks at the counts of a front's models once a second, and tells what is worth an event."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from gpuserve.front.observe.noticing import Noticing
from gpuserve.front.process.slices import in_slices
from gpuserve.front.service.service import InferenceService

PERIOD_S: Final = 1.0


async def keep_noticing(service: InferenceService) -> None:
    """Look until the front ends."""
    noticing = Noticing()
    while True:
        await asyncio.sleep(PERIOD_S)
        models = service.models.metrics()
        noticing.keep(models)
        async for one in in_slices(models):
            for kind, model, version, instance, facts in noticing.look(one, time.monotonic()):
                service.events.tell(kind, model=model, version=version, instance=instance, **facts)
