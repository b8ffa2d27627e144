"""Changes of callables' metrics as workers send them; rules for names, labels and buckets."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

# Annotations are not postponed, for the reason in ``wire.py``.

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"
KINDS: Final = (COUNTER, GAUGE, HISTOGRAM)
#: Limit of the series of one instance, over all its families.
MAX_SERIES: Final = 1000
MAX_BOUNDS: Final = 128
MAX_LABELS: Final = 32
MAX_TEXT: Final = 1024
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,255}")
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,127}")
#: Prefixes of the server's own metrics.
_TAKEN: Final = ("gpuserve_", "nv_")
_BOUND: Final = "le"
_SHOWN: Final = 64


class MetricChange(NamedTuple):
    """A change of one time series. ``values`` are added to the series: one number, or the sum of a histogram
    followed by the count of each bucket, the last of which is unbounded. If ``is_set``, a gauge becomes
    ``values[0]`` instead.
    """

    family: str
    kind: str
    text: str
    labels: dict[str, str]
    bounds: tuple[float, ...]
    is_set: bool
    values: tuple[float, ...]


def check_family(name: Any, text: Any, kind: Any) -> None:
    """Raise ``ValueError``, a sentence, if no metric family can have this name, text or kind."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"a metric is named {_shown(name)}: expected letters, digits, '_' and ':', no digit first, "
            "at most 256 of them"
        )
    if name.startswith(_TAKEN):
        raise ValueError(f"metric {name!r}: names that begin with {' or '.join(_TAKEN)} are the server's own")
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise ValueError(
            f"metric {name!r}: its description must be a str of at most {MAX_TEXT} characters, given "
            f"{_shown(text)}"
        )
    if kind not in KINDS:
        raise ValueError(f"metric {name!r}: its kind must be one of {', '.join(KINDS)}, given {_shown(kind)}")


def check_series(family: str, kind: str, labels: Any, bounds: Any) -> None:
    """Raise ``ValueError``, a sentence, if no series of the family can have these labels and buckets."""
    if not isinstance(labels, dict) or len(labels) > MAX_LABELS:
        raise ValueError(
            f"metric {family!r}: its labels must be a dict with at most {MAX_LABELS} entries, given "
            f"{_shown(labels)}"
        )
    for label, value in labels.items():
        if not isinstance(label, str) or _LABEL.fullmatch(label) is None or label == _BOUND:
            raise ValueError(
                f"metric {family!r}: a label is named {_shown(label)}: expected letters, digits and '_', no "
                f"digit first, no two '_' first, and not {_BOUND!r}"
            )
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise ValueError(
                f"metric {family!r}: label {label!r} must be a str of at most {MAX_TEXT} characters, given "
                f"{_shown(value)}"
            )
    if kind == HISTOGRAM:
        numbers = isinstance(bounds, Sequence) and all(is_number(one) for one in bounds)
        if not numbers or len(bounds) > MAX_BOUNDS or any(a >= b for a, b in itertools.pairwise(bounds)):
            raise ValueError(
                f"metric {family!r}: the buckets of a histogram are given by at most {MAX_BOUNDS} upper "
                f"bounds in ascending order, given {_shown(bounds)}"
            )
    elif bounds:
        raise ValueError(f"metric {family!r} is a {kind}, which has no buckets, given {_shown(bounds)}")


def is_number(value: Any) -> bool:
    """Return whether a value is a finite real number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN]
