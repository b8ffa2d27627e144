"""The files of TLS: which they are, and whether a server can use them. Nothing of a key is in any text.
``ssl`` is imported where it is needed: most servers have no TLS.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from gpuserve.errors import ConfigError
from gpuserve.settings.server import ServerSettings

if TYPE_CHECKING:
    import ssl

FILE_KEYS: Final = ("tls_certfile", "tls_keyfile", "tls_client_ca")
ONE_WITHOUT_THE_OTHER: Final = "tls_certfile and tls_keyfile go together; {} is missing"
CA_WITHOUT_TLS: Final = "tls_client_ca needs tls_certfile and tls_keyfile: without them there is no TLS"
#: What OpenSSL says of a key that is another's; the last one where even its kind is another.
_MISMATCHES: Final = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
#: OpenSSL's flag of a verification that does not look at the time; ``ssl`` has no name for it.
_AT_ANY_TIME: Final = 0x200000
#: What of a file tells that it has been replaced.
Stamp = tuple[tuple[int, int, int], ...]


class TlsFileError(ConfigError):
    """A file cannot be used. ``key`` is the setting that names it; the text does not."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the certificate chain, its key, and the authorities of client certificates ("" for none)."""

    certfile: str
    keyfile: str
    client_ca: str = ""

    def stamp(self) -> Stamp:
        """Something that changes when a file is replaced. Raises OSError: a file is not there."""
        found = [os.stat(path) for path in (self.certfile, self.keyfile, self.client_ca) if path]
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)


def tls_files(settings: ServerSettings) -> TlsFiles | None:
    """The files of settings that hold together; None where TLS is off."""
    if settings.tls_certfile is None or settings.tls_keyfile is None:
        return None
    return TlsFiles(settings.tls_certfile, settings.tls_keyfile, settings.tls_client_ca or "")


def with_whole_paths(settings: ServerSettings, folder_of: Callable[[str], str]) -> ServerSettings:
    """The settings with whole paths. ``folder_of`` says, by the setting, where a relative one begins."""
    whole: dict[str, Any] = {}
    for key in FILE_KEYS:
        path = getattr(settings, key)
        if path is not None:
            whole[key] = os.path.abspath(os.path.join(folder_of(key), path))
    return dataclasses.replace(settings, **whole)


def pairing_problem(certfile: object, keyfile: object, client_ca: object) -> tuple[str, str] | None:
    """What is wrong between the settings of TLS: which of them, and a sentence; None where nothing is."""
    if certfile is None and keyfile is None:
        return None if client_ca is None else ("tls_client_ca", CA_WITHOUT_TLS)
    if keyfile is None:
        return "tls_certfile", ONE_WITHOUT_THE_OTHER.format("tls_keyfile")
    if certfile is None:
        return "tls_keyfile", ONE_WITHOUT_THE_OTHER.format("tls_certfile")
    return None


def check_tls(settings: ServerSettings) -> None:
    """Raise ConfigError unless TLS is off, or can be served as the settings say: settings that do not go
    together, or a file that cannot be used.
    """
    problem = pairing_problem(settings.tls_certfile, settings.tls_keyfile, settings.tls_client_ca)
    if problem is not None:
        raise ConfigError(problem[1])
    files = tls_files(settings)
    if files is None:
        return
    try:
        check_files(files)
    except TlsFileError as error:
        raise ConfigError(f"{error.key}: {error}") from None


def check_files(files: TlsFiles) -> None:
    """Raise TlsFileError unless a server can use the files now: one is not there, is no PEM, does not fit, or
    is not valid at this time.
    """
    context = _server_context(files)
    if files.client_ca:
        _load_certificates(files.client_ca, "tls_client_ca")
    _shake_hands(files.certfile, context)


def certificate_expiry(files: TlsFiles) -> float:
    """When the certificate expires, or has expired, in seconds since 1970. Raises TlsFileError: a file cannot
    be used, at whatever time.
    """
    import ssl

    certificate = _shake_hands(files.certfile, _server_context(files), _AT_ANY_TIME).getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    import ssl

    _read(files.certfile, "tls_certfile", b"CERTIFICATE-----", "a certificate")
    _read(files.keyfile, "tls_keyfile", b"PRIVATE KEY-----", "a private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def refuse_passphrase() -> NoReturn:  # asked for only by an encrypted key; else OpenSSL asks a terminal
        raise TlsFileError(
            "tls_keyfile", f"the key in {files.keyfile!r} is encrypted, expected one without a passphrase"
        )

    try:
        context.load_cert_chain(files.certfile, files.keyfile, refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason in _MISMATCHES:
            text = f"the key in {files.keyfile!r} is not that of the certificate in {files.certfile!r}"
            raise TlsFileError("tls_keyfile", text) from None
        raise TlsFileError(*_unreadable(files)) from None
    return context


def _unreadable(files: TlsFiles) -> tuple[str, str]:
    """Which of the two files OpenSSL cannot read, and a sentence; it says only that it is one of them."""
    try:
        _load_certificates(files.certfile, "tls_certfile")
    except TlsFileError as error:
        return error.key, str(error)
    return "tls_keyfile", f"{files.keyfile!r} holds no private key that can be read, expected PEM"


def _load_certificates(path: str, key: str) -> None:
    import ssl

    _read(path, key, b"CERTIFICATE-----", "a certificate")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        raise TlsFileError(key, f"{path!r} holds no certificate that can be read, expected PEM") from None


def _shake_hands(certfile: str, server_side: ssl.SSLContext, flags: int = 0) -> ssl.SSLObject:
    """Have a client that trusts just this certificate connect in memory: it says what is wrong with it."""
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


def _read(path: str, key: str, mark: bytes, what: str) -> None:
    try:
        with open(path, "rb") as file:
            found = mark in file.read()
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise TlsFileError(key, f"{path!r} cannot be read: {reason}") from None
    if not found:
        raise TlsFileError(key, f"{path!r} holds no {what.removeprefix('a ')}, expected PEM")
