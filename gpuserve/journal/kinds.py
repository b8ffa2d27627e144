"""The kinds of events, by the names that they have on the wire, and the facts of each. Pure. Nothing else."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class EventKind(enum.Enum):
    """What has happened, by the name that subscribers see."""

    SERVER_STATE = "server_state"
    INSTANCE_STATE = "instance_state"
    INSTANCE_DIED = "instance_died"
    INSTANCE_RESTART = "instance_restart"
    MODEL_LOADED = "model_loaded"
    MODEL_LOAD_FAILED = "model_load_failed"
    MODEL_UNLOADED = "model_unloaded"
    CONFIG_RELOADED = "config_reloaded"
    SCALED = "scaled"
    DRAINED = "drained"
    GPU_FENCED = "gpu_fenced"
    GPU_RELEASED = "gpu_released"
    FRONT_DIED = "front_died"
    FRONT_HUNG = "front_hung"
    DOOR_DIED = "door_died"
    DOOR_HUNG = "door_hung"
    REFUSALS = "refusals"
    SLOW_BATCH = "slow_batch"
    EXECUTION_HUNG = "execution_hung"
    LOAD_SLOW = "load_slow"
    LOG = "log"
    SAMPLE = "sample"


#: What comes so often that nobody keeps it as an event.
FREQUENT: Final = frozenset({EventKind.LOG, EventKind.SAMPLE})
#: What only the front sees, which tells the supervisor of it.
SEEN_BY_FRONT: Final = frozenset(
    {
        EventKind.DOOR_DIED,
        EventKind.DOOR_HUNG,
        EventKind.REFUSALS,
        EventKind.SLOW_BATCH,
    }
)
#: The facts that events of a kind may have, beside the time, the model, its version and the instance.
FACTS: Final[Mapping[EventKind, tuple[str, ...]]] = {
    EventKind.SERVER_STATE: ("state",),
    EventKind.INSTANCE_STATE: ("state", "phase", "device", "pid"),
    EventKind.INSTANCE_DIED: ("reason", "device", "restart_in_s", "restarts"),
    EventKind.INSTANCE_RESTART: ("device", "pid", "restarts"),
    EventKind.MODEL_LOADED: ("source", "instances", "load_s"),
    EventKind.MODEL_LOAD_FAILED: ("reason",),
    EventKind.MODEL_UNLOADED: ("source",),
    EventKind.CONFIG_RELOADED: ("ok", "reason", "changes"),
    EventKind.SCALED: ("instances",),
    EventKind.DRAINED: ("service", "unfinished"),
    EventKind.GPU_FENCED: ("uuid", "device", "reason"),
    EventKind.GPU_RELEASED: ("uuid", "device"),
    EventKind.FRONT_DIED: ("reason", "pid", "restart_in_s"),
    EventKind.FRONT_HUNG: ("pid", "silent_s", "replaced"),
    EventKind.DOOR_DIED: ("door", "reason", "restart_in_s"),
    EventKind.DOOR_HUNG: ("door", "pid", "silent_s"),
    EventKind.REFUSALS: ("refusals", "reasons", "period_s"),
    EventKind.SLOW_BATCH: ("over_s", "usual_s", "batches"),
    EventKind.EXECUTION_HUNG: ("running_s", "limit_s", "pid"),
    EventKind.LOAD_SLOW: ("loading_s", "phase", "place", "device", "pid"),
    EventKind.LOG: ("line", "level"),
    EventKind.SAMPLE: ("server", "models", "gpus", "doors"),
}
