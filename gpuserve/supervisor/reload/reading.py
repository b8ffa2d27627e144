"""How the config of a running server is read: beside the reactor, as models may be asked what they are, and
one read at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeAlias

from gpuserve.errors import GpuserveError
from gpuserve.supervisor.models.repository import ConfigSource, ServerDeclaration

#: Makes a call that may take its time, and gives another its result, or the error that refuses the change.
RunBeside: TypeAlias = Callable[[Callable[[], Any], Callable[[Any], None]], None]
#: What a config says now, or what is wrong with it.
Read: TypeAlias = ServerDeclaration | GpuserveError


class SourceReads:
    """The reads of one config, of which there is one at a time."""

    def __init__(self, source: ConfigSource, run_beside: RunBeside) -> None:
        self.source = source
        self._run_beside = run_beside
        self._turn = threading.Lock()

    def read(self, then: Callable[[Read], None], changed: Collection[str] | None = None) -> None:
        """Read all; ``changed`` are the models whose files have changed, where no others need be asked."""
        self._run_beside(partial(self._read, changed), then)

    def _read(self, changed: Collection[str] | None) -> Read:
        with self._turn:
            return self.source.read_all(changed)
