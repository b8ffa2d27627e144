"""A model that cannot go on where a test asks for it: ``die`` in its directory, with any text."""

from __future__ import annotations

from mortal import Mortal

from gpuserve import UnrecoverableError


class Unrecoverable(Mortal):
    def die(self, how: str) -> None:
        raise UnrecoverableError(how)
