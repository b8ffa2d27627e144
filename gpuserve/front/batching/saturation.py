"""How much of what its instances can do at once a model has to do; worked out for a scrape only. Pure."""

from __future__ import annotations

from gpuserve.front.batching.batch_former import full_batch_rows
from gpuserve.front.batching.interface import SchedulerStatistics
from gpuserve.model.spec import ModelSpec


def saturation(spec: ModelSpec, counts: SchedulerStatistics) -> float | None:
    """What waits or runs, over what the instances that are up run at once: 1.0 is a full batch in each slot
    and nothing besides. 0.0 when idle; above 1.0, that much waits for its turn.

    Rows are counted where requests are merged, and requests where each is a batch by itself. Batches that are
    only held (``prefetch``) take no slot here: what is in them waits. In sequences a seat is taken by a
    sequence that has nothing to do as well, so it is the larger of that and of sequences over seats.

    None: no instance is up, so there is nothing to compare with. So it is with an ensemble, always.
    """
    if not counts.slots:
        return None
    full = full_batch_rows(spec.max_batch_size, spec.batching)
    if full:
        work = (counts.queued_rows + counts.computing_rows) / (counts.slots * full)
    else:
        work = (counts.queued + counts.computing_requests) / counts.slots
    return max(work, counts.sequences / counts.seats) if counts.seats else work
