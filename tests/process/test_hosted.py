"""``gpuserve.asgi`` driven by ASGI messages, in the event loop of the test: its stages and its ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import operated
import pytest
from operated import Orders
from processes import children, command_line, wait_ended
from tls import Authority

from gpuserve.asgi import CONFIG_VARIABLE, HostedApplication, Stage
from gpuserve.hosting import leave_embedding

TIMEOUT_S = 20.0
READY = "/v2/health/ready"
INFER = "/v2/models/mortal/infer"


class Lifespan:
    """What an ASGI server has to do with the lifespan of an application."""

    def __init__(self, application: HostedApplication) -> None:
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}}
        self.task = asyncio.create_task(application(scope, self._events.get, self._answers.put))

    async def say(self, event: str) -> dict[str, Any]:
        """Send an event; the answer."""
        await self._events.put({"type": f"lifespan.{event}"})
        answer = await asyncio.wait_for(self._answers.get(), TIMEOUT_S)
        assert answer["type"].startswith(f"lifespan.{event}.")
        return answer


async def get(application: HostedApplication, path: str, **scope: Any) -> tuple[int, Any]:
    return await call(application, "GET", path, b"", **scope)


async def infer(application: HostedApplication, value: float) -> tuple[int, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
    body = json.dumps({"inputs": [tensor], "outputs": [{"name": "y"}]}).encode()
    return await call(application, "POST", INFER, body)


async def call(
    application: HostedApplication, method: str, path: str, body: bytes, **more: Any
) -> tuple[int, Any]:
    """One request; its status and its JSON."""
    scope = {"type": "http", "method": method, "path": path, "headers": [], "http_version": "1.1", **more}
    received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    received.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await asyncio.wait_for(application(scope, received.get, send), TIMEOUT_S)
    assert all(type(one["body"]) is bytes for one in sent[1:])
    return sent[0]["status"], json.loads(b"".join(one["body"] for one in sent[1:]))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0)


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orders:
    """The orders of the model "mortal", which the config of the application names."""
    orders = Orders(tmp_path / "orders")
    config = operated.config(tmp_path, operated.model("mortal", orders, "load_slowly"))
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    return orders


def workers() -> list[int]:
    return [pid for pid in children(os.getpid()) if "-m gpuserve_worker " in command_line(pid)]


def test_the_import_does_nothing() -> None:
    program = (
        "import sys, threading, gpuserve.asgi\n"
        "print(gpuserve.asgi.app.stage.name, threading.active_count(), 'gpuserve.hosting' in sys.modules)"
    )
    environ = {**os.environ, CONFIG_VARIABLE: "/does/not/exist.yaml"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["NEW", "1", "False"]


@pytest.mark.parametrize("is_on", [False, True])
def test_the_admin_api_by_the_host_s_word_for_its_clients(
    orders: Orders, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: dict[str, Any] = {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
    monkeypatch.setenv("GPUSERVE_SERVER__ADMIN_API", str(is_on).lower())

    async def life(application: HostedApplication) -> None:
        lifespan = Lifespan(application)
        await lifespan.say("startup")
        statuses = [
            (await get(application, "/v2/admin/status", **client))[0]
            for client in (here, {**here, "client": ("10.0.0.1", 1)}, {"client": None})
        ]
        assert statuses == ([200, 403, 403] if is_on else [404] * 3)
        if is_on:
            _, told = await get(application, "/v2/admin/status", **here)
            assert [one["name"] for one in told["models"]] == ["mortal"]
            before = workers()
            assert (await call(application, "POST", "/v2/admin/models/mortal/reload", b"", **here))[0] == 200
            assert (await infer(application, 3.0))[0] == 200
            await until(lambda: _is_ended(before))
            assert (await call(application, "POST", "/v2/admin/drain", b"", **here))[0] == 200
            assert await get(application, READY) == (400, {"ready": False})
            assert (await infer(application, 3.0))[0] == 200
        await lifespan.say("shutdown")

    asyncio.run(life(HostedApplication()))


async def _is_ended(pids: list[int]) -> bool:
    return not set(pids) & set(workers())


def test_a_lifespan_starts_and_ends_it_and_may_do_so_again(orders: Orders) -> None:
    async def life(application: HostedApplication) -> None:
        lifespan = Lifespan(application)
        assert (await lifespan.say("startup"))["type"] == "lifespan.startup.complete"
        assert await get(application, READY) == (200, {"ready": True})
        status, answer = await infer(application, 3.0)
        assert (status, answer["outputs"][0]["data"]) == (200, [6.0])
        family = workers()
        assert len(family) == 1
        assert (await lifespan.say("shutdown"))["type"] == "lifespan.shutdown.complete"
        await asyncio.wait_for(lifespan.task, TIMEOUT_S)
        assert wait_ended(family, 0.0) == []
        assert await get(application, READY) == (503, {"error": "the server has been stopped"})

    application = HostedApplication()
    asyncio.run(life(application))
    asyncio.run(life(application))


def test_its_config_is_read_again_by_the_admin_api(orders: Orders, tmp_path: Path) -> None:
    def write(*names: str, **settings: Any) -> None:
        models = [operated.model(name, orders, "load_slowly") for name in names]
        operated.config(tmp_path, *models, admin_api=True, **settings)

    async def run() -> None:
        write("mortal")
        application = HostedApplication()
        lifespan = Lifespan(application)
        await lifespan.say("startup")
        write("mortal", "other", http_port=9000, lame_duck_s=9)  # which are for the host to say
        path, local = "/v2/admin/reload", ("127.0.0.1", 1)
        status, answer = await call(application, "POST", path, b"", client=local)
        assert (status, answer["loaded"], answer["settings"], answer["refused"]) == (200, ["other"], [], [])
        assert (await infer(application, 3.0))[0] == 200
        await lifespan.say("shutdown")
        await asyncio.wait_for(lifespan.task, TIMEOUT_S)

    asyncio.run(run())


def test_what_is_queued_at_the_end_is_finished(orders: Orders) -> None:
    async def run() -> None:
        application = HostedApplication()
        lifespan = Lifespan(application)
        await lifespan.say("startup")
        orders.shut()
        running = asyncio.create_task(infer(application, 1.0))
        await until(lambda: _called(orders))
        ending = asyncio.create_task(lifespan.say("shutdown"))
        await until(lambda: _is_in(application, Stage.ENDED))
        assert (await infer(application, 2.0))[0] == 503
        orders.open()
        status, answer = await running
        assert (status, answer["outputs"][0]["data"]) == (200, [2.0])
        assert (await ending)["type"] == "lifespan.shutdown.complete"

    asyncio.run(run())


async def _called(orders: Orders) -> bool:
    return bool(orders.calls())


async def _is_in(application: HostedApplication, stage: Stage) -> bool:
    return application.stage is stage


def test_a_first_request_that_gives_up_does_not_end_the_start(orders: Orders) -> None:
    async def run() -> None:
        application = HostedApplication()
        orders.shut()
        first = asyncio.create_task(infer(application, 1.0))
        await until(lambda: _is_in(application, Stage.STARTING))
        second = asyncio.create_task(infer(application, 2.0))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        orders.open()
        status, answer = await second
        assert (status, answer["outputs"][0]["data"]) == (200, [4.0])
        await application.stop()

    asyncio.run(run())


def test_a_start_that_its_server_gives_up_leaves_nothing(orders: Orders) -> None:
    async def run() -> None:
        application = HostedApplication()
        orders.shut()
        lifespan = Lifespan(application)
        startup = asyncio.create_task(lifespan.say("startup"))
        await until(lambda: _is_loading(orders))
        family = workers()
        lifespan.task.cancel()
        startup.cancel()
        await asyncio.gather(lifespan.task, startup, return_exceptions=True)
        assert wait_ended(family, TIMEOUT_S) == []
        assert await get(application, READY) == (503, {"error": "the server could not be started"})

    asyncio.run(run())


async def _is_loading(orders: Orders) -> bool:
    return (orders.directory / "loading").exists()


@pytest.mark.parametrize("config", ["", "no/such/place.yaml"])
def test_a_start_that_fails_says_why_to_the_operator_alone(
    config: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, config)

    async def run() -> None:
        application = HostedApplication()
        for _ in range(2):
            assert await get(application, READY) == (503, {"error": "the server could not be started"})
        failed = await Lifespan(application).say("startup")
        assert failed["type"] == "lifespan.startup.failed"
        assert (config or f"{CONFIG_VARIABLE} is not set") in failed["message"]

    asyncio.run(run())
    assert (config or CONFIG_VARIABLE) in caplog.text
    assert "never retrieved" not in caplog.text


def test_a_device_that_is_not_there_is_told_at_the_start(
    tmp_path: Path, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = operated.config(tmp_path, operated.model("mortal", orders, instances=[{"device": "cuda:99"}]))
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))

    async def run() -> None:
        failed = await Lifespan(HostedApplication()).say("startup")
        assert "this machine has no device 'cuda:99'" in failed["message"]

    asyncio.run(run())


def test_tls_is_for_the_server_of_the_host(
    orders: Orders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair = Authority(tmp_path / "authority").issue("server")
    monkeypatch.setenv("GPUSERVE_SERVER__TLS_CERTFILE", str(pair.certificate))
    monkeypatch.setenv("GPUSERVE_SERVER__TLS_KEYFILE", str(pair.key))

    async def main() -> None:
        failed = await Lifespan(HostedApplication()).say("startup")
        assert failed["type"] == "lifespan.startup.failed"
        assert "tls_certfile does nothing here: TLS is for the ASGI server" in failed["message"]

    asyncio.run(main())


def test_another_event_loop_is_refused(orders: Orders) -> None:
    async def run() -> None:
        application = HostedApplication()
        lifespan = Lifespan(application)
        await lifespan.say("startup")
        status, answer = await asyncio.to_thread(lambda: asyncio.run(get(application, READY)))
        assert status == 503
        assert "one worker thread" in answer["error"]
        assert (await get(application, READY))[0] == 200
        await lifespan.say("shutdown")

    asyncio.run(run())


def test_a_mount_is_no_part_of_the_path(orders: Orders) -> None:
    async def run() -> None:
        application = HostedApplication()
        lifespan = Lifespan(application)
        await lifespan.say("startup")
        mounted = {"root_path": "/a b", "raw_path": b"/a%20b" + READY.encode()}
        assert (await get(application, f"/a b{READY}", **mounted))[0] == 200
        assert (await get(application, READY, root_path="/a b"))[0] == 200
        assert (await get(application, f"/other{READY}"))[0] == 404
        await lifespan.say("shutdown")

    asyncio.run(run())


def test_a_worker_that_dies_is_replaced(orders: Orders) -> None:
    async def run() -> None:
        application = HostedApplication()
        lifespan = Lifespan(application)
        await lifespan.say("startup")
        (before,) = workers()
        os.kill(before, signal.SIGKILL)
        status, answer = await infer(application, 5.0)
        assert (status, answer["outputs"][0]["data"]) == (200, [10.0])
        assert workers() != [before]
        await lifespan.say("shutdown")

    asyncio.run(run())


def test_a_front_that_cannot_go_on_is_replaced(orders: Orders) -> None:
    async def run() -> None:
        application = HostedApplication()
        lifespan = Lifespan(application)
        await lifespan.say("startup")
        family = workers()
        assert application._server is not None
        front = application._server._front
        assert front is not None
        front.quit()
        await until(lambda: _has_left(application, front))
        await until(lambda: _is_ready(application))
        status, answer = await infer(application, 5.0)
        assert (status, answer["outputs"][0]["data"]) == (200, [10.0])
        assert workers() == family
        await lifespan.say("shutdown")

    asyncio.run(run())


async def _has_left(application: HostedApplication, front: object) -> bool:
    assert application._server is not None
    return application._server._front is not front


async def _is_ready(application: HostedApplication) -> bool:
    return (await get(application, READY))[0] == 200


def test_an_interpreter_that_is_not_embedded_keeps_its_environment() -> None:
    environ = {"LD_PRELOAD": "/lib/libtcmalloc.so", "PYTHONHOME": sys.prefix}
    executable = sys.executable
    leave_embedding(environ)
    assert environ == {"LD_PRELOAD": "/lib/libtcmalloc.so", "PYTHONHOME": sys.prefix}
    assert sys.executable == executable


def test_an_embedded_interpreter_leaves_what_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/sh")  # another program than the one that runs
    environ = {
        "LD_PRELOAD": "/x/libpython3.11.so.1.0:/lib/libtcmalloc.so",
        "PYTHONHOME": f"{sys.prefix}:{sys.exec_prefix}",
        "PYTHONPATH": "/app",
    }
    leave_embedding(environ)
    assert environ == {"LD_PRELOAD": "/lib/libtcmalloc.so", "PYTHONPATH": "/app"}
    assert sys.executable == str(Path(sys.prefix, "bin", "python3"))
