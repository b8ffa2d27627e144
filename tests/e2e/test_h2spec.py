"""What h2spec asks of a server, by its cases; what this server does otherwise is in docs/compatibility.md."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_file import models, served
from h2spec_cases import CASES, END, GREETING, MODEL, UNGREETED, Case, Expected, acknowledged, greeted
from http2_peer import Frame
from serving import REPOSITORY, Addresses

from gpuserve.cli.bench.http2_client import FrameReader

PAGE = (Path(REPOSITORY) / "docs" / "compatibility.md").read_text()
#: The first column of the page's table.
DEVIATIONS = set(re.findall(r"^\| `((?:generic|http2|hpack)/[\d.]+/\d+)` \|", PAGE, re.MULTILINE))
TIMEOUT_S = 20.0
#: For what is not expected to come.
SHORT_S = 0.3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    entries = [one for one in models() if one["name"] == MODEL]
    with served(tmp_path_factory.mktemp("h2spec"), entries, transport="native") as addresses:
        yield addresses


class Conversation:
    """One connection, frame by frame."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._reader = FrameReader()
        self._frames = self._read()

    def has(self, expected: Expected) -> bool:
        """Whether it comes, sooner or later."""
        return any(map(expected, self._frames))

    def _read(self) -> Iterator[Frame]:
        try:
            while received := self.socket.recv(1 << 18):
                # A server that speaks HTTP/1 to who does not greet sends no frames.
                yield from map(
                    Frame._make, () if received.startswith(b"HTTP/") else self._reader.read(received)
                )
            yield END
        except TimeoutError:
            return
        except ConnectionResetError:
            yield END


def keeps(case: Case, address: str) -> bool:
    """Whether the server does what the case expects."""
    talk = Conversation(address)
    with talk.socket:
        if case.name not in UNGREETED:
            talk.socket.sendall(GREETING)
            if case.expected is greeted:
                return talk.has(greeted)
            assert talk.has(acknowledged)
        for step in case.steps:
            if isinstance(step, bytes):
                talk.socket.sendall(step)
            else:
                assert talk.has(step)
        talk.socket.settimeout(SHORT_S if case.name in DEVIATIONS else TIMEOUT_S)
        return talk.has(case.expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}: {case.what}")
def test_a_case_of_h2spec(server: Addresses, case: Case) -> None:
    assert keeps(case, server.http) is (case.name not in DEVIATIONS)


def test_every_case_is_there_once() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) == 146
    assert set(names) >= DEVIATIONS
