"""Where the values of a repository's models came from: each from the config.pbtxt of its folder. A mistake
that is found in an entry is told at the field that it was made of. No file is read here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpuserve.config import precedence
from gpuserve.config.messages import Origin, Problem, dotted
from gpuserve.config.positions import Path
from gpuserve.config.sources import Sources
from gpuserve.repository.draft import Draft, Remark
from gpuserve.repository.folders import ModelFolder

_ENTRY: Final = re.compile(r"models\[(\d+)\]")


@dataclass(frozen=True)
class RepositorySources(Sources):
    """``models`` has, for each entry, the folder and the draft that it came from."""

    models: Sequence[tuple[ModelFolder, Draft]] = ()

    def problem(self, path: Path, text: str, *, at_key: bool = False) -> Problem:
        index = path[1] if len(path) > 1 and path[0] == "models" else None
        if not isinstance(index, int) or precedence.override_of(path, self.overrides) is not None:
            return super().problem(path, text, at_key=at_key)
        folder, draft = self.models[index]
        origin = draft.origin(path[2:])
        own = text.removeprefix(f"{dotted(path)}: ")
        if own != text and origin:
            own = f"{dotted(origin)}: {own}"
        return problem_at(folder, draft, Remark(origin, _ENTRY.sub(self._name, own)), at_name=at_key)

    def _name(self, found: re.Match[str]) -> str:
        return f"model {self.models[int(found[1])][1].name!r}"


def problem_at(folder: ModelFolder, draft: Draft, remark: Remark, *, at_name: bool = False) -> Problem:
    """A sentence about a field, at its place in the config.pbtxt."""
    text = remark.text
    if folder.config is None:
        return Problem(folder.label, text, Origin.FILE, model=folder.name)
    span = draft.pbtxt.span(remark.path, at_name=at_name or not draft.pbtxt.has(*remark.path))
    line = draft.pbtxt.line(span.line) if remark.path else ""
    return Problem(folder.label, text, Origin.FILE, span, line, folder.name)
