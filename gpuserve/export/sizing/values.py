"""Values of manifests: with the reasons that YAML carries as comments, and amounts of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A value and why it is this value. ``why`` is one or a few sentences without a line break."""

    value: Any
    why: str


def value_of(part: Any) -> Any:
    """The value without its own reason; reasons inside it stay."""
    return part.value if isinstance(part, Reasoned) else part


def plain(tree: Any) -> Any:
    """The tree of dicts, lists and scalars without any reasons."""
    tree = value_of(tree)
    if isinstance(tree, dict):
        return {key: plain(one) for key, one in tree.items()}
    if isinstance(tree, list):
        return [plain(one) for one in tree]
    return tree


KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
_UNITS: Final = {
    "": 1,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": 1 << 40,
}  # fmt: skip
_FORM: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)(Ki|Mi|Gi|Ti|k|M|G|T)?")


def parse_nbytes(text: str) -> int:
    """Bytes of ``64Gi``, ``512Mi``, ``80G``; ValueError: it has another form, or is 0."""
    found = _FORM.fullmatch(text.strip())
    nbytes = round(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if nbytes <= 0:
        raise ValueError(f"expected an amount of memory such as 64Gi or 512Mi, given {text!r}")
    return nbytes


def quantity(nbytes: int) -> str:
    """The amount in the largest unit that divides it: ``9Gi``, ``9344Mi``."""
    for unit in ("Gi", "Mi", "Ki"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def readable(nbytes: int) -> str:
    """The amount for a sentence: ``8 GiB``, ``1.5 GiB``, ``64 KiB``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} bytes"


def up_to(nbytes: int, step: int) -> int:
    """The smallest multiple of ``step`` that is not less."""
    return -(-nbytes // step) * step
