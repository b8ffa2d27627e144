"""The tables that are printed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triton_differences.compare import Difference, Verdict
from triton_differences.expected import Meant

_WIDTH = 300


@dataclass(frozen=True, slots=True)
class Result:
    """A case that was compared. ``meant`` is what covers its differences."""

    name: str
    verdict: Verdict
    differences: Sequence[Difference]
    meant: tuple[Meant, ...]

    @property
    def is_surprise(self) -> bool:
        """Whether it differs and is not listed."""
        return self.verdict is Verdict.DIFFERENT and not self.meant


def markdown(results: Sequence[Result]) -> str:
    """How many there are of each kind, then the cases that are not equal, those not listed first."""
    counts = Counter(one.verdict for one in results)
    surprises = [one for one in results if one.is_surprise]
    lines = ["| | cases |", "|---|---|", *(f"| {one.value} | {counts[one]} |" for one in Verdict)]
    lines += [f"| of them not listed | {len(surprises)} |", ""]
    meant = [one for one in results if one.meant]
    texts = [one for one in results if one.verdict is Verdict.TEXT]
    for title, part in (
        ("Different, not listed", surprises),
        ("Different, listed", meant),
        ("Text differs", texts),
    ):
        lines += [f"## {title}: {len(part)}", "", *_table(part), ""]
    return "\n".join(lines)


def _table(results: Sequence[Result]) -> Iterator[str]:
    if not results:
        return
    yield from ("| case | where | Triton | gpuserve |", "|---|---|---|---|")
    for result in results:
        for number, one in enumerate(result.differences):
            name = result.name if number == 0 else ""
            yield f"| {_cell(name)} | {_cell(one.path)} | {_cell(one.triton)} | {_cell(one.gpuserve)} |"


def _cell(value: object) -> str:
    text = str(value).replace("\n", "\\n").replace("|", "\\|")
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
