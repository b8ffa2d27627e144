"""One load of one version of a model: its life as states and a table, and its workers. What is loaded and
unloaded when is decided in ``served_models.py``.

::

                loaded            retire              finished            stopped
    LOADING ────────────► READY ──────────► RETIRING ──────────► STOPPING ────────► GONE
       │ dropped                                                                      ▲
       └──────────────────────────────────────────────────────────────────────────────┘

RETIRING: it gets no new requests, and its workers finish those that it has. STOPPING: nothing is left to do,
and the workers are ended.
"""

from __future__ import annotations

import enum
from typing import Final

from gpuserve.spec import ModelSpec
from gpuserve.supervisor.worker_group import WorkerGroup


class GenerationState(enum.Enum):
    """Where a generation stands."""

    LOADING = "LOADING"
    READY = "READY"
    RETIRING = "RETIRING"
    STOPPING = "STOPPING"
    GONE = "GONE"


class GenerationEvent(enum.Enum):
    """What can happen to it."""

    LOADED = "LOADED"
    DROPPED = "DROPPED"
    RETIRE = "RETIRE"
    FINISHED = "FINISHED"
    STOPPED = "STOPPED"


TRANSITIONS: Final[dict[tuple[GenerationState, GenerationEvent], GenerationState]] = {
    (GenerationState.LOADING, GenerationEvent.LOADED): GenerationState.READY,
    (GenerationState.LOADING, GenerationEvent.DROPPED): GenerationState.GONE,
    (GenerationState.READY, GenerationEvent.RETIRE): GenerationState.RETIRING,
    (GenerationState.RETIRING, GenerationEvent.FINISHED): GenerationState.STOPPING,
    (GenerationState.STOPPING, GenerationEvent.STOPPED): GenerationState.GONE,
}

#: What the repository index calls a version whose generation is in a state.
INDEX_STATE: Final[dict[GenerationState, str]] = {
    GenerationState.LOADING: "LOADING",
    GenerationState.READY: "READY",
    GenerationState.RETIRING: "UNLOADING",
    GenerationState.STOPPING: "UNLOADING",
    GenerationState.GONE: "UNAVAILABLE",
}


class IllegalTransition(Exception):
    """An event that cannot happen in a state: a defect of the supervisor."""


class Generation:
    """One load of one version of a model. ``served``: requests for the model are for it."""

    def __init__(self, number: int, spec: ModelSpec, workers: WorkerGroup, *, served: bool) -> None:
        self.number = number
        self.spec = spec
        self.group = workers
        self.served = served
        self.state = GenerationState.LOADING

    def apply(self, event: GenerationEvent) -> None:
        """Move on.

        Raises:
            IllegalTransition: the table has no such step.
        """
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            text = f"generation {self.number} of model {self.spec.name}"
            raise IllegalTransition(f"{text}: {event.name} in state {self.state.name}")
        self.state = after

    @property
    def is_known_to_front(self) -> bool:
        """Whether a new front is to be told of it: one that retires has nothing to do for that front."""
        return self.state in {GenerationState.LOADING, GenerationState.READY}
