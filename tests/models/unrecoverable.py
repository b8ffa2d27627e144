"""A model that cannot go on where a test asks for it: ``die`` in its directory, with any text."""

from __future__ import annotations

from typing import Any

from mortal import Mortal

from gpuserve import UnrecoverableError


class Unrecoverable(Mortal):
    def act(self, x: Any) -> None:
        order = self.directory / "die"
        if order.exists():
            text = order.read_text()
            order.unlink()
            raise UnrecoverableError(text)
