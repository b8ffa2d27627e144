"""The sequences and the resources of a config file: what they come to, and what is wrong with them.

They are looked at once the rest of their model is known to hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuserve.config.plain import Violation
from gpuserve.config.positions import Path
from gpuserve.config.sequence_entry import RateLimiterEntry, SequenceBatchingEntry
from gpuserve.declared_sequences import check_sequences, control_spec
from gpuserve.errors import BadModelConfig, StartupError
from gpuserve.rate_spec import NO_RATE, RateSpec, ResourceSpec
from gpuserve.rates import check_rates
from gpuserve.sequence_spec import NO_SEQUENCES, SequenceSpec
from gpuserve.settings import ServerSettings
from gpuserve.spec import ModelSpec


def sequence_spec(entry: SequenceBatchingEntry | None) -> SequenceSpec:
    """What ``sequence_batching`` says.

    Raises:
        BadModelConfig: a control that cannot be.
    """
    if entry is None:
        return NO_SEQUENCES
    return SequenceSpec(
        entry.strategy,
        entry.max_sequence_idle_us,
        entry.max_candidate_sequences,
        float(entry.minimum_slot_utilization),
        tuple(control_spec(one.name, one.kind, one.dtype, one.false_true) for one in entry.controls),
    )


def rate_spec(entry: RateLimiterEntry | None) -> RateSpec:
    """What ``rate_limiter`` of instances says."""
    if entry is None:
        return NO_RATE
    return RateSpec(
        tuple(ResourceSpec(one.name, one.count, one.shared) for one in entry.resources), entry.priority
    )


def control_violations(entry: SequenceBatchingEntry | None, path: Path) -> Iterator[Violation]:
    """Every control that cannot be."""
    for index, one in enumerate(entry.controls if entry is not None else ()):
        try:
            control_spec(one.name, one.kind, one.dtype, one.false_true)
        except BadModelConfig as error:
            yield Violation((*path, "sequence_batching", "controls", index), str(error))


def violations(
    models: Sequence[ModelSpec], retried: Sequence[bool], settings: ServerSettings
) -> Iterator[Violation]:
    """What does not go together in models without other violations: in one, or in all of them.

    ``retried`` says of which models the file asks for a second run where a worker dies.
    """
    for index, (spec, retry) in enumerate(zip(models, retried, strict=True)):
        path: Path = ("models", index)
        try:
            check_sequences(
                spec.sequence,
                spec.batching,
                spec.queue,
                spec.inputs,
                model=spec.name,
                response_cache=spec.response_cache,
            )
        except BadModelConfig as error:
            yield Violation((*path, "sequence_batching"), str(error))
        if retry and spec.in_sequences:
            yield Violation(
                (*path, "retry_on_worker_death"),
                "retry_on_worker_death does not go with sequence_batching: what the callable kept of a "
                "sequence dies with its worker",
            )
    try:
        check_rates(models, settings)
    except StartupError as error:
        yield Violation(("server", "rate_limit_resources"), str(error))
