"""Requests a second, for each second. Made by formula and seeded, or read from a file of rates. Pure.

None of those made here was recorded anywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

DAY_S: Final = 86_400
#: Noise of the diurnal load: its spread, and after how long it has forgotten most of itself.
_SPREAD: Final = 0.08
_MEMORY_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Trace:
    """``rates_hz[i]`` requests a second come in second ``i``."""

    name: str
    rates_hz: tuple[float, ...]


def diurnal(peak_hz: float, seed: int, seconds: int = DAY_S) -> Trace:
    """A day by formula, in ``seconds``. With x from 0 to 1 over the day, starting at night::

        rate(x) = peak (0.53 - 0.42 cos 2 pi x + 0.05 cos 4 pi x) e^n(x)

    where n is a first-order autoregression: normal, spread 0.08, correlation e^-1 after 120 s.
    """
    source = random.Random(seed)
    keep, noise, rates = math.exp(-1 / _MEMORY_S), 0.0, []
    for second in range(seconds):
        noise = keep * noise + math.sqrt(1 - keep * keep) * _SPREAD * source.gauss(0, 1)
        turn = 2 * math.pi * second / seconds
        shape = 0.53 - 0.42 * math.cos(turn) + 0.05 * math.cos(2 * turn)
        rates.append(peak_hz * shape * math.exp(noise))
    return Trace("diurnal, by formula", tuple(rates))


def bursty(
    calm_hz: float,
    burst_hz: float,
    seed: int,
    seconds: int,
    calm_s: float = 900.0,
    burst_s: float = 180.0,
) -> Trace:
    """A Markov-modulated Poisson process of two states: calm and bursts, of random length (exponential, with
    these means), that begin and end within a second.
    """
    source = random.Random(seed)
    rates: list[float] = []
    in_burst = False
    while len(rates) < seconds:
        lasts = max(1, round(source.expovariate(1 / (burst_s if in_burst else calm_s))))
        rates += [burst_hz if in_burst else calm_hz] * lasts
        in_burst = not in_burst
    return Trace("bursts, two-state MMPP", tuple(rates[:seconds]))


def read(name: str, lines: Iterable[str], scale: float = 1.0) -> Trace:
    """A trace of one's own: lines of ``seconds,requests a second``, which hold until the next line.

    Raises:
        ValueError: a line is no pair of numbers, times do not rise, a rate is negative, or there is but one.
    """
    points = [_pair(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    rates: list[float] = []
    for (at_s, rate_hz), (until_s, _) in pairwise(points):
        if until_s <= at_s or rate_hz < 0:
            raise ValueError(f"at {until_s:g} s: times must rise and rates be at least 0")
        rates += [rate_hz * scale] * (round(until_s - points[0][0]) - len(rates))
    if not rates:
        raise ValueError("a trace needs two lines: a rate, and where it ends")
    return Trace(name, tuple(rates))


def arrivals(trace: Trace, seed: int) -> Sequence[int]:
    """How many requests come in each second: Poisson, by its normal limit where many do."""
    source = random.Random(seed)
    return [_poisson(rate, source) for rate in trace.rates_hz]


def _pair(number: int, line: str) -> tuple[float, float]:
    try:
        at_s, rate_hz = map(float, line.split(","))
    except ValueError:
        text = f"line {number}: expected 'seconds,requests a second', got {line.strip()!r}"
        raise ValueError(text) from None
    return at_s, rate_hz


def _poisson(mean: float, source: random.Random) -> int:
    if mean > 50:
        return max(0, round(source.gauss(mean, math.sqrt(mean))))
    count, product, limit = 0, source.random(), math.exp(-mean)
    while product > limit:
        count += 1
        product *= source.random()
    return count
