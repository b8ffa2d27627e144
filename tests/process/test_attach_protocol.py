"""A peer of the attach socket that does not keep to its protocol: it is let go, and disturbs nobody."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from bound import FLOATS_IN_AND_OUT, ask, free_server, status

from gpuserve import Server
from gpuserve.api.server import AttachedServer
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.control import attach_protocol as messages_of
from gpuserve.supervisor.control.attach_protocol import attach_name
from gpuserve_worker.protocol import wire

TIMEOUT_S = 30.0


def double(requests: Any) -> Any:
    return [{"OUTPUT_1": 2 * one["INPUT_1"]} for one in requests]


def attach(server: Server) -> AttachedServer:
    return Server.attach(server.addresses["http"], timeout_s=5.0)


def connected(server: Server) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(TIMEOUT_S)
    port = int(server.addresses["http"].rpartition(":")[2])
    sock.connect(attach_name(os.geteuid(), port))
    return sock


def said(sock: socket.socket, *messages: Any, fds: Any = ()) -> None:
    for message in messages:
        data = message if isinstance(message, bytes) else messages_of.ATTACH.encode(message)
        socket.send_fds(sock, [data], list(fds))


HELLO = messages_of.Hello(messages_of.PROTOCOL, wire.PROTOCOL)


def spec(**fields: Any) -> dict[str, Any]:
    plain = ModelSpec("bad", (), (), 0, (InstanceSpec("0", "cpu", {}),)).to_wire()
    return {**plain, **fields}


BAD = {
    "no msgpack": [b"\xc1\xc1garbage"],
    "a spilled message without its memory": [b"\xc1"],
    "another tag": [HELLO, b"\x91\x63"],
    "no Hello first": [messages_of.BindModel({})],
    "Hello twice": [HELLO, HELLO],
    "what only a server says": [HELLO, messages_of.Bound("own")],
    "no model": [HELLO, messages_of.BindModel({"name": "bad"})],
    "another type": [HELLO, messages_of.BindModel(spec(max_batch_size="many"))],
    "below zero": [HELLO, messages_of.BindModel(spec(prefetch=-1))],
    "a bad name": [HELLO, messages_of.BindModel(spec(name="../etc"))],
    "no datatype": [HELLO, messages_of.BindModel(spec(inputs=(("x", "FP31", (-1,), False),)))],
    "no instances": [HELLO, messages_of.BindModel(spec(instances=()))],
    "bound twice": [HELLO, *[messages_of.BindModel(spec())] * 2],
    "a model it does not have": [HELLO, messages_of.UnbindModel("own")],
    "an instance it does not have": [
        HELLO,
        messages_of.BindModel(spec()),
        messages_of.WorkerUp("bad", "1", 1, 1),
    ],
    "no slots": [
        HELLO,
        messages_of.BindModel(spec()),
        messages_of.WorkerUp("bad", "0", 1, 0),
    ],
    "no descriptors": [
        HELLO,
        messages_of.BindModel(spec()),
        messages_of.WorkerUp("bad", "0", 1, 1),
    ],
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", BAD)
def test_a_wrong_word_ends_that_attachment_and_nothing_else(
    bare_server: Server, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with attach(bare_server) as attached, connected(bare_server) as sock:
        attached.bind("m", double, **FLOATS_IN_AND_OUT)
        said(sock, *BAD[what])
        while sock.recv(1 << 16):  # whatever it answers, it ends
            pass
        assert f"closed the attachment of process {os.getpid()}: it broke the protocol: " in caplog.text
        assert attached.is_alive()
        assert ask(bare_server, "m", 1.0) == [2.0]


def test_descriptors_that_are_no_worker(bare_server: Server, tmp_path: Path) -> None:
    with connected(bare_server) as sock, open(tmp_path / "file", "w") as file:
        said(sock, HELLO, messages_of.BindModel(spec()))
        up = messages_of.WorkerUp("bad", "0", os.getpid(), 1)
        said(sock, up, fds=[sock.fileno(), file.fileno()])
        while sock.recv(1 << 16):
            pass
    assert status(bare_server, "/v2/health/ready") == 200
    assert status(bare_server, "/v2/models/bad/ready") != 200


def test_another_version_is_told(bare_server: Server) -> None:
    with connected(bare_server) as sock:
        said(sock, messages_of.Hello(999, wire.PROTOCOL))
        ended = messages_of.ATTACH.decode(sock.recv(1 << 16))
        assert ended == messages_of.Ended("both need the same version of gpuserve")
        assert sock.recv(1 << 16) == b""


def test_who_says_nothing_disturbs_nobody() -> None:
    with free_server() as server:
        server.run()
        with connected(server), connected(server) as sock:
            said(sock, HELLO)
            with attach(server) as attached:
                attached.bind("m", double, **FLOATS_IN_AND_OUT)
                assert ask(server, "m", 1.0) == [2.0]
            server.stop()  # they do not keep it either
        assert not attached.is_alive()
