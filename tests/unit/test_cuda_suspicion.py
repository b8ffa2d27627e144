"""When the server says that CUDA cannot be used: only on the word of two fresh processes."""

from __future__ import annotations

import pytest

from gpuserve.core.states import IllegalTransition
from gpuserve.supervisor.workers.gpu_fences import CUDA_STEPS, CudaEvidence, CudaSuspicion

SUSPECTED, WORKS, FAILS = CudaEvidence


def after(*events: CudaEvidence) -> CudaSuspicion:
    doubt = CudaSuspicion.WORKING
    for event in events:
        doubt = CUDA_STEPS.after(doubt, event)
    return doubt


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], CudaSuspicion.WORKING),
        ([SUSPECTED], CudaSuspicion.PROBING),
        ([SUSPECTED, WORKS], CudaSuspicion.WORKING),
        ([SUSPECTED, FAILS], CudaSuspicion.PROBING_AGAIN),
        ([SUSPECTED, FAILS, WORKS], CudaSuspicion.WORKING),
        ([SUSPECTED, FAILS, FAILS], CudaSuspicion.BROKEN),
        ([SUSPECTED, FAILS, FAILS, FAILS], CudaSuspicion.BROKEN),
        ([SUSPECTED, FAILS, FAILS, WORKS], CudaSuspicion.WORKING),
    ],
)
def test_states(events: list[CudaEvidence], state: CudaSuspicion) -> None:
    assert after(*events) is state


def test_nobody_was_asked() -> None:
    with pytest.raises(IllegalTransition, match="CUDA is WORKING, where FAILS cannot happen"):
        after(FAILS)
