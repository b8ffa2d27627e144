"""The files of TLS are looked at before anything starts, and again when they are replaced."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from pathlib import Path

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
    subprocess.run(
        ["openssl", "ec", "-in", "good.key", "-aes256", "-passout", "pass:p", "-out", "locked.key"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    subprocess.run(["openssl", "genrsa", "-out", "rsa.key"], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("authority", ["", "ca.pem"])
def test_files_that_fit(folder: Path, authority: str) -> None:
    client_ca = str(folder / authority) if authority else ""
    files = TlsFiles(str(folder / "good.pem"), str(folder / "good.key"), client_ca)
    check_files(files)
    assert len(files.fingerprint()) == (3 if authority else 2)


@pytest.mark.parametrize(
    ("names", "key", "text"),
    [
        (("none", "good.key"), "tls_certfile", "'{}/none' cannot be read: no such file or directory"),
        (("good.pem", "none"), "tls_keyfile", "'{}/none' cannot be read: no such file or directory"),
        ((".", "good.key"), "tls_certfile", "'{}' cannot be read: is a directory"),
        (("text", "good.key"), "tls_certfile", "'{}/text' holds no certificate, expected PEM"),
        (("good.key", "good.pem"), "tls_certfile", "'{}/good.key' holds no certificate, expected PEM"),
        (("good.pem", "text"), "tls_keyfile", "'{}/text' holds no private key, expected PEM"),
        (("broken.pem", "good.key"), "tls_certfile", "'{}/broken.pem' holds no certificate that can be read"),
        (("good.pem", "broken.key"), "tls_keyfile", "'{}/broken.key' holds no private key that can be read"),
        (
            ("good.pem", "other.key"),
            "tls_keyfile",
            "the key in '{0}/other.key' is not that of the certificate in '{0}/good.pem'",
        ),
        (
            ("good.pem", "rsa.key"),
            "tls_keyfile",
            "the key in '{0}/rsa.key' is not that of the certificate in '{0}/good.pem'",
        ),
        (("good.pem", "locked.key"), "tls_keyfile", "'{}/locked.key' is encrypted, expected one without"),
        (("old.pem", "old.key"), "tls_certfile", "the certificate in '{}/old.pem' has expired"),
        (("early.pem", "early.key"), "tls_certfile", "the certificate in '{}/early.pem' is not valid yet"),
        (("good.pem", "good.key", "none"), "tls_client_ca", "'{}/none' cannot be read"),
        (("good.pem", "good.key", "text"), "tls_client_ca", "'{}/text' holds no certificate, expected PEM"),
        (
            ("good.pem", "good.key", "broken.pem"),
            "tls_client_ca",
            "'{}/broken.pem' holds no certificate that",
        ),
    ],
)
def test_files_that_do_not(folder: Path, names: tuple[str, ...], key: str, text: str) -> None:
    paths = dict(
        zip(
            ("tls_certfile", "tls_keyfile", "tls_client_ca"),
            (f"{folder}/{one}" for one in names),
            strict=False,
        )
    )
    with pytest.raises(ConfigError) as error:
        Server(**paths)
    assert str(error.value).startswith(f"{key}: ")
    assert text.format(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tls_certfile": "c"}, "tls_certfile and tls_keyfile go together; tls_keyfile is missing"),
        ({"tls_keyfile": "k"}, "tls_certfile and tls_keyfile go together; tls_certfile is missing"),
        ({"tls_client_ca": "a"}, "tls_client_ca needs tls_certfile and tls_keyfile"),
        ({"tls_ports": ("https",)}, "tls_ports must be a list of any of 'http', 'grpc', 'metrics', got"),
        ({"tls_ports": "http"}, "tls_ports must be a list of any of 'http', 'grpc', 'metrics', got 'http'"),
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


@pytest.mark.parametrize(
    ("name", "until"), [("good", _GOOD_UNTIL), ("early", _GOOD_UNTIL), ("old", _OLD_UNTIL)]
)
def test_when_a_certificate_expires(folder: Path, name: str, until: float) -> None:
    """Also of one that is not valid now: a server goes on with the one it has."""
    assert certificate_expiry(TlsFiles(f"{folder}/{name}.pem", f"{folder}/{name}.key")) == until


# ---- renewal ------------------------------------------------------------------------------------


def looked(files: TlsFiles, *changes: Pair | None) -> list[int]:
    """How often it had been renewed after each look, with a change before it where there is one."""
    renewals: list[int] = []
    counts: list[int] = []

    async def renew() -> None:
        renewals.append(1)

    async def main() -> None:
        rest = list(changes)
        mine = Pair(Path(files.certfile), Path(files.keyfile))

        async def sleep(_: float) -> None:
            counts.append(len(renewals))
            if not rest:
                raise asyncio.CancelledError
            if (change := rest.pop(0)) is not None:
                change.copy_to(mine)

        await CertificateWatch(files, renew, sleep).run()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    return counts[1:]


def test_a_certificate_is_renewed_once_when_its_files_are_replaced(folder: Path, tmp_path: Path) -> None:
    good, other = (Pair(folder / f"{one}.pem", folder / f"{one}.key") for one in ("good", "other"))
    mine = Pair(tmp_path / "c.pem", tmp_path / "k.pem")
    good.copy_to(mine)
    files = TlsFiles(*map(str, mine))
    assert looked(files, None, other, None, None, good) == [0, 1, 1, 1, 2]


def test_files_that_do_not_fit_are_told_once_and_not_used(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = Pair(folder / "good.pem", folder / "good.key")
    half = Pair(folder / "other.pem", folder / "good.key")
    mine = Pair(tmp_path / "c.pem", tmp_path / "k.pem")
    good.copy_to(mine)
    with caplog.at_level(logging.WARNING):
        assert looked(TlsFiles(*map(str, mine)), half, None, good) == [0, 0, 1]
    assert [record.message.partition(":")[0] for record in caplog.records] == ["rejected renewed TLS files"]


def test_the_expiry_is_that_of_the_certificate_in_use(folder: Path, tmp_path: Path) -> None:
    good, old = (Pair(folder / f"{one}.pem", folder / f"{one}.key") for one in ("good", "old"))
    mine = Pair(tmp_path / "c.pem", tmp_path / "k.pem")
    old.copy_to(mine)
    files, told = TlsFiles(*map(str, mine)), []

    async def renew() -> None:
        """Nothing has to be told."""

    async def main() -> None:
        changes = [None, good, Pair(folder / "other.pem", folder / "good.key")]

        async def sleep(_: float) -> None:
            told.append([one.samples for one in watch.families(lambda: _OLD_UNTIL - 60)])
            if not changes:
                raise asyncio.CancelledError
            if (change := changes.pop(0)) is not None:
                change.copy_to(mine)

        watch = CertificateWatch(files, renew, sleep)
        assert not list(watch.families())
        await watch.run()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    name = "gpuserve_certificate_expiry_seconds"
    left = _GOOD_UNTIL - _OLD_UNTIL + 60
    assert told == [[[f"{name} {one}"]] for one in (60.0, 60.0, left, left)]
