"""What of a model may be changed, and to which values. Pure. An axis is a key of the config file with a few
values in ascending order, one of which is the file's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from gpuserve.bench.plan.errors import BenchOptionError
from gpuserve.model.spec import MAX_INSTANCES, ModelSpec

#: A value for the key of each axis, in the order of the axes.
Settings: TypeAlias = tuple[int, ...]

_DELAYS_US: Final = (0, 100, 500, 1000, 2000, 5000)
_PREFETCH: Final = (0, 1, 2)
_MAX_PREFETCH: Final = 16


@dataclass(frozen=True, slots=True)
class Axis:
    """A key of the config with the values to try. ``keys`` lead from the model's entry to it."""

    option: str
    keys: tuple[str | int, ...]
    values: tuple[int, ...]
    start: int

    @property
    def title(self) -> str:
        """The heading of its column in tables."""
        return self.option.removeprefix("--").replace("-", " ")


@dataclass(frozen=True, slots=True)
class Wishes:
    """The values that options name; None: some around the file's own."""

    max_batch_sizes: tuple[int, ...] | None = None
    delays_us: tuple[int, ...] | None = None
    instances: tuple[int, ...] | None = None
    prefetch: tuple[int, ...] | None = None


def axes_of(
    model: ModelSpec, counts: Sequence[int], cores: int, least_batch: int, wishes: Wishes
) -> list[Axis]:
    """The axes of a model that leave a choice; ``counts`` is of each entry of ``instances`` (one can be
    searched), ``cores`` of this machine, ``least_batch`` the rows of a request.
    """
    batch, delay = model.max_batch_size, model.batching.max_queue_delay_us
    found = []
    if batch:
        sizes = [one for one in wishes.max_batch_sizes or _around(batch) if one >= least_batch]
        found.append(_axis("--max-batch-sizes", ("max_batch_size",), sizes, batch, wishes.max_batch_sizes))
        keys = ("batching", "max_queue_delay_us")
        found.append(_axis("--delays-us", keys, wishes.delays_us or _DELAYS_US, delay, wishes.delays_us))
    if len(counts) == 1:
        numbers = wishes.instances or _instances(counts[0], cores)
        found.append(_axis("--instances", ("instances", 0, "count"), numbers, counts[0], wishes.instances))
    depths = wishes.prefetch or _PREFETCH
    found.append(_axis("--prefetch", ("prefetch",), depths, model.prefetch, wishes.prefetch))
    return [axis for axis in found if axis.values != (axis.start,)]


def _axis(
    option: str,
    keys: tuple[str | int, ...],
    values: Sequence[int],
    own: int,
    wished: tuple[int, ...] | None,
) -> Axis:
    """The file's own value is tried as well, unless the user has said which are."""
    return Axis(option, keys, tuple(sorted({*values} if wished and values else {*values, own})), own)


def parse_values(option: str, text: str | None, least: int, most: int) -> tuple[int, ...] | None:
    """An ascending list such as ``1,2,4``, None without the option; BenchOptionError: it has another form."""
    if text is None:
        return None
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        values = (least - 1,)
    if not all(least <= value <= most for value in values):
        raise BenchOptionError(
            option, f"expected whole numbers from {least} to {most} such as 1,2,4, given {text!r}"
        )
    return values


def parse_wishes(texts: Mapping[str, str | None]) -> Wishes:
    """The options of the four axes by their names; BenchOptionError: one has another form."""
    bounds = {
        "max_batch_sizes": (1, 1 << 20),
        "delays_us": (0, 60_000_000),
        "instances": (1, MAX_INSTANCES),
        "prefetch": (0, _MAX_PREFETCH),
    }
    return Wishes(
        **{
            name: parse_values(f"--{name.replace('_', '-')}", texts.get(name), *bound)
            for name, bound in bounds.items()
        }
    )


def _around(value: int) -> tuple[int, ...]:
    """Values from a quarter of the file's own to four times of it."""
    return tuple(sorted({max(1, value // 4), max(1, value // 2), value, value * 2, value * 4}))


def _instances(count: int, cores: int) -> tuple[int, ...]:
    """Powers of two up to the cores, or to twice what the file has."""
    return tuple(2**power for power in range(16) if 2**power <= max(cores, 2 * count))
