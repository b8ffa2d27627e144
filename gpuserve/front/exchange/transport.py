"""What carries the endpoint: a server on the listeners of the supervisor."""

from __future__ import annotations

import abc


class Transport(abc.ABC):
    """A server of the endpoint. What one cannot do, or need not, is as it is here."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Accept connections; returns once it does."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """Accept no more, and close the connections."""

    def announce(self) -> None:  # noqa: B027
        """Have clients told to send no more requests, each once; those before they have heard are served."""

    @property
    def n_unaware(self) -> int:
        """How many connections were told whose clients may not have heard of it."""
        return 0

    @property
    def n_held(self) -> int:
        """How many requests there are on connections whose clients were told; who watches health has none."""
        return 0

    def limit_age(self, max_age_s: float) -> None:  # noqa: B027
        """Connections that are made from now on take requests for so long; 0 is for ever."""

    async def renew(self) -> None:  # noqa: B027
        """Use the files of TLS anew for new connections; OSError, ValueError: they are of no use."""
