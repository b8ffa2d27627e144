"""``AttachedServer``: models of this program, served by a server that another program runs.

The workers are children of this program; the server's front talks to them directly. What is said between
the two programs is in ``control/attach.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpuserve.api.model_host import ModelHost, Runner
from gpuserve.control.attach import port_of
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.attach.attachment import Attachment

#: How long a server that is not there yet is waited for.
ATTACH_TIMEOUT_S: Final = 30.0


class AttachedServer(ModelHost):
    """A server of another program, with models of this one::

        with Server.attach("localhost:8000") as server:
            server.bind(model_name="linear", infer_func=infer, inputs=[…], outputs=[…])
            server.serve()

    The models are served from ``bind()`` on, and are gone when this program stops, ends or is killed:
    whoever waits for one of them is told UNAVAILABLE, and the server and its other models go on. A name
    that another attached program has bound is taken over from it; it cannot be one of the server's own.

    ``serve()`` raises ``AttachError`` when the server ends. ``stop()`` lets the models go; after it,
    ``run()`` attaches again, with the models.

    Args:
        url: one of the server's ports: "localhost:8000", "http://localhost:8000", "grpc://localhost:8001".
        timeout_s: how long ``run()`` waits for the server to come up, in seconds.

    Raises:
        AttachError: the url is wrong, or names another machine.
    """

    #: A name is taken over as a whole from another program.
    _one_version = True

    def __init__(self, url: str, *, timeout_s: float = ATTACH_TIMEOUT_S) -> None:
        super().__init__()
        self._port = port_of(url)
        self._timeout_s = timeout_s

    def is_connected(self) -> bool:
        """Whether the server knows this program."""
        runner = self._runner
        return self.is_alive() and isinstance(runner, Attachment) and runner.is_connected

    def _new_runner(self, models: Sequence[ModelSpec]) -> Runner:
        return Attachment(self._port, models, self._timeout_s, self._forget)
