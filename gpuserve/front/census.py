"""What a front knows of its models that nobody else does, for the status of the server: what waits and runs
at this moment, and whether it is ready.
"""

from __future__ import annotations

from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.generations import Generations
from gpuserve.front.scheduler.saturation import saturation
from gpuserve.supervisor.messages import Census


def census(ticket: int, service: InferenceService, generations: Generations) -> Census:
    """The answer to ``messages.TakeCensus``."""
    served = set(service.models())
    counts = []
    for driver in generations.all():
        now, spec = driver.scheduler.statistics(), driver.spec
        slots, part = (now.slots, saturation(spec, now)) if driver in served else (0, None)
        counts.append((spec.name, spec.version, now.queued, now.running_requests, slots, part))
    index = service.repository_index(ready_only=False)
    states = tuple((one.name, one.version, one.state, one.reason) for one in index)
    return Census(ticket, service.ready, tuple(counts), states, service.gpus.process_memory())
