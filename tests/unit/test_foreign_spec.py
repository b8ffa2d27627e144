"""Models as other programs describe them: right ones come through whole, wrong ones do not."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from gpuserve.model.spec import (
    BatchingSpec,
    InstanceSpec,
    ModelSpec,
    PolicySpec,
    QueueSpec,
    RateLimiter,
    Resource,
    SequenceBatching,
    SequenceControl,
)
from gpuserve.supervisor.attach.attached_programs import checked_spec
from gpuserve_worker.protocol.tensor import TensorSpec
from gpuserve_worker.protocol.wire import WireError

X = TensorSpec("x", "FP32", (-1, 3))
MODEL = ModelSpec("m", (X,), (X._replace(name="y", optional=True),), 8, (InstanceSpec("0", "cpu", {}),))
FULL = ModelSpec(
    "full.model-1_a",
    (X, X._replace(name="b", datatype="BYTES", shape=())),
    (),
    0,
    (
        InstanceSpec("0", "cpu", {}),
        InstanceSpec("1", "cuda:0", {}, RateLimiter((Resource("R", 2, True),), 3)),
    ),
    version=3,
    batching=BatchingSpec(100, (4, 8), merge=False, preserve_ordering=True),
    queue=QueueSpec(10, 20, 3, 2, PolicySpec("delay", 5, True, 6), ((1, PolicySpec()), (2, PolicySpec()))),
    decoupled=True,
    on_unrecoverable="restart_worker",
    sequence=SequenceBatching("oldest", 5, 3, 0.0, (SequenceControl("ID", "corrid", "BYTES"),)),
)
#: ``RateLimiter.from_wire`` takes it.
RATE = ((), 0)


def sent(plain: Any) -> Any:
    """As it arrives in another process."""
    return msgpack.unpackb(msgpack.packb(plain), use_list=False, strict_map_key=False)


@pytest.mark.parametrize("spec", [MODEL, FULL])
def test_a_right_one_comes_through_whole(spec: ModelSpec) -> None:
    assert checked_spec(sent(spec.to_wire())) == spec


WRONG: dict[str, list[Any]] = {
    "name": ["", 5, "a/b"],
    "version": ["1", -1],
    "max_batch_size": [8.0, True, -1],
    "prefetch": [None],
    "strict": [1],
    "inputs": [
        *(5, (5,), (("x", "FP32"),)),
        *((("x", "FP31", (1,), False),), (("x", "FP32", ("a",), False),), (("x", "FP32", (-2,), False),)),
    ],
    "instances": [
        *((), "ab", (("0", 1, RATE),)),
        (("0", "cpu", RATE), ("0", "cpu", RATE)),
        (("0", "cpu", ((("R", -1, False),), 0)),),
    ],
    "sequence": [("direct", 1, 0, 0.0, (("START", "start", "INT8", 0, 1),)), ("newest", 1, 0, 0.0, ())],
    "batching": [(1,) * 9, (-5, (), True, False), (5, (-1,), True, False)],
    "queue": [None, (1, 1, 0, 0, ("delay", 0, False, 0), ((1, (5,)),))],
    "on_unrecoverable": [None],
    "no_such_field": [1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, one) for field, values in WRONG.items() for one in values]
)
def test_a_wrong_field_is_a_breach_of_the_protocol(field: str, value: Any) -> None:
    with pytest.raises(WireError):
        checked_spec(sent({**MODEL.to_wire(), field: value}))


@pytest.mark.parametrize("field", ["name", "inputs", "outputs", "max_batch_size", "instances", "queue"])
def test_a_missing_field_is_a_breach_of_the_protocol(field: str) -> None:
    plain = MODEL.to_wire()
    del plain[field]
    with pytest.raises(WireError):
        checked_spec(sent(plain))
