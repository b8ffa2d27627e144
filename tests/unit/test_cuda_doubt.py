"""When the server says that CUDA cannot be used: only on the word of two fresh processes."""

from __future__ import annotations

import pytest

from gpuserve.core.states import IllegalTransition
from gpuserve.supervisor.workers.gpu_fences import DOUBTS, Doubt, DoubtEvent

DOUBTED, WORKS, FAILS = DoubtEvent


def after(*events: DoubtEvent) -> Doubt:
    doubt = Doubt.WORKING
    for event in events:
        doubt = DOUBTS.after(doubt, event)
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
    assert after(*events) is state


def test_nobody_was_asked() -> None:
    with pytest.raises(IllegalTransition, match="CUDA is WORKING, where FAILS cannot happen"):
        after(FAILS)
