"""How requests are merged: the schedulers of a ``ModelConfig`` (dynamic batching, sequences, ensembles) to
the keys of an entry. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.config.positions import Path
from gpuserve.declare.spec import CORRID, DIRECT, OLDEST, BatchingSpec, QueueSpec, SequenceBatching
from gpuserve.front.v2.model_config import options_of
from gpuserve.options import key_and_value, rows
from gpuserve.repository.draft import Draft

#: The step of an ensemble takes whichever version is the latest.
_LATEST: Final = -1
_FLAGS: Final = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}


def schedule(draft: Draft) -> None:
    """Write what the scheduler of the model says, or how requests are merged where it says none."""
    match draft.message.WhichOneof("scheduling_choice"):
        case "dynamic_batching":
            _dynamic(draft)
        case "sequence_batching":
            _sequences(draft)
        case "ensemble_scheduling":
            _ensemble(draft)
        case _:
            if "max_batch_size" in draft.entry and draft.message.max_batch_size > 0:
                draft.put("batching", {"merge": False}, "max_batch_size")


def _dynamic(draft: Draft) -> None:
    origin: Path = ("dynamic_batching",)
    given = draft.message.dynamic_batching
    for key, table in (("batching", BatchingSpec), ("queue", QueueSpec)):
        draft.put(key, _options(draft, given, table, (key,), origin), *origin)
    _without_batches(draft, origin)


def _without_batches(draft: Draft, origin: Path) -> None:
    """Leave out what says when a batch is formed, where there are none."""
    if draft.message.max_batch_size == 0 and "max_batch_size" in draft.entry:
        for key in ("max_queue_delay_us", "preferred_batch_sizes"):
            if draft.entry["batching"].pop(key, None):
                draft.note(origin, f"{origin[0]} merges nothing, because max_batch_size is 0")


def _options(draft: Draft, message: Any, table: type, into: Path, origin: Path) -> dict[str, Any]:
    """The options of a table that a message sets, by our names."""
    found = _own_names(options_of(message, table), table)
    for row in rows(table).values():
        if row.name in found:
            draft.came((*into, row.name), (*origin, row.option.triton))
    return found


def _own_names(values: Mapping[str, Any], table: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in rows(table).values():
        value = values.get(row.option.triton)
        if (pair := key_and_value(row.hint)) is not None:
            value = {str(key): _own_names(one, pair[1]) for key, one in (value or {}).items()}
        elif isinstance(value, Mapping):
            value = _own_names(value, row.hint)
        if value:
            found[row.name] = value
    if found.get("timeout_action") == "reject":
        del found["timeout_action"]  # the default of a message is no word of the file
    return found


# ---- sequences ----------------------------------------------------------------------------------


def _sequences(draft: Draft) -> None:
    given, origin = draft.message.sequence_batching, ("sequence_batching",)
    into = origin
    sequence = _options(draft, given, SequenceBatching, into, origin)
    strategy = given.WhichOneof("strategy_choice") or DIRECT
    sequence["strategy"] = strategy
    chosen = getattr(given, strategy)
    batching = _options(draft, chosen, BatchingSpec, ("batching",), (*origin, strategy))
    batching.pop("merge", None)
    key = "max_candidate_sequences" if strategy == OLDEST else "minimum_slot_utilization"
    if getattr(chosen, key):
        sequence[key] = _rounded(getattr(chosen, key))
        draft.came((*into, key), (*origin, strategy, key))
    sequence["controls"] = [
        _control(draft, one, (*origin, "control_input", number), number)
        for number, one in enumerate(given.control_input)
    ]
    draft.put("sequence_batching", sequence, *origin)
    draft.put("batching", batching, *origin, strategy)
    _without_batches(draft, (*origin, strategy))


def _rounded(value: float) -> float:
    """The number that was written, and not the nearest of 32 bits."""
    return value if isinstance(value, int) else float(f"{value:.7g}")


def _control(draft: Draft, given: Any, origin: Path, number: int) -> dict[str, Any]:
    """One input that the server fills; the place of each of its parts is noted."""
    path: Path = ("sequence_batching", "controls", number)
    draft.came(path, origin)
    if len(given.control) != 1:
        draft.fault(origin, f"control_input {given.name!r} has {len(given.control)} controls, expected one")
        return {"name": given.name, "kind": CORRID}
    (told,) = given.control
    kind = pb.ModelSequenceBatching.Control.Kind.Name(told.kind).removeprefix("CONTROL_SEQUENCE_").lower()
    entry: dict[str, Any] = {"name": given.name, "kind": kind}
    if kind == CORRID:
        if told.data_type != pb.TYPE_INVALID:
            entry["dtype"] = datatype(told.data_type)
        return entry
    for field, dtype in _FLAGS.items():
        if values := list(getattr(told, field)):
            draft.came((*path, "false_true"), (*origin, "control", 0, field))
            entry |= {"dtype": dtype, "false_true": [_rounded(one) for one in values]}
    return entry


def datatype(number: int) -> str:
    """The v2 datatype of a ``DataType``."""
    name: str = pb.DataType.Name(number).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


# ---- ensembles ----------------------------------------------------------------------------------


def _ensemble(draft: Draft) -> None:
    origin: Path = ("ensemble_scheduling",)
    draft.came(("ensemble", "steps"), (*origin, "step"))
    steps = []
    for number, one in enumerate(draft.message.ensemble_scheduling.step):
        at, into = (*origin, "step", number), ("ensemble", "steps", number)
        draft.came(into, at)
        names = {"model": "model_name", "version": "model_version", "inputs": "input_map"}
        for ours, theirs in (names | {"outputs": "output_map"}).items():
            draft.came((*into, ours), (*at, theirs))
        steps.append(_step(one))
        for ours, theirs in (("inputs", "input_map"), ("outputs", "output_map")):
            for name in steps[-1][ours]:
                draft.came((*into, ours, name), (*at, theirs, name))
    draft.put("ensemble", {"steps": steps}, *origin)


def _step(given: Any) -> dict[str, Any]:
    version = {} if given.model_version in {_LATEST, 0} else {"version": given.model_version}
    return {
        "model": given.model_name,
        "inputs": dict(sorted(given.input_map.items())),
        "outputs": dict(sorted(given.output_map.items())),
        **version,
    }
