"""Certificates made for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple


def make_certificate(folder: Path) -> Path:
    """A file with a key and a certificate of its own for localhost."""
    key, certificate, both = folder / "key.pem", folder / "certificate.pem", folder / "both.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    both.write_text(key.read_text() + certificate.read_text())
    return both


class Pair(NamedTuple):
    """The PEM files of a certificate and its key."""

    certificate: Path
    key: Path

    def copy_to(self, other: Pair) -> None:
        """Replace the other's files by these, as those who renew certificates do."""
        for ours, theirs in zip(self, other, strict=True):
            fresh = theirs.with_suffix(".new")
            fresh.write_bytes(ours.read_bytes())
            fresh.rename(theirs)


class Authority:
    """Issues certificates for localhost, by ``openssl ca`` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "index.txt").touch()
        (folder / "ca.cnf").write_text(_AUTHORITY)
        self._openssl(
            "req", "-x509", *_NEW_KEY, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem"
        )
        self.certificate = folder / "ca.pem"

    def issue(self, name: str, *, since: str = "20200101000000Z", until: str = "20990101000000Z") -> Pair:
        """A certificate, valid from ``since`` to ``until``."""
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        request = ("-addext", names, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        self._openssl("req", "-new", *_NEW_KEY, *request)
        issued = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-startdate", since, "-enddate", until)
        self._openssl("ca", "-batch", "-notext", "-config", "ca.cnf", *issued)
        return Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=self._folder)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_AUTHORITY = """
[ca]
default_ca = here
[here]
database = index.txt
new_certs_dir = .
certificate = ca.pem
private_key = ca.key
default_md = sha256
rand_serial = yes
unique_subject = no
copy_extensions = copy
policy = any
[any]
commonName = supplied
"""
