"""What carries the endpoint: a server on the listeners of the supervisor."""

from __future__ import annotations

from typing import Protocol


class Transport(Protocol):
    """A server of the endpoint."""

    async def start(self) -> None:
        """Accept connections; returns once it does."""

    async def stop(self) -> None:
        """Accept no more, and close the connections."""

    async def renew(self) -> None:
        """Use the files of TLS anew, for connections from now on.

        Raises:
            OSError, ValueError: they cannot be used; those in use stay.
        """
