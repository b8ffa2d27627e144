"""The certificates of a grpc.aio server, which can be renewed while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from gpuserve.config.settings.tls import TlsFiles


class GrpcCertificates:
    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._renewed: Any = None

    def credentials(self) -> grpc.ServerCredentials:
        """What the server is made with; OSError: a file cannot be read."""
        return grpc.dynamic_ssl_server_credentials(
            self._read(), self._fetch, require_client_authentication=bool(self._files.client_ca)
        )

    def renew(self) -> None:
        """Read the files again; OSError: a file cannot be read; the old ones stay in use."""
        self._renewed = self._read()

    def _fetch(self) -> Any:
        """The certificates from now on; None: still the same. Called in a thread of grpc."""
        renewed, self._renewed = self._renewed, None
        return renewed

    def _read(self) -> Any:
        files = self._files
        authorities = Path(files.client_ca).read_bytes() if files.client_ca else None
        pair = Path(files.keyfile).read_bytes(), Path(files.certfile).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)
