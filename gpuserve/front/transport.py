"""What carries the endpoint: a server on the listeners of the supervisor."""

from __future__ import annotations

from typing import Protocol


class Transport(Protocol):
    """A server of the endpoint."""

    async def start(self) -> None:
        """Accept connections; returns once it does."""

    async def stop(self) -> None:
        """Accept no more, and close the connections."""

    def announce(self) -> None:
        """Have clients told that their connections take no more requests: those that come before they have
        heard of it are still served. May be called again, for connections made since.
        """

    @property
    def n_unaware(self) -> int:
        """How many connections there are whose clients may not have heard of it."""

    async def renew(self) -> None:
        """Use the files of TLS anew, for connections from now on.

        Raises:
            OSError, ValueError: they cannot be used; those in use stay.
        """
