"""When the server says that CUDA cannot be used: only on the word of two fresh processes."""

from __future__ import annotations

import pytest

from gpuserve.supervisor.cuda_doubt import CudaDoubt, Doubt, DoubtEvent, IllegalTransition

DOUBTED, WORKS, FAILS = DoubtEvent


def after(*events: DoubtEvent) -> CudaDoubt:
    doubt = CudaDoubt()
    for event in events:
        doubt.apply(event)
    return doubt


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], Doubt.WORKING),
        ([DOUBTED], Doubt.ASKING),
        ([DOUBTED, WORKS], Doubt.WORKING),
        ([DOUBTED, FAILS], Doubt.ASKING_AGAIN),
        ([DOUBTED, FAILS, WORKS], Doubt.WORKING),
        ([DOUBTED, FAILS, FAILS], Doubt.BROKEN),
        ([DOUBTED, FAILS, FAILS, FAILS], Doubt.BROKEN),
        ([DOUBTED, FAILS, FAILS, WORKS], Doubt.WORKING),
    ],
)
def test_states(events: list[DoubtEvent], state: Doubt) -> None:
    doubt = after(*events)
    assert doubt.state is state
    assert doubt.works is (state is not Doubt.BROKEN)


def test_nobody_was_asked() -> None:
    with pytest.raises(IllegalTransition, match="FAILS in state WORKING"):
        after(FAILS)
