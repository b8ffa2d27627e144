"""A batch that was too large for its instance, run again in two parts: where it is cut, and how the answers
to the parts become the answers to the batch. Pure; when it is done is the loops' to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gpuserve_worker.calling.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.calling.request import Batch
from gpuserve_worker.protocol.wire import Run, WireFailure
from gpuserve_worker.running.batch_inputs import BatchInputs


class BatchPart(NamedTuple):
    """Some of a batch's requests, next to each other, as a batch of their own."""

    run: Run
    inputs: BatchInputs


def split_position(rows: Sequence[int]) -> int:
    """How many requests go into the first of two parts, so that the larger has as few rows as can be."""
    total, before = sum(rows), 0
    larger = []
    for count in rows[:-1]:
        before += count
        larger.append(max(before, total - before))
    return larger.index(min(larger)) + 1 if larger else len(rows)


def split_batch(run: Run, inputs: BatchInputs) -> list[BatchPart]:
    """The two parts of a batch that has several requests; the batch itself where it has one."""
    count = len(run.requests)
    if count == 1 or not inputs.batch.batching:
        return [BatchPart(run, inputs)]
    position = split_position(inputs.batch.rows)
    return [_part(run, inputs, 0, position), _part(run, inputs, position, count)]


def join_answers(
    parts: Sequence[BatchPart], answers: Sequence[BatchAnswers | WireFailure]
) -> BatchAnswers | WireFailure:
    """The answers to the whole; one failure where every part failed."""
    first = answers[0]
    if len(answers) == 1 or all(isinstance(one, WireFailure) for one in answers):
        return first
    each: list[list[CheckedOutput] | WireFailure | None] = []
    parameters: list[dict[str, Any]] = []
    for part, one in zip(parts, answers, strict=True):
        count = len(part.run.requests)
        if isinstance(one, WireFailure):
            each += [one] * count
        else:
            assert one.each is not None, "parts are checked with their requests apart"
            each += one.each
        given = () if isinstance(one, WireFailure) else one.parameters
        parameters += given or [{}] * count
    sources = tuple({place for one in answers if isinstance(one, BatchAnswers) for place in one.sources})
    return BatchAnswers(None, each, tuple(parameters) if any(parameters) else (), sources)


def _part(run: Run, inputs: BatchInputs, start: int, end: int) -> BatchPart:
    whole = inputs.batch
    rows = slice(sum(whole.rows[:start]), sum(whole.rows[:end]))
    arrays = {name: array[rows] for name, array in whole.arrays.items()}
    batch = Batch(arrays, whole.requests[start:end], whole.output_names, whole.batching)
    failures = {at - start: one for at, one in inputs.failures.items() if start <= at < end}
    return BatchPart(
        run._replace(requests=run.requests[start:end], request_ids=run.request_ids[start:end]),
        BatchInputs(batch, failures, inputs.in_place, inputs.arrival),
    )
