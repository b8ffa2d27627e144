"""How the requests of a model belong together in sequences: ``SequenceSpec``, a part of ``ModelSpec``.

Plain values only, no I/O. When a batch of ready sequences is formed is said by ``BatchingSpec``, as for
any other model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

#: A sequence has a row of the batch of one instance.
DIRECT: Final = "direct"
#: The next requests of many sequences are merged as the dynamic batcher does.
OLDEST: Final = "oldest"
STRATEGIES: Final = (DIRECT, OLDEST)
#: What an input that tells of the sequence can hold.
START: Final = "start"
END: Final = "end"
READY: Final = "ready"
CORRID: Final = "corrid"
CONTROL_KINDS: Final = (START, END, READY, CORRID)
#: Datatypes of the inputs for start, end and ready, and of that for the correlation id.
FLAG_DATATYPES: Final = ("INT32", "FP32", "BOOL")
CORRID_DATATYPES: Final = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
DEFAULT_MAX_IDLE_US: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ControlSpec:
    """An input of shape [1], behind the batch axis where the model batches, that the server fills.

    ``kind`` is one of ``CONTROL_KINDS``. ``false`` and ``true`` are what a flag is told by; of no meaning
    for the correlation id.
    """

    name: str
    kind: str
    datatype: str
    false: Any = 0
    true: Any = 1


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """``strategy`` "" says that the model knows no sequences.

    A sequence without a request for ``max_idle_us`` is dropped. ``max_candidates`` is how many sequences
    an instance works on at the same time with the strategy "oldest"; 0 is as many as its largest batch.
    With "direct" a step may wait for the queue delay until the given part of the rows has a request.
    """

    strategy: str = ""
    max_idle_us: int = DEFAULT_MAX_IDLE_US
    max_candidates: int = 0
    minimum_slot_utilization: float = 0.0
    controls: tuple[ControlSpec, ...] = ()

    def seats(self, max_batch_size: int) -> int:
        """How many sequences an instance works on at the same time."""
        rows = max(1, max_batch_size)
        return self.max_candidates or rows if self.strategy == OLDEST else rows

    def control(self, kind: str) -> ControlSpec | None:
        """The input of that kind, if there is one."""
        return next((one for one in self.controls if one.kind == kind), None)

    @property
    def keeps_rows(self) -> bool:
        """Whether a sequence has the same row in every batch: the others are there too, and not ready."""
        return self.strategy == DIRECT and self.control(READY) is not None

    @classmethod
    def from_wire(cls, plain: tuple[Any, ...]) -> SequenceSpec:
        """The inverse of ``dataclasses.astuple``."""
        strategy, max_idle_us, max_candidates, least, controls = plain
        return cls(strategy, max_idle_us, max_candidates, least, tuple(ControlSpec(*one) for one in controls))


NO_SEQUENCES: Final = SequenceSpec()
