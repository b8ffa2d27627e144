"""A batch that was too large for its instance, run again in two parts: where it is cut, and how the answers
to the parts become the answers to the batch. Pure; when it is done is the loops' to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gpuserve_worker.intake import TakenIn
from gpuserve_worker.outputs import Answers, Output
from gpuserve_worker.request import Batch
from gpuserve_worker.wire import Run, WireFailure


class Part(NamedTuple):
    """Some of a batch's requests, next to each other, as a batch of their own."""

    run: Run
    taken: TakenIn


def cut(rows: Sequence[int]) -> int:
    """How many requests go into the first of two parts, so that the larger has as few rows as can be."""
    total, before = sum(rows), 0
    larger = []
    for count in rows[:-1]:
        before += count
        larger.append(max(before, total - before))
    return larger.index(min(larger)) + 1 if larger else len(rows)


def halves(run: Run, taken: TakenIn) -> list[Part]:
    """The two parts of a batch that has several requests; the batch itself where it has one."""
    count = len(run.requests)
    if count == 1 or not taken.batch.batching:
        return [Part(run, taken)]
    position = cut(taken.batch.rows)
    return [_part(run, taken, 0, position), _part(run, taken, position, count)]


def joined(parts: Sequence[Part], answers: Sequence[Answers | WireFailure]) -> Answers | WireFailure:
    """The answers to the whole; one failure where every part failed."""
    first = answers[0]
    if len(answers) == 1 or all(isinstance(one, WireFailure) for one in answers):
        return first
    each: list[list[Output] | WireFailure | None] = []
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
    sources = tuple({place for one in answers if isinstance(one, Answers) for place in one.sources})
    return Answers(None, each, tuple(parameters) if any(parameters) else (), sources)


def _part(run: Run, taken: TakenIn, start: int, end: int) -> Part:
    whole = taken.batch
    rows = slice(sum(whole.rows[:start]), sum(whole.rows[:end]))
    arrays = {name: array[rows] for name, array in whole.arrays.items()}
    batch = Batch(arrays, whole.requests[start:end], whole.output_names, whole.batching)
    failures = {at - start: one for at, one in taken.failures.items() if start <= at < end}
    return Part(
        run._replace(requests=run.requests[start:end]),
        taken._replace(batch=batch, failures=failures),
    )
