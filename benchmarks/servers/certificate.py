"""The certificate of the rows with TLS: for this machine alone, signed by itself, made once by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

_SUBJECT = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3650")


class Certificate(NamedTuple):
    """The PEM files of a certificate and its key."""

    path: Path
    key: Path


def certificate(folder: Path) -> Certificate:
    """The certificate in this folder, made where it is not there."""
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    if not made.path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        files = ("-keyout", str(made.key), "-out", str(made.path))
        command = ("openssl", "req", "-x509", *_KEY, *_SUBJECT, *files)
        subprocess.run(command, check=True, capture_output=True)
    return made
