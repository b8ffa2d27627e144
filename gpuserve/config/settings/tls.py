"""The TLS files of a server, and the check that a server can use them. No text contains part of a key."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import ConfigError

if TYPE_CHECKING:
    import ssl


FILE_KEYS: Final = ("tls_certfile", "tls_keyfile", "tls_client_ca")
ONE_WITHOUT_THE_OTHER: Final = "tls_certfile and tls_keyfile go together; {} is missing"
CA_WITHOUT_TLS: Final = "tls_client_ca needs tls_certfile and tls_keyfile: without them there is no TLS"
#: OpenSSL's reasons for a key that does not belong to the certificate.
_MISMATCHES: Final = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
#: OpenSSL's flag of a verification that ignores the time; ``ssl`` has no name for the flag.
_AT_ANY_TIME: Final = 0x200000
TlsFingerprint = tuple[tuple[int, int, int], ...]


class TlsFileError(ConfigError):
    """A TLS file that cannot be used. ``key`` is the setting that names the file; the text does not."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the certificate chain, its key, and the authorities of client certificates ("" for none)."""

    certfile: str
    keyfile: str
    client_ca: str = ""

    def fingerprint(self) -> TlsFingerprint:
        """Return a fingerprint that changes when a file is replaced; raise OSError if a file is missing."""
        found = [os.stat(path) for path in (self.certfile, self.keyfile, self.client_ca) if path]
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)


def tls_files(settings: ServerSettings) -> TlsFiles | None:
    """Return the TLS files of valid settings, or None if TLS is off."""
    if settings.tls_certfile is None or settings.tls_keyfile is None:
        return None
    return TlsFiles(settings.tls_certfile, settings.tls_keyfile, settings.tls_client_ca or "")


def with_absolute_paths(settings: ServerSettings, folder_of: Callable[[str], str]) -> ServerSettings:
    """Return the settings with absolute paths. ``folder_of``: the base of a relative path, by setting."""
    whole: dict[str, Any] = {}
    for key in FILE_KEYS:
        path = getattr(settings, key)
        if path is not None:
            whole[key] = os.path.abspath(os.path.join(folder_of(key), path))
    return dataclasses.replace(settings, **whole)


def tls_pairing_problem(certfile: object, keyfile: object, client_ca: object) -> tuple[str, str] | None:
    """Return the setting that another TLS setting lacks or needs, and a sentence; None if all is well."""
    if certfile is None and keyfile is None:
        return None if client_ca is None else ("tls_client_ca", CA_WITHOUT_TLS)
    if keyfile is None:
        return "tls_certfile", ONE_WITHOUT_THE_OTHER.format("tls_keyfile")
    if certfile is None:
        return "tls_keyfile", ONE_WITHOUT_THE_OTHER.format("tls_certfile")
    return None


def check_tls(settings: ServerSettings) -> None:
    """Raise ConfigError unless TLS is off, or the files can be used."""
    try:
        if files := tls_files(settings):
            check_files(files)
    except TlsFileError as error:
        raise ConfigError(f"{error.key}: {error}") from None


def check_files(files: TlsFiles) -> None:
    """Raise TlsFileError unless a server can use the files now."""
    context = _server_context(files)
    if files.client_ca:
        _load_certificates(files.client_ca, "tls_client_ca")
    _shake_hands(files.certfile, context)


def certificate_expiry(files: TlsFiles) -> float:
    """Return when the certificate expires or expired, in seconds since 1970, or raise TlsFileError."""
    import ssl

    certificate = _shake_hands(files.certfile, _server_context(files), _AT_ANY_TIME).getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    import ssl

    _check_file(files.certfile, "tls_certfile", "certificate")
    _check_file(files.keyfile, "tls_keyfile", "private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def refuse_passphrase() -> NoReturn:
        # Called only for an encrypted key; without a callback OpenSSL asks a terminal.
        text = f"the key in {files.keyfile!r} is encrypted, expected one without a passphrase"
        raise TlsFileError("tls_keyfile", text)

    try:
        context.load_cert_chain(files.certfile, files.keyfile, refuse_passphrase)
    except ssl.SSLError as error:
        text = f"the key in {files.keyfile!r} is not that of the certificate in {files.certfile!r}"
        if error.reason not in _MISMATCHES:
            _load_certificates(
                files.certfile, "tls_certfile"
            )  # OpenSSL does not say which file it cannot read
            text = f"{files.keyfile!r} holds no private key that can be read, expected PEM"
        raise TlsFileError("tls_keyfile", text) from None
    return context


def _load_certificates(path: str, key: str) -> None:
    import ssl

    _check_file(path, key, "certificate")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        raise TlsFileError(key, f"{path!r} holds no certificate that can be read, expected PEM") from None


def _shake_hands(certfile: str, server_side: ssl.SSLContext, flags: int = 0) -> ssl.SSLObject:
    """Connect a client in memory that trusts only this certificate, which finds errors in the certificate."""
    import ssl

    client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_side.check_hostname = False
    client_side.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | flags
    client_side.load_verify_locations(certfile)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    client = client_side.wrap_bio(to_client, to_server)
    try:
        for side in (client, server) * 2:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError as error:
        when = {_EXPIRED: "has expired", _NOT_YET_VALID: "is not valid yet"}.get(error.verify_code)
        text = when or f"cannot be that of a server: {error.verify_message}"
        raise TlsFileError("tls_certfile", f"the certificate in {certfile!r} {text}") from None
    except ssl.SSLError as error:
        text = f"no TLS connection can be made with the certificate in {certfile!r}: {error.reason}"
        raise TlsFileError("tls_certfile", text) from None
    return client


def _check_file(path: str, key: str, what: str) -> None:
    try:
        with open(path, "rb") as file:
            found = f"{what.upper()}-----".encode() in file.read()
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise TlsFileError(key, f"{path!r} cannot be read: {reason}") from None
    if not found:
        raise TlsFileError(key, f"{path!r} holds no {what}, expected PEM")
