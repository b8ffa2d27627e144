"""The statistics of models as JSON and as a ``ModelStatisticsResponse``: one form for both. Pure."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.front.v2.json_values import compact
from gpuserve.front.v2.statistics import Duration, Executions, StatisticsEntry

#: Every count is a uint64 on the wire.
_MAX: Final = (1 << 64) - 1


def message(entries: Iterable[StatisticsEntry]) -> Any:
    return pb.ModelStatisticsResponse(model_stats=[_entry(one) for one in entries])


def json_body(entries: Iterable[StatisticsEntry]) -> bytes:
    return compact({"model_stats": [_entry(one) for one in entries]}).encode()


def message_in_steps(entries: Iterable[StatisticsEntry]) -> Generator[None, None, bytes]:
    """The serialised message; its entries follow one another, so each can be written by itself."""
    parts: list[bytes] = []
    for one in entries:
        parts.append(message([one]).SerializeToString())
        yield
    return b"".join(parts)


def json_in_steps(entries: Iterable[StatisticsEntry]) -> Generator[None, None, bytes]:
    """The same as JSON, entry by entry."""
    parts: list[str] = []
    for one in entries:
        parts.append(compact(_entry(one)))
        yield
    return f'{{"model_stats":[{",".join(parts)}]}}'.encode()


def _entry(entry: StatisticsEntry) -> dict[str, Any]:
    statistics = entry.statistics
    executions = statistics.executions()
    return {
        "name": entry.name,
        "version": entry.version,
        "last_inference": int(statistics.last_answer_at * 1000),
        "inference_count": executions.rows,
        "execution_count": executions.count,
        "inference_stats": _durations(statistics.durations()),
        "batch_stats": [_batch(size, one) for size, one in statistics.by_size().items()],
        "memory_usage": [
            {"type": "CPU", "id": 0, "byte_size": entry.memory_nbytes},
            *(
                {"type": "GPU", "id": number, "byte_size": nbytes}
                for number, nbytes in entry.gpu_memory_nbytes.items()
            ),
        ],
        "response_stats": {
            str(index): _durations(one.durations()) for index, one in enumerate(statistics.responses)
        },
    }


def _batch(size: int, executions: Executions) -> dict[str, Any]:
    phases = ("compute_input", "compute_infer", "compute_output")
    durations = {one: Duration(executions.count, getattr(executions, f"{one}_ns")) for one in phases}
    return {"batch_size": size, **_durations(durations)}


def _durations(durations: dict[str, Duration]) -> dict[str, dict[str, int]]:
    return {name: {"count": times, "ns": min(ns, _MAX)} for name, (times, ns) in durations.items()}
