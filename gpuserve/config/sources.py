"""Where the values of a configuration came from: a file, variables, flags, a callable. A mistake is told at
the place that gave the value. No file is read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpuserve.config import precedence
from gpuserve.config.messages import Origin, Problem, dotted, without_token
from gpuserve.config.positions import Document, Path
from gpuserve.config.precedence import Override

#: What is given there is not for a terminal or a log.
SECRET: Final[tuple[Path, ...]] = (("server", "access_token"), ("server", "access_rules"))


@dataclass(frozen=True)
class Sources:
    """Where each value came from, to say so of a mistake. No ``document``: there is no file."""

    name: str
    document: Document | None
    overrides: tuple[Override, ...] = ()
    #: Models that are declared beside those of the data, which may lack all of them; None: there are none.
    others: frozenset[str] | None = None

    def problem(self, path: Path, text: str, *, at_key: bool = False) -> Problem:
        """A mistake at a path, told where the value was given. ``at_key``: the key itself is wrong."""
        override = precedence.override_of(path, self.overrides)
        if override is not None:
            if override.path == path:  # the label says where it is
                text = text.removeprefix(f"{dotted(path)}: ")
            return Problem(override.label, text, override.origin)
        if self.document is None:
            return Problem(self.name, text, Origin.ATTRIBUTE)
        span = self.document.span_of_key(path) if at_key else self.document.span_of_value(path)
        # A rule that is written wrongly may have its token anywhere.
        line = "" if path[:2] == SECRET[1] else without_token(self.document.line(span.line))
        return Problem(self.name, text, Origin.FILE, span, line)
