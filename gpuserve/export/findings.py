"""What is wrong with a configuration or a flag, before it knows where its key stands in the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuserve.config.messages import Origin, Problem

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.positions import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """``flag``: the command line is to blame, not a key."""

    path: Path
    text: str
    flag: str = ""


def of_flag(flag: str, text: str) -> Finding:
    """The command line is to blame."""
    return Finding((), text, flag)


def problems(configuration: Configuration, found: Iterator[Finding]) -> list[Problem]:
    """The findings, each with its place."""
    return [
        Problem(one.flag, one.text, Origin.FLAG)
        if one.flag
        else configuration.sources.problem(one.path, one.text)
        for one in found
    ]
