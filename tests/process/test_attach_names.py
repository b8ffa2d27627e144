"""Who may serve which model through a server, how a server is found, and peers that break the protocol."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bound import FLOATS_IN_AND_OUT, Refused, ask, free_server, infer, status
from operated import InBackground
from processes import children, command_line, wait_until
from serving import unlikely_port

from gpuserve import Server
from gpuserve.api.server import AttachedServer
from gpuserve.core.errors import AttachError, BindError, StartupError
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.control import attach_protocol as messages_of
from gpuserve.supervisor.control.attach_protocol import attach_name
from gpuserve_worker.protocol import wire


def times(factor: float) -> Any:
    return lambda requests: [{"OUTPUT_1": factor * one["INPUT_1"]} for one in requests]


def attach(server: Server, role: str = "http") -> AttachedServer:
    return Server.attach(server.addresses[role].removeprefix("http://"), timeout_s=5.0)


@pytest.mark.thorough
def test_a_name_goes_to_who_binds_it_last(bare_server: Server) -> None:
    with attach(bare_server) as first, attach(bare_server, "grpc") as second:
        first.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
        first.bind("other", times(5.0), **FLOATS_IN_AND_OUT)
        assert ask(bare_server, "m", 1.0) == [2.0]
        second.bind("m", times(3.0), **FLOATS_IN_AND_OUT)
        assert ask(bare_server, "m", 1.0) == [3.0]
        wait_until(lambda: len(_workers()) == 2, "the worker of the first is let go")
        first.bind("m", times(4.0), **FLOATS_IN_AND_OUT)  # it may take it back
        assert ask(bare_server, "m", 1.0) == [4.0]
        assert ask(bare_server, "other", 1.0) == [5.0]
        first.stop()
        assert status(bare_server, "/v2/models/m/ready") != 200
        assert second.is_alive()


def _workers() -> list[int]:
    return [pid for pid in children(os.getpid()) if "-m gpuserve_worker " in command_line(pid)]


def test_the_models_of_the_server_itself_are_not_to_be_had(bare_server: Server) -> None:
    bare_server.bind("own", times(2.0), **FLOATS_IN_AND_OUT)
    with attach(bare_server) as attached:
        for name in ("own", "OWN"):
            with pytest.raises(BindError, match=f"'{name}' cannot be served: the server has a model of that"):
                attached.bind(name, times(3.0), **FLOATS_IN_AND_OUT)
        attached.bind("m", times(3.0), **FLOATS_IN_AND_OUT)
        with pytest.raises(BindError, match="same name twice"):
            attached.bind("m", times(3.0), **FLOATS_IN_AND_OUT)
        with pytest.raises(BindError, match="model 'M' is served by an attached program"):
            bare_server.bind("M", times(4.0), **FLOATS_IN_AND_OUT)
        assert (ask(bare_server, "own", 1.0), ask(bare_server, "m", 1.0)) == ([2.0], [3.0])
    bare_server.bind("M", times(4.0), **FLOATS_IN_AND_OUT)
    assert ask(bare_server, "M", 1.0) == [4.0]
    for name in ("own", "M"):
        bare_server.unbind(name)


class Broken:
    def __init__(self) -> None:
        raise RuntimeError("there are no weights")

    def __call__(self, requests: Any) -> Any:
        return requests


def test_a_model_that_cannot_be_loaded_is_not_bound(bare_server: Server) -> None:
    with attach(bare_server) as attached:
        with pytest.raises(
            StartupError, match=r"'m': instance 0 could not be started: .*there are no weights"
        ):
            attached.bind("m", Broken, **FLOATS_IN_AND_OUT)
        with pytest.raises(Refused, match="unknown model"):
            ask(bare_server, "m", 1.0)
        attached.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
        assert ask(bare_server, "m", 1.0) == [2.0]


@pytest.mark.thorough
def test_several_instances_and_threads_and_large_tensors(bare_server: Server) -> None:
    lock = threading.Lock()

    def locked(requests: Any) -> Any:
        with lock:
            return [{"OUTPUT_1": 2 * one["INPUT_1"]} for one in requests]

    with attach(bare_server) as attached:
        attached.bind("process", [times(2.0)] * 2, **FLOATS_IN_AND_OUT)
        attached.bind("thread", locked, **FLOATS_IN_AND_OUT, isolation="thread")
        large = np.arange(1 << 18, dtype=np.float32).reshape(1, -1)
        for name in ("process", "thread"):
            assert (infer(bare_server, name, INPUT_1=large)["OUTPUT_1"] == 2 * large).all()
    assert [one.name for one in threading.enumerate() if one.name.startswith("gpuserve-thread")] == []


def test_models_that_are_bound_before_are_served_with_run(bare_server: Server) -> None:
    attached = AttachedServer(bare_server.addresses["http"])
    attached.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
    assert not attached.is_connected()
    with attached:
        attached.run()
        assert ask(bare_server, "m", 1.0) == [2.0]
        attached.stop()
        with pytest.raises(Refused):
            ask(bare_server, "m", 1.0)
        attached.run()
        assert ask(bare_server, "m", 1.0) == [2.0]


def test_without_a_server_the_error_says_what_to_check() -> None:
    port = unlikely_port()
    with pytest.raises(AttachError, match=rf"no server to attach to at port {port} .* check that it runs"):
        Server.attach(f"localhost:{port}", timeout_s=0.2)


def test_a_server_that_is_not_attachable() -> None:
    with free_server(attachable=False) as server:
        server.run()
        with pytest.raises(AttachError, match="'attachable' is on"):
            Server.attach(server.addresses["http"], timeout_s=0.2)


def test_a_server_that_comes_up_later_is_waited_for() -> None:
    port = unlikely_port()
    waiting = InBackground(Server.attach, f"localhost:{port}")
    with free_server(http_port=port) as server:
        server.run()
        with waiting.result() as attached:
            assert attached.addresses == server.addresses


@pytest.mark.thorough
def test_two_servers_on_one_machine(bare_server: Server) -> None:
    with free_server() as other:
        other.run()
        with attach(bare_server) as here, attach(other) as there:
            here.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
            there.bind("m", times(3.0), **FLOATS_IN_AND_OUT)
            assert (ask(bare_server, "m", 1.0), ask(other, "m", 1.0)) == ([2.0], [3.0])
        assert here.addresses == {}


def test_a_name_that_is_taken_is_a_warning_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    port = unlikely_port()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(attach_name(os.geteuid(), port))
        with free_server(http_port=port) as server:
            server.run()
            assert f"programs cannot attach by port {port}: Address already in use" in caplog.text
            with attach(server, "grpc") as attached:
                attached.bind("m", times(2.0), **FLOATS_IN_AND_OUT)
                assert ask(server, "m", 1.0) == [2.0]


# ---- peers that do not keep to the protocol ------------------------------------------------------


TIMEOUT_S = 30.0


def double(requests: Any) -> Any:
    return [{"OUTPUT_1": 2 * one["INPUT_1"]} for one in requests]


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
