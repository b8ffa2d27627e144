"""The files of TLS are looked at before anything starts, and again when they are replaced."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tls import Authority, Pair

from gpuserve import Server
from gpuserve.config.settings.tls import TlsFiles, certificate_expiry, check_files
from gpuserve.core.errors import ConfigError
from gpuserve.front.process.listeners import CertificateWatch

PEM = "-----BEGIN {0}-----\nAAAA\n-----END {0}-----\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """good, other, old and early, each with a key; rubbish, and an encrypted key."""
    folder = tmp_path_factory.mktemp("tls") / "files"
    authority = Authority(folder)
    for name in ("good", "other"):
        authority.issue(name)
    authority.issue("old", until="20200102000000Z")
    authority.issue("early", since="20980101000000Z")
    (folder / "text").write_text("hello")
    (folder / "broken.pem").write_text(PEM.format("CERTIFICATE"))
    (folder / "broken.key").write_text(PEM.format("PRIVATE KEY"))
    locked = ["ec", "-in", "good.key", "-aes256", "-passout", "pass:p", "-out", "locked.key"]
    for arguments in (locked, ["genrsa", "-out", "rsa.key"]):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("authority", ["", "ca.pem"])
def test_files_that_fit(folder: Path, authority: str) -> None:
    client_ca = str(folder / authority) if authority else ""
    files = TlsFiles(str(folder / "good.pem"), str(folder / "good.key"), client_ca)
    check_files(files)
    assert len(files.fingerprint()) == (3 if authority else 2)


SETTINGS = ("tls_certfile", "tls_keyfile", "tls_client_ca")
NO_FILE = "'{}' cannot be read: no such file or directory"
NOT_OF = "the key in '{}' is not that of the certificate in '{folder}/good.pem'"


@pytest.mark.parametrize(
    ("names", "wrong", "text"),
    [
        ("none good.key", 0, NO_FILE),
        ("good.pem none", 1, NO_FILE),
        (". good.key", 0, "'{folder}' cannot be read: is a directory"),
        ("text good.key", 0, "'{}' holds no certificate, expected PEM"),
        ("good.key good.pem", 0, "'{}' holds no certificate, expected PEM"),
        ("good.pem text", 1, "'{}' holds no private key, expected PEM"),
        ("broken.pem good.key", 0, "'{}' holds no certificate that can be read"),
        ("good.pem broken.key", 1, "'{}' holds no private key that can be read"),
        ("good.pem other.key", 1, NOT_OF),
        ("good.pem rsa.key", 1, NOT_OF),
        ("good.pem locked.key", 1, "'{}' is encrypted, expected one without"),
        ("old.pem old.key", 0, "the certificate in '{}' has expired"),
        ("early.pem early.key", 0, "the certificate in '{}' is not valid yet"),
        ("good.pem good.key none", 2, NO_FILE),
        ("good.pem good.key text", 2, "'{}' holds no certificate, expected PEM"),
        ("good.pem good.key broken.pem", 2, "'{}' holds no certificate that"),
    ],
)
def test_files_that_do_not(folder: Path, names: str, wrong: int, text: str) -> None:
    paths = [f"{folder}/{name}" for name in names.split()]
    with pytest.raises(ConfigError) as error:
        Server(**dict(zip(SETTINGS, paths, strict=False)))
    assert str(error.value).startswith(f"{SETTINGS[wrong]}: ")
    assert text.format(paths[wrong], folder=folder) in str(error.value)
    assert "\n" not in str(error.value)


PORTS = "tls_ports must be a list of any of 'http', 'grpc', 'metrics', got"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tls_certfile": "c"}, "tls_certfile and tls_keyfile go together; tls_keyfile is missing"),
        ({"tls_keyfile": "k"}, "tls_certfile and tls_keyfile go together; tls_certfile is missing"),
        ({"tls_client_ca": "a"}, "tls_client_ca needs tls_certfile and tls_keyfile"),
        ({"tls_ports": ("https",)}, PORTS),
        ({"tls_ports": "http"}, f"{PORTS} 'http'"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Server(**settings)


def test_a_path_begins_at_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=f"'{folder}/none' cannot be read"):
        Server(tls_certfile="none", tls_keyfile="good.key")


#: 2099-01-01 and 2020-01-02, both at midnight: how long certificates are issued for.
_GOOD_UNTIL, _OLD_UNTIL = 4070908800.0, 1577923200.0


def test_a_certificate_is_renewed_once_when_its_files_are_replaced_and_tells_when_it_expires(
    folder: Path, tmp_path: Path
) -> None:
    """Also of one that is not valid now: a server goes on with the one it has."""
    for name, until in {"good": _GOOD_UNTIL, "early": _GOOD_UNTIL, "old": _OLD_UNTIL}.items():
        assert certificate_expiry(TlsFiles(f"{folder}/{name}.pem", f"{folder}/{name}.key")) == until
    watched = Watched(folder, tmp_path)
    good, other = watched.pair("good"), watched.pair("other")
    found = watched.looks(lambda: watched.n_renewed, None, other, None, None, good)
    assert found == [0, 0, 1, 1, 1, 2]


# ---- renewal ------------------------------------------------------------------------------------


class Watched:
    """A server's files, at first copies of ``name``'s, and a watch of them that looks when it is told."""

    def __init__(self, folder: Path, tmp_path: Path, name: str = "good") -> None:
        self._folder = folder
        self._mine = Pair(tmp_path / "c.pem", tmp_path / "k.pem")
        self.pair(name).copy_to(self._mine)
        self.n_renewed = 0
        self.watch = CertificateWatch(TlsFiles(*map(str, self._mine)), self._renew, self._sleep)

    def pair(self, certificate: str, key: str = "") -> Pair:
        return Pair(self._folder / f"{certificate}.pem", self._folder / f"{key or certificate}.key")

    async def _renew(self) -> None:
        self.n_renewed += 1

    async def _sleep(self, _: float) -> None:
        self._looks.append(self._look())
        if not self._changes:
            raise asyncio.CancelledError
        if (change := self._changes.pop(0)) is not None:
            change.copy_to(self._mine)

    def looks(self, look: Callable[[], Any], *changes: Pair | None) -> list[Any]:
        """What ``look`` gives at first and after each look, with a change before it where there is one."""
        self._look, self._changes, self._looks = look, [*changes], list[Any]()
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(self.watch.run())
        return self._looks


def test_files_that_do_not_fit_are_told_once_and_not_used(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(folder, tmp_path)
    half = watched.pair("other", "good")
    with caplog.at_level(logging.WARNING):
        found = watched.looks(lambda: watched.n_renewed, half, None, watched.pair("other"))
    assert found == [0, 0, 0, 1]
    assert [record.message.partition(":")[0] for record in caplog.records] == ["rejected renewed TLS files"]


def test_the_expiry_is_that_of_the_certificate_in_use(folder: Path, tmp_path: Path) -> None:
    watched = Watched(folder, tmp_path, "old")
    assert not list(watched.watch.families())
    changes = [None, watched.pair("good"), watched.pair("other", "good")]
    look = lambda: [one.samples for one in watched.watch.families(lambda: _OLD_UNTIL - 60)]  # noqa: E731
    name = "gpuserve_certificate_expiry_seconds"
    left = _GOOD_UNTIL - _OLD_UNTIL + 60
    assert watched.looks(look, *changes) == [[[f"{name} {one}"]] for one in (60.0, 60.0, left, left)]
