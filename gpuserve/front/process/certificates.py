"""Certificates that are renewed while the server runs: their files are watched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from gpuserve.config.settings.tls import TlsFiles, TlsFingerprint, certificate_expiry, check_files
from gpuserve.core.errors import ConfigError
from gpuserve.front.observe.triton_metrics import Family, family

logger = logging.getLogger(__name__)

#: How often the files are looked at.
_INTERVAL_S: Final = 2.0


class CertificateWatch:
    """Looks at the files now and then, and calls ``renew`` when there are others that can be used."""

    def __init__(
        self,
        files: TlsFiles,
        renew: Callable[[], Awaitable[None]],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._files = files
        self._renew = renew
        self._sleep = sleep
        self._seen: TlsFingerprint | None = None
        #: Of the certificate in use, in seconds since 1970; None: it could not be read.
        self._expires_at: float | None = None

    def families(self, clock: Callable[[], float] = time.time) -> Iterator[Family]:
        if self._expires_at is not None:
            name, text = "gpuserve_certificate_expiry_seconds", "Until the TLS certificate in use expires."
            yield family(name, "gauge", text, [({}, self._expires_at - clock())])

    async def run(self) -> None:
        self._seen = self._stamp()
        self._expires_at = self._expiry()
        while True:
            await self._sleep(_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Look once. Files that cannot be used are told once, and those in use stay."""
        stamp = self._stamp()
        if stamp is None or stamp == self._seen:
            return
        self._seen = stamp
        try:
            await asyncio.to_thread(check_files, self._files)
            await self._renew()
            self._expires_at = self._expiry()
        except (ConfigError, OSError, ValueError) as error:
            # Files are replaced one after the other; the last of them is looked at again.
            logger.warning("the renewed TLS files are not used: %s", error)
        else:
            logger.info("the renewed TLS certificate is used for new connections")

    def _expiry(self) -> float | None:
        try:
            return certificate_expiry(self._files)
        except ConfigError:  # replaced at this moment; then it is looked at again
            return None

    def _stamp(self) -> TlsFingerprint | None:
        try:
            return self._files.fingerprint()
        except OSError:  # between the old file and the new one
            return None
